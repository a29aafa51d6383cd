"""KV events as routers get them: frames, MessagePack arrays and replays, byte by byte."""

import struct
from array import array

import msgspec
import pytest
import zmq

from longhelix import UserError
from longhelix.engine import kv_events
from longhelix.engine.kv_events import KVEventPublisher
from longhelix.engine.options import EngineOptions
from longhelix.scheduler.cache_record import BlockContent, CacheChanges, RemovedBlock, StoredBlock
from longhelix.spec.attention import Visibility

pytestmark = pytest.mark.unit

WAIT_MS = 30_000


def digest(number):
    """Of which routers see the last 64 bits."""
    return bytes(24) + number.to_bytes(8, "big")


def block(number, parent, tokens, tier="pool", keys=()):
    content = BlockContent(None if parent is None else digest(parent), array("i", tokens).tobytes(), keys)
    return StoredBlock(tier, digest(number), content)


def stored(*blocks):
    return CacheChanges(blocks, ())


def unpacked(data):
    """What MessagePack bytes say, read by hand. Returns it and the bytes behind it."""
    kind, rest = data[0], data[1:]
    if kind < 0x80:
        return kind, rest
    if 0x90 <= kind < 0xA0:
        items = []
        for _ in range(kind - 0x90):
            item, rest = unpacked(rest)
            items.append(item)
        return items, rest
    if 0xA0 <= kind < 0xC0:
        size = kind - 0xA0
        return rest[:size].decode(), rest[size:]
    if kind == 0xC0:
        return None, rest
    form = {0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}[kind]
    size = struct.calcsize(form)
    return struct.unpack(form, rest[:size])[0], rest[size:]


class Router:
    """Sockets of a publisher and of its reader."""

    def __init__(self, folder, topic="", block_tokens=2, limits=()):
        events, replays = f"ipc://{folder}/events", f"ipc://{folder}/replays"
        self.publisher = KVEventPublisher(events, replays, topic, block_tokens, limits)
        self.context = zmq.Context()
        self.reading, self.asking = self.context.socket(zmq.SUB), self.context.socket(zmq.DEALER)
        self.reading.subscribe(topic)
        for socket, endpoint in ((self.reading, events), (self.asking, replays)):
            socket.rcvtimeo, socket.linger = WAIT_MS, 0
            socket.connect(endpoint)
        self.reading.rcvtimeo = 100
        while not self._joined():
            pass
        self.reading.rcvtimeo = WAIT_MS
        self.first = self.publisher._next_sequence

    def _joined(self):
        """A reader gets messages from a while after it has connected on."""
        self.publisher.clear()
        try:
            self.read()
        except zmq.Again:
            return False
        while self.reading.poll(100):
            self.read()
        return True

    def read(self):
        topic, sequence, payload = self.reading.recv_multipart()
        self.topic = topic
        return int.from_bytes(sequence, "big"), payload

    def events(self):
        (_, events, rank), rest = unpacked(self.read()[1])
        assert (rank, rest) == (0, b"")
        return events

    def replayed(self, first):
        self.asking.send_multipart([b"", first.to_bytes(8, "big")])
        found = []
        while True:
            empty, topic, sequence, payload = self.asking.recv_multipart()
            assert empty == b""
            if sequence == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                return found
            assert topic == self.topic
            found.append((int.from_bytes(sequence, "big"), payload))

    def close(self):
        self.publisher.close()
        self.context.destroy(linger=0)


@pytest.fixture
def router(tmp_path):
    router = Router(tmp_path, "kv@pod@model")
    yield router
    router.close()


def test_blocks_that_follow_each_other_are_one_event(router):
    router.publisher.publish(
        stored(
            block(1, None, [5, 300]), block(2**64 - 1, 1, [70_000, 8]), block(3, 1, [9, 9]), block(3, 1, [9, 9], "swap")
        )
    )
    assert router.events() == [
        ["BlockStored", [1, 2**64 - 1], None, [5, 300, 70_000, 8], 2, None, "GPU", None, None],
        ["BlockStored", [3], 1, [9, 9], 2, None, "GPU", None, None],
        ["BlockStored", [3], 1, [9, 9], 2, None, "CPU", None, None],
    ]
    assert router.topic == b"kv@pod@model"


def test_models_with_several_groups_have_events_of_each(tmp_path):
    """vLLM's fields of groups come last. Runs of blocks are of one group."""
    router = Router(tmp_path, limits=[Visibility(window_tokens=512), Visibility(chunk_tokens=8192)])
    first = block(1, None, [5, 3])
    removed = [RemovedBlock("pool", digest(1)), RemovedBlock("pool", digest(2), 2), RemovedBlock("pool", digest(3), 2)]
    router.publisher.publish(CacheChanges([first, first._replace(group=1), first._replace(group=2)], removed))
    content = [1], None, [5, 3], 2, None, "GPU", None, None
    assert router.events() == [
        ["BlockStored", *content, 0, "full_attention", None],
        ["BlockStored", *content, 1, "sliding_window", 512],
        ["BlockStored", *content, 2, "chunked_local_attention", 8192],
        ["BlockRemoved", [1], "GPU", 0],
        ["BlockRemoved", [2, 3], "GPU", 2],
    ]
    router.close()


