"""The application for Ray Serve on a Ray of its own, without the dashboard.

python ray_program.py FOLDER PORT ARGUMENTS. FOLDER: Ray's files. ARGUMENTS: a JSON object of the application's
arguments. It prints a line when requests may come. Each line on standard input names a replica, which it then kills. A
second word `rank` means its ranks alone. The line `delete` deletes the application. It ends when standard input does.
"""

import json
import os
import sys

import psutil
import ray
from ray import serve

from longhelix.ray_serve import build


def main():
    folder, port, arguments = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    ray.init(
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
        _temp_dir=folder,
        _node_ip_address="127.0.0.1",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(arguments))
    print("ready", flush=True)
    for line in sys.stdin:
        if line == "delete\n":
            serve.delete("default", _blocking=False)
            print("deleted", flush=True)
            continue
        name, *what = line.split()
        replica = ray.get_actor(f"SERVE_REPLICA::default#EngineReplica#{name}", namespace="serve")
        process = psutil.Process(ray.get(replica.__ray_call__.remote(lambda self: os.getpid())))
        ranks = [each for each in process.children(recursive=True) if each.name().startswith("longhelix ")]
        for each in ranks if what else [process]:
            each.kill()
        print("killed", flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
