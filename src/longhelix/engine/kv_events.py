"""KV events: tell routers over ZeroMQ which prompts this engine has cached, in the form of vLLM's events."""

import ipaddress
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, Self

import msgspec
import zmq

from longhelix.engine.options import EngineOptions
from longhelix.errors import UserError
from longhelix.scheduler.cache_record import CacheChanges, RemovedBlock, StoredBlock, Tier
from longhelix.spec.attention import Visibility

_MEDIA: dict[Tier, str] = {"pool": "GPU", "swap": "CPU"}  # vLLM's names of tiers, also for engines without GPUs
_END = (-1).to_bytes(8, "big", signed=True)  # in place of a sequence number, after the last replayed batch
_MOST_BATCHES = 10_000  # that are kept for replays
_MOST_BYTES = 2**28  # of these batches
_MOST_UNDER_WAY = 1000  # messages of a replay that its reader has not taken yet
_HEARTBEAT_MS = 5000
_SEND_MS = 1000  # how long a replay waits for a slow reader before it is given up


class _Event(msgspec.Struct, array_like=True, tag=True):
    """Encoded as an array: the name of the class, then its fields."""


class BlockStored(_Event):
    """KV blocks that follow each other can be found from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # None if the first block is the first of a prompt
    token_ids: list[int]  # of all blocks
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[tuple[str, ...] | None] | None  # salt and images of each block; None if no block has any


class GroupBlockStored(BlockStored, tag="BlockStored"):
    """KV blocks of one KV group can be found from now on. For models with several KV groups."""

    group_idx: int  # 0: layers whose rows see everything; then those with a limit
    kv_cache_spec_kind: str
    kv_cache_spec_sliding_window: int | None  # tokens of the window or the chunk


class BlockRemoved(_Event):
    """KV blocks are found no longer."""

    block_hashes: list[int]
    medium: str


class GroupBlockRemoved(BlockRemoved, tag="BlockRemoved"):
    """KV blocks of one KV group are found no longer."""

    group_idx: int


class AllBlocksCleared(_Event):
    """No block is found any longer."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True):
    """The payload of one message."""

    ts: float  # seconds since 1970
    events: list[KVEvent]
    data_parallel_rank: int = 0  # an engine is one instance to a router, whatever its layout


