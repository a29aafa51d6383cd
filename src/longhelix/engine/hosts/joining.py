"""How an engine's process joins the other hosts, as the first host or as a follower."""

import secrets
import time
from dataclasses import asdict
from pathlib import Path

from longhelix.engine.hosts.cluster import Cluster
from longhelix.engine.hosts.follower import follow, tell
from longhelix.engine.hosts.membership import Membership, common_settings, kernels, model_fingerprint, versions
from longhelix.engine.hosts.messages import Hello
from longhelix.engine.options import EngineOptions
from longhelix.spec.layout import Layout


def join_hosts(options: EngineOptions, layout: Layout, model: Path) -> Cluster | None:
    """Join the other hosts. Returns the cluster on host 0, and None for an engine on one host.

    On other hosts, this function runs their ranks until the engine ends, and then raises SystemExit.

    Raises:
        UserError: the settings are wrong, or the hosts do not fit together or cannot reach each other.
    """
    membership = Membership.of(options, layout)
    if membership is None:
        return None
    process = secrets.token_hex(8)
    fingerprint, settings = model_fingerprint(model), common_settings(options)

    def hello(probe_port: int) -> Hello:
        return Hello(
            node_rank=membership.node_rank,
            process=process,
            facts=membership.facts(probe_port),
            time_s=time.time(),
            version=versions(),
            kernels=kernels(),
            nnodes=membership.nnodes,
            model=fingerprint,
            layout=", ".join(f"{name} {value}" for name, value in asdict(layout).items() if value is not None),
            settings=settings,
        )

    if membership.node_rank == 0:
        return Cluster(membership, hello, tell)
    follow(membership, hello, str(model), tell)
    raise SystemExit(0)