def test_removed_blocks_are_told_after_stored_ones(router):
    removed = [RemovedBlock("pool", digest(1)), RemovedBlock("pool", digest(2)), RemovedBlock("swap", digest(3))]
    router.publisher.publish(CacheChanges([block(4, None, [1, 2])], removed))
    assert router.events() == [
        ["BlockStored", [4], None, [1, 2], 2, None, "GPU", None, None],
        ["BlockRemoved", [1, 2], "GPU"],
        ["BlockRemoved", [3], "CPU"],
    ]


def test_salts_and_images_are_extra_keys(router):
    router.publisher.publish(stored(block(1, None, [1, 2], keys=("salt", "ab")), block(2, 1, [3, 4])))
    assert router.events() == [
        ["BlockStored", [1, 2], None, [1, 2, 3, 4], 2, None, "GPU", None, [["salt", "ab"], None]],
    ]


def test_a_cleared_cache_is_a_tag_alone(router, monkeypatch):
    monkeypatch.setattr(kv_events.time, "time", lambda: 1.5)
    router.publisher.clear()
    _, payload = router.read()
    assert payload == b"\x93\xcb" + struct.pack(">d", 1.5) + b"\x91\x91\xb0AllBlocksCleared\x00"


def test_missed_messages_are_sent_again(router):
    for number in range(4):
        router.publisher.publish(stored(block(number, None, [1, 2])))
    live = [router.read() for _ in range(4)]
    assert [sequence for sequence, _ in live] == list(range(router.first, router.first + 4))
    assert router.replayed(router.first + 1) == live[1:]
    assert router.replayed(router.first + 4) == []
    assert router.replayed(2**64 - 1) == []
    router.asking.send_multipart([b"", b"short"])  # no request, and no end of the thread
    assert len(router.replayed(0)) == router.first + 4


def test_a_long_replay_waits_for_its_reader(router):
    for number in range(5000):
        router.publisher.publish(stored(block(number, None, [1, 2])))
    assert len(router.replayed(router.first)) == 5000


@pytest.mark.parametrize(("limit", "kept"), [("_MOST_BATCHES", 2), ("_MOST_BYTES", 100)])
def test_a_bounded_number_of_messages_is_kept(router, monkeypatch, limit, kept):
    monkeypatch.setattr(kv_events, limit, kept)
    for number in range(6):
        router.publisher.publish(stored(block(number, None, [1, 2])))
    last = [router.read() for _ in range(6)][-2:]
    assert router.replayed(0) == last


def test_payloads_are_read_by_msgspec_as_by_hand(router):
    router.publisher.publish(stored(block(1, None, [1, 2])))
    _, payload = router.read()
    assert msgspec.msgpack.decode(payload) == unpacked(payload)[0]


def test_a_publisher_without_replays(tmp_path):
    publisher = KVEventPublisher(f"ipc://{tmp_path}/events", None, "", 16)
    publisher.clear()
    publisher.close()
    publisher.close()


def test_an_address_in_use_is_refused(tmp_path):
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(UserError, match=f"cannot be published at tcp://127.0.0.1:{port} .*: use a free port"):
            KVEventPublisher(f"ipc://{tmp_path}/events", f"tcp://127.0.0.1:{port}", "", 16)


@pytest.mark.parametrize(
    "endpoint",
    ["5557", "tcp://localhost:5557", "tcp://*", "tcp://127.0.0.1:0", "tcp://127.0.0.1:70000", "udp://*:5557",
     "tcp://::1:5557", "tcp://[127.0.0.1]:5557", "ipc://", "tcp://*:" + "9" * 5000],
)  # fmt: skip
def test_what_is_no_address_to_bind_is_refused(endpoint):
    for name in ("kv_events_endpoint", "kv_events_replay_endpoint"):
        with pytest.raises(UserError, match=f"{name} is .*: set it to tcp://ADDRESS:PORT"):
            EngineOptions.of({name: endpoint})


@pytest.mark.parametrize("endpoint", ["tcp://*:5557", "tcp://10.0.0.1:5557", "tcp://[::]:5557"])
def test_other_machines_read_events_only_if_they_may(endpoint):
    for names in (
        {"kv_events_endpoint": endpoint},
        {"kv_events_endpoint": "ipc://x", "kv_events_replay_endpoint": endpoint},
    ):
        with pytest.raises(UserError, match="other machines can read the tokens of all prompts"):
            KVEventPublisher.of(EngineOptions.of(names), [])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kv_events_replay_endpoint": "tcp://127.0.0.1:5558"}, "there are no KV events: set kv_events_endpoint too"),
        ({"kv_events_topic": "kv@pod@model"}, "kv_events_topic is set, but there are no KV events"),
        ({"kv_events_endpoint": "ipc://x", "prefix_cache": False}, "prefix_cache is False: set it to True"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        KVEventPublisher.of(EngineOptions.of(settings), [])


def test_there_are_no_events_by_default():
    assert KVEventPublisher.of(EngineOptions(), []) is None


def test_the_options_make_a_publisher(tmp_path):
    settings = {"kv_events_endpoint": f"ipc://{tmp_path}/events", "kv_events_topic": "kv", "block_tokens": 4}
    publisher = KVEventPublisher.of(EngineOptions.of(settings), [])
    assert (publisher._topic, publisher._events.block_tokens) == (b"kv", 4)
    publisher.close()
    local = EngineOptions.of({"kv_events_endpoint": "tcp://[::1]:5557"})
    assert kv_events._is_local(local.kv_events_endpoint)
