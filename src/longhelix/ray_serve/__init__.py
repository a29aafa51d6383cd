"""An application for Ray Serve: replicas of longhelix, and Ray's router in front of them. Needs longhelix[ray].

`serve run longhelix.ray_serve:build model=builtin device=cpu num_replicas=2` starts it.
"""

from typing import Any

from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from longhelix.cli.replicas import application_options
from longhelix.ray_serve.ingress import Ingress
from longhelix.ray_serve.replica import EngineReplica
from longhelix.ray_serve.router import ROUTING, PrefixRouter

_NO_LIMIT = 1_000_000  # requests; the replicas refuse requests when too many wait
_CLOSE_S = 30.0  # for closing the engine, if the last request has taken all of `drain`


def build(arguments: dict[str, Any]) -> Application:
    """Return the application.

    Args:
        arguments: `num_replicas`, `threads_per_rank`, and options of `longhelix serve` by name.

    Raises:
        UserError: a name is unknown, or a value is invalid.
    """
    options = application_options(arguments)
    replica = options.replica
    # Ray kills a deployment that has not ended by then, with its running requests.
    shared = {"max_ongoing_requests": _NO_LIMIT, "graceful_shutdown_timeout_s": replica.server.drain + _CLOSE_S}
    replicas = EngineReplica.options(
        num_replicas=options.num_replicas,
        ray_actor_options={"num_cpus": replica.num_cpus, "num_gpus": replica.num_gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs=ROUTING,
            request_routing_stats_period_s=1.0,
        ),
        **shared,
    )
    # Ray restarts a deployment if its arguments change, so they do not contain the number of replicas.
    return Ingress.options(**shared).bind(replicas.bind(replica), replica)
