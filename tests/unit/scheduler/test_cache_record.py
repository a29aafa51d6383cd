"""A reader of the prefix cache's changes knows what can be found, and what it contains, without seeing the cache."""

import random
from array import array
from hashlib import sha256

import pytest
from test_instances import FakeInstances
from test_pressure import LONG, ByWork, Pressed, config, request
from test_scheduler import FakeRunner

from longhelix.scheduler.cache_record import CacheRecord, RemovedBlock
from longhelix.scheduler.kv.placement import PLACEMENTS
from longhelix.scheduler.kv.windows import KVWindow
from longhelix.scheduler.loop import Loop
from longhelix.scheduler.request import ImageSpan
from longhelix.scheduler.scheduler import Scheduler
from longhelix.spec.attention import Visibility

pytestmark = pytest.mark.unit

OTHERS = LONG[::-1]


class Reader(Pressed):
    """An engine, and what a reader of its changes knows after each step."""

    def __init__(self, config, depth=1, choose=None):
        super().__init__(config, depth)
        self.record = CacheRecord(len(config.cache.windows))
        self.scheduler = Scheduler(config, ByWork(), record=self.record)
        self.runner = FakeInstances(config, choose) if config.steps.own_clocks else FakeRunner(config, in_turn=False)
        self.loop = Loop(self.scheduler, self.runner, lambda: self.now_s, depth)
        self.found = {"pool": {}, "swap": {}}
        self.of_windows = [set() for _ in config.cache.windows]

    def step(self):
        super().step()
        self.read()

    def read(self):
        pool = self.scheduler.pool
        changes = pool.changes()
        for tier, content_hash, content, group in changes.stored:
            if group:
                assert content_hash not in self.of_windows[group - 1]
                self.of_windows[group - 1].add(content_hash)
            else:
                assert content_hash not in self.found[tier]
                self.found[tier][content_hash] = content
        for tier, content_hash, group in changes.removed:
            if group:
                self.of_windows[group - 1].remove(content_hash)
            else:
                del self.found[tier][content_hash]
        assert self.found["pool"].keys() == pool.index.keys()
        assert self.found["swap"].keys() == pool.swaps.index.keys()
        leaving = {content_hash for _, content_hash in pool.swaps.evicted}
        assert (
            self.record.contents.keys() - leaving == (self.found["pool"].keys() | self.found["swap"].keys()) - leaving
        )
        return changes

    def ran(self, *asked):
        self.add(*asked)
        while self.loop.has_work:
            self.step()
        return [self.usages[one.id].cached_tokens for one in asked]

    def hashes(self, tokens, salt=""):
        """Those of a prompt's first blocks that are found in layers that see everything."""
        keys = (salt,) if salt else ()
        known = [*self.found["pool"].items(), *self.found["swap"].items()]
        after = {(content.parent, content.token_bytes, content.keys): digest for digest, content in known}
        size, hashes = self.scheduler.config.block_tokens, []
        for start in range(0, len(tokens) - size + 1, size):
            parent = hashes[-1] if hashes else None
            found = after.get((parent, array("i", tokens[start : start + size]).tobytes(), () if start else keys))
            if found is None:
                break
            hashes.append(found)
        return hashes

    def predicted(self, tokens, salt=""):
        """The tokens of a prompt that the next request finds, by what the reader knows alone."""
        size, hashes = self.scheduler.config.block_tokens, self.hashes(tokens, salt)
        num_tokens = min(len(hashes) * size, len(tokens) - 1)
        while num_tokens:
            missing = [
                place
                for window, found in zip(self.scheduler.config.cache.windows, self.of_windows, strict=True)
                for place in range(window.visibility.first_seen(num_tokens) // size, -(-num_tokens // size))
                if hashes[place] not in found
            ]
            if not missing:
                break
            num_tokens = max(missing) * size
        return num_tokens


@pytest.mark.parametrize("swap_blocks", [0, 6, 40])
@pytest.mark.parametrize("placement", [*PLACEMENTS, "auto"])
def test_hits_are_predicted_while_others_need_the_room(placement, swap_blocks):
    more = {"placement": placement, "growth_limit_tokens": 8, "kvp_threshold_tokens": 40, "swap_blocks": swap_blocks}
    engine = Reader(config(num_blocks=16, **more))
    hits = []
    for id in range(30):
        start = id * 7 % 40
        prompt = [*(LONG if id % 3 else OTHERS)[start % 3 * 10 : start % 3 * 10 + 21 + start % 20], id]
        expected = engine.predicted(prompt)
        assert engine.ran(request(id, prompt, 1 + id % 9)) == [expected]
        hits.append(expected)
    assert 0 < sum(map(bool, hits)) < len(hits)


@pytest.mark.parametrize("window", [Visibility(window_tokens=6), Visibility(chunk_tokens=9)], ids=str)
@pytest.mark.parametrize("placement", [*PLACEMENTS, "auto"])
def test_hits_are_predicted_where_layers_see_a_window_or_a_chunk(placement, window):
    """Blocks of the window go sooner than those of layers that see everything, and later."""
    more = {"placement": placement, "growth_limit_tokens": 8, "kvp_threshold_tokens": 40}
    windows = KVWindow(window, 11), KVWindow(Visibility(window_tokens=21), 24)
    engine = Reader(config(num_blocks=24, windows=windows, **more))
    hits, cut = [], 0
    for id in range(60):
        start = id * 7 % 40
        prompt = [*(LONG if id % 3 else OTHERS)[start % 3 * 10 : start % 3 * 10 + 21 + start % 20], id]
        expected = engine.predicted(prompt)
        full = len(engine.hashes(prompt)) * 4
        assert engine.ran(request(id, prompt, 1 + id % 9)) == [expected]
        hits.append(expected)
        cut += expected < full
    assert 0 < sum(map(bool, hits)) < len(hits)
    assert cut > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_many_requests_at_once_move_and_lose_blocks(depth):
    """Blocks of requests that run move to other ranks, and are found there."""
    settings = {"kvp": 3, "num_blocks": 17, "placement": "local"}
    engine = Reader(config(**settings), depth)
    asked = [request(id, LONG[20 * id :][:tokens], 16) for id, tokens in enumerate((24, 26, 27, 14))]
    engine.ran(*asked)
    assert any(usage.moved_tokens for usage in engine.usages.values())
    prompt = [*asked[0].prompt_token_ids, *engine.outcomes[0].token_ids, 1, 2, 3]
    expected = engine.predicted(prompt)
    assert expected > len(asked[0].prompt_token_ids)
    assert engine.ran(request(9, prompt, 2)) == [expected]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("own_clocks", [False, True])
@pytest.mark.parametrize("placement", ["growing", "auto"])
def test_a_reader_knows_the_cache_after_each_step_of_any_traffic(placement, own_clocks, seed):
    chance = random.Random(seed)
    settings = {"placement": placement, "growth_limit_tokens": 8, "kvp_threshold_tokens": 40, "swap_blocks": 10}
    engine = Reader(config(kvp=3, own_clocks=own_clocks, **settings), 1 + seed % 3, chance.choice)
    for id in range(60):
        start = chance.choice([0, 0, 20, 40])
        engine.add(request(id, LONG[start : start + chance.randint(1, 40)], chance.randint(1, 20)))
        for _ in range(chance.randint(0, 8)):
            engine.step()
        if id % 7 == 0:
            engine.abort(id)
    while engine.loop.has_work:
        engine.step()
    assert engine.found["pool"]
    assert engine.found["swap"]


def test_a_block_is_stored_behind_the_one_before_it():
    engine = Reader(config(num_blocks=60))
    engine.add(request(0, LONG[:14], 1))
    engine.loop.step()
    stored = engine.read().stored
    assert [one.content.token_bytes for one in stored] == [
        array("i", LONG[start : start + 4]).tobytes() for start in (0, 4, 8)
    ]
    assert [one.content.parent for one in stored] == [None, stored[0].content_hash, stored[1].content_hash]
    assert stored[1].content_hash == sha256(stored[0].content_hash + stored[1].content.token_bytes).digest()


def test_prompts_of_other_salts_and_images_have_other_keys():
    engine = Reader(config(num_blocks=60))
    engine.ran(request(0, LONG[:30], 5, cache_salt="a"))
    assert (engine.predicted(LONG[:30]), engine.predicted(LONG[:30], "a")) == (0, 28)
    image = ImageSpan(start=2, rows=1, columns=4, digest=b"\x01\xff")
    record, shown = CacheRecord(), request(1, LONG[:12], 1, cache_salt="a")
    object.__setattr__(shown, "images", (image,))
    record.learn([b"x", b"y", b"z"], None, shown.prompt_token_ids.tobytes(), 0, shown)
    assert [content.keys for content in record.contents.values()] == [("a", "01ff"), ("01ff",), ()]


def test_what_was_filled_from_elsewhere_is_known():
    engine = Reader(config(num_blocks=60))
    held = engine.pin(request(-1, LONG[:30], 1))
    held.publish(engine.scheduler.pool)
    held.release(engine.scheduler.pool)
    engine.read()
    assert engine.predicted(LONG[:30]) == 28


def test_what_comes_back_between_two_looks_is_not_told():
    record, asked = CacheRecord(), request(0, LONG[:8], 1)
    record.learn([b"x", b"y"], None, asked.prompt_token_ids.tobytes(), 0, asked)
    record.stored("pool", [b"x", b"y"])
    record.removed("pool", b"y")
    assert [one.content_hash for one in record.take(b"x".__eq__, ()).stored] == [b"x"]
    assert list(record.contents) == [b"x"]
    record.removed("pool", b"x")
    record.stored("pool", [b"x"])
    assert not any(record.take(b"x".__eq__, ()))


def test_what_may_be_swapped_is_known_until_it_is_not():
    record, asked = CacheRecord(), request(0, LONG[:4], 1)
    record.learn([b"x"], None, asked.prompt_token_ids.tobytes(), 0, asked)
    record.stored("pool", [b"x"])
    record.take(b"x".__eq__, ())
    record.removed("pool", b"x")
    assert record.take(b"".__eq__, [b"x"]).removed == [RemovedBlock("pool", b"x")]
    assert list(record.contents) == [b"x"]
    assert not any(record.take(b"".__eq__, ()))
    assert not record.contents
