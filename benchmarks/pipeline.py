"""One long prefill on two ranks: pipeline stages, TP and Helix, over shared memory and over a slow link.

Two ranks of one thread each compute a prompt in chunks, as they would in an engine that keeps the stages busy. Over
shared memory, then over gloo between two network namespaces whose link `tc` slows down; a row for each layout and chunk
size, layouts in turn, medians. Needs Linux, root, and the programs ip and tc (package iproute2).

    python benchmarks/pipeline.py [--prompt 16000] [--chunks 512 2048] [--rate-mbit 1000] [--repeats 3]
"""

import argparse
import itertools
import json
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from two_ranks import run_ranks

from longhelix.measure.link import LOOPBACK, RANKS, join, missing

LAYOUTS = {"pp 2": {"pp": 2}, "tpa 2": {"tpa": 2}, "kvp 2": {"kvp": 2}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--prompt", type=int, default=16_000)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--rate-mbit", type=float, default=1000, help="of the link, each direction")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return measure(arguments)
    if (lacking := missing()) is not None:
        print(f"error: {lacking}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks do not stay behind
    found = {}
    with tempfile.TemporaryDirectory(prefix="longhelix-pipeline-") as directory:
        run_ranks([*sys.argv[1:], "--directory", directory, "--backend", "shm"])
        found["shared memory"] = json.loads((Path(directory) / "rows.json").read_text())
    with tempfile.TemporaryDirectory(prefix="longhelix-pipeline-") as directory:
        run_ranks([*sys.argv[1:], "--directory", directory, "--backend", "gloo"])
        found[f"{arguments.rate_mbit:g} Mbit/s"] = json.loads((Path(directory) / "rows.json").read_text())
    report(arguments, found)
    return 0


def measure(arguments: argparse.Namespace) -> int:
    """One rank; the first writes the rows."""
    import torch
    import torch.distributed as dist

    from longhelix.compute.kernels import native
    from longhelix.compute.models.model_files import open_checkpoint
    from longhelix.compute.parallel.mesh import Mesh
    from longhelix.compute.runner.rank import meet
    from longhelix.engine.options import EngineOptions
    from longhelix.engine.resolution import resolve
    from longhelix.measure.model import RankModel, prefill_steps
    from longhelix.spec.layout import Layout

    native.set_num_threads(1)
    link = LOOPBACK
    if arguments.backend == "gloo":
        link = join(arguments.rank, arguments.directory)
        link.limit(arguments.rate_mbit)
    meet(len(RANKS), arguments.rank, arguments.directory, interface=link.device)
    options = EngineOptions(
        max_model_len=arguments.prompt, kv_cache_tokens=2 * arguments.prompt, chunk_tokens=512, device="cpu"
    )
    checkpoint = open_checkpoint(arguments.model)
    models = {}
    for name, degrees in LAYOUTS.items():
        config = resolve(checkpoint, Layout(**degrees), options)
        models[name] = RankModel(config, Mesh.build(config.layout, arguments.rank, arguments.backend))
    prompt = tuple(torch.randint(1000, 40_000, (arguments.prompt,), generator=torch.manual_seed(0)).tolist())

    def seconds(model: RankModel, chunk_tokens: int) -> tuple[float, float]:
        """Of a whole prompt, and of them those that this rank waited for other stages."""
        scheduler = model.config.scheduler
        scheduler = replace(scheduler, steps=replace(scheduler.steps, chunk_tokens=chunk_tokens))
        model.config = replace(model.config, scheduler=scheduler)
        runner, pipeline = model.runner(arguments.prompt), model.mesh.pipeline
        steps = list(prefill_steps(model, 0, prompt))
        waited_s = 0.0 if pipeline is None else pipeline.waited_s
        dist.barrier()
        began_s = time.perf_counter()
        runner.expect(steps[0])
        for step, following in itertools.zip_longest(steps, steps[1:]):
            if following is not None:
                runner.expect(following)
            runner.execute(step)
        dist.barrier()
        took_s = time.perf_counter() - began_s
        runner.receive_all_tokens()
        return took_s, 0.0 if pipeline is None else pipeline.waited_s - waited_s

    rows = []
    for chunk_tokens in arguments.chunks:
        times = {name: [] for name in models}
        for _ in range(arguments.repeats):
            for name, model in models.items():
                times[name].append(seconds(model, chunk_tokens))
        for name, pairs in times.items():
            took_s = statistics.median(took_s for took_s, _ in pairs)
            waited_s = statistics.median(waited_s for _, waited_s in pairs)
            waits = [torch.zeros(1, dtype=torch.float64) for _ in RANKS]
            dist.all_gather(waits, torch.tensor([waited_s], dtype=torch.float64))
            rows.append((name, chunk_tokens, took_s, [float(wait) for wait in waits]))
    if arguments.rank == 0:
        (arguments.directory / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    return 0


def report(arguments: argparse.Namespace, found: dict[str, list]) -> None:
    from longhelix.measure.bench.environment import environment

    conditions = environment("")
    print(
        f"{conditions['cpu']}, {conditions['cores']} cores, torch {conditions['torch']}, commit "
        f"{conditions['commit']}; load averages after the runs {conditions['load_average']}; {arguments.model}, a "
        f"prompt of {arguments.prompt} tokens on two ranks of one thread, medians of {arguments.repeats}; the link: a "
        "veth pair, tbf.\n"
    )
    print("| between ranks | chunk | layout | prefill, s | against pp 2 | waits for the other stage, s, ranks 0, 1 |")
    print("|---|--:|---|--:|--:|--:|")
    for transport, rows in found.items():
        piped = {chunk: took_s for name, chunk, took_s, _ in rows if name == "pp 2"}
        for name, chunk, took_s, waits in rows:
            waited = ", ".join(f"{wait:.1f}" for wait in waits) if name == "pp 2" else ""
            print(f"| {transport} | {chunk} | {name} | {took_s:.1f} | {took_s / piped[chunk]:.2f} | {waited} |")


if __name__ == "__main__":
    raise SystemExit(main())
