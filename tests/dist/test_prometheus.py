"""A real Prometheus that reads a real server as deploy/ says: each of the dashboard's expressions has an answer."""

import contextlib
import json
import math
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
import yaml
from serving_process import serving

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,  # Prometheus has to read several times
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="the program prometheus is not installed"),
]

DEPLOY = Path(__file__).parents[2] / "deploy"
KEY = "the-key"


def expressions():
    """By the panel's title and the legend: what Grafana would ask for."""
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            asked = target["expr"].replace("$model_name", "builtin").replace("$__rate_interval", "60s")
            yield f"{panel['title']}: {target['legendFormat']}", asked


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def prometheus(folder, url):
    """One that reads the server every second, as the scrape file has it otherwise; its URL."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [url.removeprefix("http://")]}]
    (folder / "key").write_text(KEY)
    job["authorization"] = {"credentials_file": str(folder / "key")}
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    at = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={at}"]
    with (folder / "log").open("w") as log, subprocess.Popen(["prometheus", *flags], stderr=log) as process:
        try:
            yield f"http://{at}"
        finally:
            process.terminate()
            process.wait(60)


def asked(at, expression):
    answer = httpx.get(f"{at}/api/v1/query", params={"query": expression}, timeout=30).json()
    assert answer["status"] == "success", (expression, answer)
    return [float(found["value"][1]) for found in answer["data"]["result"]]


def test_every_panel_has_data(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    flags = ["--kvp", "2", "--kv-cache-tokens", "8192", "--max-model-len", "2048", "--api-key-file", str(keys)]
    with serving(*flags) as server, prometheus(tmp_path, server.url) as at:
        over = threading.Event()

        def load():
            with httpx.Client(base_url=server.url, timeout=120, headers={"authorization": f"Bearer {KEY}"}) as client:
                while not over.is_set():
                    client.post("/v1/completions", json={"prompt": [7] * 200, "max_tokens": 8, "ignore_eos": True})
                    client.post("/v1/completions", json={"prompt": ""})

        loading = threading.Thread(target=load)
        loading.start()
        try:
            deadline_s, left = time.monotonic() + 120, dict(expressions())
            assert len(left) > 40
            while left and time.monotonic() < deadline_s:
                time.sleep(1)
                with contextlib.suppress(httpx.TransportError):  # it has only just been started
                    values = {name: asked(at, expression) for name, expression in left.items()}
                    left = {
                        name: expression
                        for name, expression in left.items()
                        if not values[name] or not all(map(math.isfinite, values[name]))
                    }
        finally:
            over.set()
            loading.join()
        assert left == {}
        assert asked(at, 'up{job="longhelix"}') == [1.0]
        assert asked(at, "sum(longhelix:request_success_total)")[0] > 0
