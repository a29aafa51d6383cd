"""A host with another version of longhelix, or another time. Python imports this file if PYTHONPATH has its folder."""

import importlib.metadata
import os
import time

_version, _time = importlib.metadata.version, time.time

if "ODD_VERSION" in os.environ:
    importlib.metadata.version = lambda name: os.environ["ODD_VERSION"] if name == "longhelix" else _version(name)
if "ODD_CLOCK_S" in os.environ:
    time.time = lambda: _time() + float(os.environ["ODD_CLOCK_S"])