class KVEventPublisher:
    """Publishes batches of events on a PUB socket, and sends past ones again on a ROUTER socket.

    A message has three frames: the topic, a sequence number of 8 bytes (big-endian, from 0) and the batch in
    MessagePack. A reader that has missed messages sends the first missing number to the replay endpoint. It then gets
    this message and all later ones that are still kept, and an empty one with the number -1. Readers that are too slow
    lose messages. They never delay the engine.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        topic: str,
        block_tokens: int,
        limits: Sequence[Visibility] = (),
    ) -> None:
        """Bind the sockets.

        Args:
            endpoint: address of the PUB socket.
            replay_endpoint: address of the ROUTER socket. If None, there are no replays.
            topic: first frame of each message.
            block_tokens: number of tokens in a KV block.
            limits: what the rows of each KV group with a limit see.

        Raises:
            UserError: an address cannot be bound.
        """
        self._topic = topic.encode()
        self._events = _Events(block_tokens, limits)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()  # guards the three below
        self._next_sequence = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self._context = zmq.Context()
        try:
            self._publishing = self._bound(zmq.PUB, endpoint, _MOST_BATCHES)
            if replay_endpoint is not None:
                replaying = self._bound(zmq.ROUTER, replay_endpoint, _MOST_UNDER_WAY)
                replaying.router_mandatory = True  # or messages to slow readers are dropped in silence
                replaying.sndtimeo = _SEND_MS
                threading.Thread(target=self._answer, args=(replaying,), name="kv-event-replay", daemon=True).start()
        except BaseException:
            self._context.destroy(linger=0)
            raise

    @classmethod
    def of(cls, options: EngineOptions, limits: Sequence[Visibility]) -> Self | None:
        """Return the publisher that the options ask for, or None if they ask for none.

        Raises:
            UserError: the options cannot be used together, or an address cannot be bound.
        """
        if options.kv_events_endpoint is None:
            for name in ("kv_events_replay_endpoint", "kv_events_topic"):
                if getattr(options, name):
                    raise UserError(f"{name} is set, but there are no KV events: set kv_events_endpoint too")
            return None
        if not options.prefix_cache:
            raise UserError(
                "kv_events_endpoint publishes what the prefix cache holds, but prefix_cache is False: set it to True, "
                "or leave out kv_events_endpoint"
            )
        for endpoint in filter(None, (options.kv_events_endpoint, options.kv_events_replay_endpoint)):
            if not (options.allow_without_key or _is_local(endpoint)):
                raise UserError(
                    f"other machines can read the tokens of all prompts at {endpoint}: use a loopback address such as "
                    "tcp://127.0.0.1:5557, or set allow_without_key to True if only routers reach the port"
                )
        return cls(
            endpoint=options.kv_events_endpoint,
            replay_endpoint=options.kv_events_replay_endpoint,
            topic=options.kv_events_topic or "",
            block_tokens=options.block_tokens,
            limits=limits,
        )

    def publish(self, changes: CacheChanges) -> None:
        """Publish changes of the prefix cache as one batch."""
        # A block that moves to another tier is stored there before it is removed here, so that readers keep its tokens.
        self._send([*self._events.stored(changes.stored), *self._events.removed(changes.removed)])

    def clear(self) -> None:
        """Publish that the prefix cache is empty."""
        self._send([AllBlocksCleared()])

    def close(self) -> None:
        """Close the sockets. You may call this method more than once."""
        with self._lock:
            self._publishing.close(linger=0)
        self._context.term()  # waits until the thread has closed its socket

    def _bound(self, kind: int, endpoint: str, most_waiting: int) -> zmq.Socket[bytes]:
        """Return a socket that keeps at most so many messages for each reader."""
        bound = self._context.socket(kind)
        bound.sndhwm = most_waiting  # before `bind`, or it has no effect
        bound.ipv6 = "[" in endpoint
        bound.linger = 0
        bound.heartbeat_ivl = _HEARTBEAT_MS  # or messages for a reader whose machine is gone are kept
        try:
            bound.bind(endpoint)
        except zmq.ZMQError as error:
            raise UserError(
                f"KV events cannot be published at {endpoint} ({error}): use a free port of an address of this host"
            ) from error
        return bound

    def _send(self, events: list[KVEvent]) -> None:
        payload = self._encoder.encode(KVEventBatch(time.time(), events))
        with self._lock:
            sequence = self._next_sequence
            self._next_sequence += 1
            self._kept.append((sequence, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > _MOST_BATCHES or self._kept_bytes > _MOST_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])
            self._publishing.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])

    def _answer(self, replaying: zmq.Socket[bytes]) -> None:
        """Answer requests for past messages until the context is closed."""
        with replaying:
            while True:
                try:
                    self._replay(replaying, replaying.recv_multipart())
                except zmq.ContextTerminated:
                    return
                except zmq.ZMQError:  # the reader is gone or does not read
                    continue

    def _replay(self, replaying: zmq.Socket[bytes], request: list[bytes]) -> None:
        match request:
            case [reader, b"", number] if len(number) == 8:
                first = int.from_bytes(number, "big")
            case _:
                return
        with self._lock:
            found = [(sequence, payload) for sequence, payload in self._kept if sequence >= first]
        for sequence, payload in found:
            replaying.send_multipart([reader, b"", self._topic, sequence.to_bytes(8, "big"), payload])
        replaying.send_multipart([reader, b"", b"", _END, b""])


class _Events(NamedTuple):
    """Makes events of changes.

    limits: what the rows of each KV group with a limit see. Without any, events have no fields of groups.
    """

    block_tokens: int
    limits: Sequence[Visibility]

    def stored(self, blocks: Iterable[StoredBlock]) -> list[KVEvent]:
        """Return one event for each run of blocks that follow each other."""
        runs: list[list[StoredBlock]] = []
        for block in blocks:
            last = runs[-1][-1] if runs else None
            place = block.group, block.tier, block.content.parent
            if last is not None and (last.group, last.tier, last.content_hash) == place:
                runs[-1].append(block)
            else:
                runs.append([block])
        return [self._stored_run(run) for run in runs]

    def _stored_run(self, run: list[StoredBlock]) -> BlockStored:
        parent, has_keys = run[0].content.parent, any(block.content.keys for block in run)
        stored = BlockStored(
            block_hashes=[_number(block.content_hash) for block in run],
            parent_block_hash=None if parent is None else _number(parent),
            token_ids=array("i", b"".join(block.content.token_bytes for block in run)).tolist(),
            block_size=self.block_tokens,
            lora_id=None,
            medium=_MEDIA[run[0].tier],
            lora_name=None,
            extra_keys=[block.content.keys or None for block in run] if has_keys else None,
        )
        if not self.limits:
            return stored
        group = run[0].group
        kind, tokens = self._kind(group)
        return GroupBlockStored(
            **msgspec.structs.asdict(stored),
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=tokens,
        )

    def _kind(self, group: int) -> tuple[str, int | None]:
        """vLLM's name of what the rows of a group see, and its tokens."""
        if group == 0:
            return "full_attention", None
        limit = self.limits[group - 1]
        kind = "chunked_local_attention" if limit.window_tokens is None else "sliding_window"
        return kind, limit.limit_tokens

    def removed(self, blocks: Iterable[RemovedBlock]) -> list[KVEvent]:
        """Return one event for each run of blocks of one group and tier."""
        runs = groupby(blocks, key=attrgetter("group", "tier"))
        numbers = [(group, _MEDIA[tier], [_number(one.content_hash) for one in run]) for (group, tier), run in runs]
        if not self.limits:
            return [BlockRemoved(hashes, medium) for _, medium, hashes in numbers]
        return [GroupBlockRemoved(hashes, medium, group) for group, medium, hashes in numbers]


def _number(content_hash: bytes) -> int:
    """Return the last 64 bits of a hash, which are what routers tell blocks apart by."""
    return int.from_bytes(content_hash[-8:], "big")


def _is_local(endpoint: str) -> bool:
    """Whether only this host can reach an address."""
    scheme, _, place = endpoint.partition("://")
    host = place.rpartition(":")[0].strip("[]")
    return scheme == "ipc" or (host != "*" and ipaddress.ip_address(host).is_loopback)
