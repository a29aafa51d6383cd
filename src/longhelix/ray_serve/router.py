"""Ray's router by prefix and load, with time limits and without requests that hang."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import ray

# The public name is ray.serve.llm.request_router.PrefixCacheAffinityRouter, but that module needs vLLM.
from ray.exceptions import RayActorError
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTreeActor
from ray.serve._private.common import ReplicaID
from ray.serve._private.replica_result import ReplicaResult
from ray.serve._private.request_router import PowerOfTwoChoicesRequestRouter
from ray.serve._private.request_router.common import PendingRequest
from ray.serve._private.request_router.replica_wrapper import RunningReplica
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from longhelix.serve.refusals import NoReplicaError

IS_READY = "is_ready"  # in the statistics of a replica: whether it accepts requests
ROUTING = {
    # By default, the router ignores the load, and its prefixes grow without limit.
    "imbalanced_threshold": 8,
    "do_eviction": True,
    "eviction_threshold_chars": 64_000_000,
    "eviction_target_chars": 56_000_000,
}
_TRIES = 3
_MOST_WAIT_S = 60.0  # for a replica. Ray's autoscaler needs 30 s to see that a request waits


class PrefixRouter(PrefixCacheAffinityRouter):
    """Chooses the replica of each request.

    It differs from Ray's router in the following:

    - The actor that stores prefixes reserves no core, and ends with the router. With a core it could never start on a
      machine whose cores all belong to replicas. If it outlived the router, it would know replicas that have ended.
    - If that actor ends, another one starts, without prefixes. With Ray's router, requests would wait forever.
    - Replicas that restart their engine get no requests, unless there is no other.
    - If the chosen replica does not tell its load within 0.1, 0.2 and 0.4 s, the request goes to any replica.
    - A request waits at most 60 s for a replica.
    - The router asks for the load of the replicas each time. After a burst, Ray's cache is wrong for 10 s.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Take the settings of Ray's router, see `PrefixCacheAffinityRouter.initialize_state`."""
        super().initialize_state(**settings, tree_actor=_prefixes())
        self._use_replica_queue_len_cache = False

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the running replicas."""
        with self._replaces_lost_prefixes():
            super().update_replicas(replicas)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget a replica that has ended."""
        with self._replaces_lost_prefixes():
            super().on_replica_actor_died(replica_id)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        """Store the prompt of a request that a replica has received."""
        with self._replaces_lost_prefixes():
            super().on_request_routed(pending_request, replica_id, result)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return groups of replicas, tried in turn. In a group, the one with the fewest requests is chosen."""
        found = None
        with self._replaces_lost_prefixes():
            found = await super().choose_replicas(candidate_replicas, pending_request)
        if found is None:
            found = await PowerOfTwoChoicesRequestRouter.choose_replicas(self, candidate_replicas, pending_request)
        all_ready = [each for each in candidate_replicas if _is_ready(each)] or candidate_replicas
        chosen = [each for group in found for each in group if each in all_ready]
        return [chosen] * _TRIES + [all_ready]

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        try:
            async with asyncio.timeout(_MOST_WAIT_S):
                return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        except TimeoutError as error:
            raise NoReplicaError from error

    @contextlib.contextmanager
    def _replaces_lost_prefixes(self) -> Iterator[None]:
        try:
            yield
        except RayActorError:
            self._tree_actor, self._eviction_loop_running = _prefixes(), False
            replicas = [each.to_full_id_str() for each in self._replica_id_set]
            # Nobody waits for these: the next request waits for what it asks itself.
            self._tree_actor.add_tenants.remote(replicas, time.time())
            self._tree_actor.start_eviction_loop.remote(
                self._eviction_threshold_chars, self._eviction_target_chars, self._eviction_interval_secs
            )
            self._eviction_loop_running = True


def _prefixes() -> Any:
    """Start the actor that stores prefixes, on the router's own node, because the router waits for its answers."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return PrefixTreeActor.options(num_cpus=0, scheduling_strategy=here).remote()


def _is_ready(replica: RunningReplica) -> bool:
    return replica.routing_stats.get(IS_READY, True)
