"""Cores of a machine that belong to one replica each."""

import os
import socket

from longhelix.errors import UserError


def take_cores(number: int) -> list[socket.socket]:
    """Run this thread, and the processes that it starts, on cores that no other replica on this machine uses.

    Returns:
        Sockets that are bound to the names of the cores. A core is free again when its socket is closed, also if this
        process is killed.

    Raises:
        UserError: too few cores are free.
    """
    taken: dict[int, socket.socket] = {}
    for core in sorted(os.sched_getaffinity(0)):
        if len(taken) == number:
            break
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0longhelix core {core}")
        except OSError:
            name.close()
        else:
            taken[core] = name
    if len(taken) < number:
        raise UserError(
            f"a replica needs {number} cores, but only {len(taken)} cores of this machine are free: start Ray with at "
            "most as many CPUs as the machine has cores, or set a smaller threads_per_rank"
        )
    os.sched_setaffinity(0, taken)
    return list(taken.values())
