"""A server in this process, over an engine of its own."""

import contextlib
import threading

import httpx
import pytest

from longhelix import LLM, Layout
from longhelix.serve.driver import Driver, Limits, Recovery
from longhelix.serve.gate import Admission
from longhelix.serve.server import Address, _Server, run
from longhelix.serve.serving import Serving

MOST_BODY_BYTES = 1_000_000
LIMITS, RECOVERY = Limits(64, 1_000_000), Recovery()


@contextlib.contextmanager
def served(limits=LIMITS, keys=(), recovery=RECOVERY, model="builtin", layout=None, **settings):
    """A client of the server, and the engine behind it: of the built-in model over two ranks, if nothing else is
    said."""
    settings = {"kv_cache_tokens": 8192, "max_model_len": 2048} | settings
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
            thread = threading.Thread(target=run, args=(serving, Admission(keys, MOST_BODY_BYTES), address, on_ready))
            thread.start()
            assert ready.wait(60)
        try:
            with httpx.Client(base_url=found[0], timeout=60) as client:
                yield client, llm
        finally:
            servers[0].should_exit = True
            thread.join()
