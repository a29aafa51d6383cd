"""What launchers tell the processes that they start on several hosts: torchrun and Slurm."""

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from longhelix.engine.options import EngineOptions
from longhelix.errors import UserError

_FIRST = re.compile(r"([^,\[\]]+)(?:\[(\d+)[^\]]*\]([^,\[\]]*))?")


def with_launcher(options: EngineOptions, environment: Mapping[str, str] = os.environ) -> EngineOptions:
    """Return the options with the hosts that a launcher has chosen. Options that the user gave stay.

    Raises:
        UserError: the launcher started processes in a way that longhelix does not support.
    """
    if options.nnodes is not None:
        return options
    found = _of_torchrun(environment) or _of_slurm(environment)
    if found is None:
        return options
    nnodes, node_rank, address = found
    return replace(options, nnodes=nnodes, node_rank=node_rank, master_addr=options.master_addr or address)


def _of_torchrun(environment: Mapping[str, str]) -> tuple[int, int, str] | None:
    """Return the number of hosts, the number of this host, and the address of the first. None without several hosts."""
    if "TORCHELASTIC_RUN_ID" not in environment or environment["GROUP_WORLD_SIZE"] == "1":
        return None
    return int(environment["GROUP_WORLD_SIZE"]), int(environment["GROUP_RANK"]), environment["MASTER_ADDR"]


def _of_slurm(environment: Mapping[str, str]) -> tuple[int, int, str] | None:
    """Return the same for a job step of srun, which must have one task per host."""
    nodes, tasks = environment.get("SLURM_STEP_NUM_NODES", "1"), environment.get("SLURM_STEP_NUM_TASKS", "1")
    if nodes == "1":
        return None
    if tasks != nodes:
        raise UserError(
            f"srun started {tasks} tasks on {nodes} hosts: start one task per host, with --ntasks-per-node 1, which "
            "starts all ranks of the host",
            "invalid_cluster",
        )
    first = _FIRST.match(environment["SLURM_STEP_NODELIST"])
    assert first is not None
    return int(nodes), int(environment["SLURM_NODEID"]), "".join(part or "" for part in first.groups())
