"""Faults inside ranks, for tests: a process that starts with this folder on its path looks, at the points of its
steps, for the fault that the file of FAULT_FILE has, as JSON {"rank", "point", "action", "row"}. It happens once; then
the file is gone. With "always" the file stays, and it happens each time. At the points "image" and "tokens" a rank
takes rows of images, and what guides need. A NaN is in all rows, or in one. {"rank", "token", "action"} happens
whenever a prompt has that token; with "decodes", whenever such a request begins to decode.
"""

import json
import os
import signal
import time
from array import array
from pathlib import Path

import torch
import torch.distributed as dist

import longhelix.compute.models.overlap as overlap
from longhelix.compute.runner.runner import ModelRunner
from longhelix.compute.runner.running_sequences import RunningSequences

_FILE = Path(os.environ["FAULT_FILE"])
_SLOW_S = 2.0
_rank = None
_poisoned = set()  # requests whose prompts had the token


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise():
    raise ArithmeticError("a fault of the test")


def _exhaust():
    torch.empty(1 << 50, dtype=torch.uint8)


_ACTIONS = {
    "kill": _kill,
    "stop": _stop,
    "raise": _raise,
    "out of memory": _exhaust,
    "slow": lambda: time.sleep(_SLOW_S),
}


def _reach(point, step=None):
    """Do what is to happen here. Returns which rows are to become NaN, if any."""
    try:
        fault = json.loads(_FILE.read_text())
    except FileNotFoundError:
        return None
    if "token" in fault:
        if step is not None and fault["rank"] == _rank and _comes(step, fault):
            _ACTIONS[fault["action"]]()
        return None
    if (fault["rank"], fault["point"]) != (_rank, point):
        return None
    if not fault.get("always"):
        _FILE.unlink()
    if fault["action"] == "NaN":
        return slice(None) if fault.get("row") is None else fault["row"]
    _ACTIONS[fault["action"]]()
    return None


def _comes(step, fault):
    found = {chunk.id for chunk in step.chunks if fault["token"] in array("i", chunk.token_ids)}
    begins = not _poisoned.isdisjoint(step.changes.joining)
    _poisoned.update(found)
    return begins if fault.get("decodes") else bool(found)


def _with_nan(rows, tensor):
    if rows is None:
        return tensor
    wrong = tensor.clone()
    wrong[rows] = torch.nan
    return wrong


def _take(point, take):
    def reach(taker, *values):
        global _rank
        _rank = dist.get_rank() if dist.is_initialized() else 0
        _reach(point)
        take(taker, *values)

    return reach


def _forward(runner, step, forward=ModelRunner.forward):
    global _rank
    _rank = runner.mesh.rank
    rows = _reach("prefill" if step.chunks else "decode", step)
    return _with_nan(rows, forward(runner, step))


def _exchange(*arguments, exchange=overlap.exchange):
    rows = _reach("exchange")
    return _with_nan(rows, exchange(*arguments))


ModelRunner.forward = _forward
ModelRunner.take_image_rows = _take("image", ModelRunner.take_image_rows)
RunningSequences.set_token_table = _take("tokens", RunningSequences.set_token_table)
overlap.exchange = _exchange
