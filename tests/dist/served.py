"""A server over a real engine in this process, as tests ask it."""

import contextlib
import json
import threading
import time

import httpx
import pytest

from longhelix import LLM, Layout
from longhelix.serve.driver import Driver, Limits
from longhelix.serve.engine_thread import Recovery
from longhelix.serve.gate import AccessControl
from longhelix.serve.server import Address, _Server, run
from longhelix.serve.serving import Serving

MOST_BODY_BYTES = 1_000_000
LIMITS, RECOVERY = Limits(64, 1_000_000), Recovery()
SMALL = {"kv_cache_tokens": 8192, "max_model_len": 2048}


@contextlib.contextmanager
def served(limits=LIMITS, keys=(), recovery=RECOVERY, model="builtin", layout=None, **settings):
    """A client of a server in this process, and the engine behind it, of two ranks if nothing else is said."""
    settings = (SMALL if model == "builtin" else {}) | settings
    with LLM(model, Layout(kvp=2) if layout is None else layout, **settings) as llm:
        found, servers = [], []
        ready = threading.Event()

        def on_ready(url):
            found.append(url)
            ready.set()

        serving = Serving(llm, Driver(llm, limits, recovery), "small", 0)
        started = _Server.startup

        async def startup(self, sockets=None):
            servers.append(self)
            await started(self, sockets)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_Server, "startup", startup)
            address = Address("127.0.0.1", 0, drain_s=5)
            admission = AccessControl(keys, MOST_BODY_BYTES, address.is_loopback)
            thread = threading.Thread(target=run, args=(serving, admission, address, on_ready))
            thread.start()
            came = ready.wait(60)  # not within the assert, which -O leaves out of files that pytest does not rewrite
            assert came
        try:
            with httpx.Client(base_url=found[0], timeout=60) as client:
                yield client, llm
        finally:
            servers[0].should_exit = True
            thread.join()


def events(response):
    """What a stream has, which ends with [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def settled(client, llm):
    """Nothing runs, and all KV blocks are free on every rank."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        found = client.get("/health").json()
        if found["running"] == found["waiting"] == 0 and not llm.has_work:
            pool = llm._core._scheduler.pool
            return [allocator.available for allocator in pool.allocators] == [llm.config.scheduler.num_blocks] * 2
        time.sleep(0.05)
    return False
