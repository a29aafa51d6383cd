"""A saved context before a prompt: taken up where there is room, computed where there is none now, and not read for
what is refused."""

import types
from array import array
from contextlib import nullcontext

import pytest

from longhelix import SamplingParams, UserError
from longhelix.compute.cache.saved_context import Origin, SavedContext
from longhelix.engine.contexts import Contexts
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.pinned_prefix import PinnedPrefix
from longhelix.spec.vocabulary import Vocabulary
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

TOKENS = array("i", range(40))
NEW = SamplingParams(max_new_tokens=8)


class Core:
    """Has room for a context, or none. carried: the first blocks that ranks were to read."""

    def __init__(self, has_room):
        scheduler = scheduler_config(1, 8, 128, prefix_cache=True)
        self.config = types.SimpleNamespace(
            scheduler=scheduler,
            spec=types.SimpleNamespace(vocabulary=Vocabulary(100), views=(), groups=(), layers=()),
            layout=types.SimpleNamespace(kvp=1),
            kv_bytes_per_token=lambda rank: 2**20,  # so that ranks read a part at a time
        )
        self.has_room, self.carried, self.published, self.is_cached = has_room, [], 0, False

    def hashes(self, prompt_ids, capacity_tokens, cache_salt):
        return [b"first", b"second"]

    def has_cached(self, hashes):
        return self.is_cached

    def pin_prefix(self, prompt_ids, capacity_tokens, cache_salt, hashes):
        assert not self.is_cached
        return PinnedPrefix((Block(0, 5), Block(0, 6)), 1, (b"first", b"second")) if self.has_room else None

    def releasing(self, held):
        return nullcontext()

    def carry(self, message):
        self.carried.append(message.first)

    def publish(self, held):
        self.published += 1


class Folder:
    def manifest(self, name):
        return SavedContext(name, origin(41), "small", "", len(TOKENS), 41, "", ())

    def token_ids(self, saved):
        return TOKENS

    def at(self, name):
        return f"/contexts/{name}"


def origin(capacity_tokens):
    """Keys are rotated by other angles from 60 tokens on."""
    return Origin(
        "m", "rope", "float32", "float32", "float32", None, None, 16, "long" if capacity_tokens >= 60 else "short"
    )


@pytest.fixture
def contexts_with(monkeypatch):
    monkeypatch.setattr(Contexts, "_origin", lambda self, capacity_tokens: origin(capacity_tokens))
    return lambda core: Contexts(core, "small", None, Folder())


def asked(contexts, question, sampling=NEW):
    given, _ = contexts.before(contexts.read("papers", ""), question, sampling)
    return given


def test_what_is_not_there_is_read_before_a_prompt(contexts_with):
    core = Core(has_room=True)
    contexts = contexts_with(core)
    assert asked(contexts, [7, 8]) == TOKENS + array("i", [7, 8])
    assert (core.carried, core.published) == ([1], 1)
    assert contexts.load("papers").loaded_blocks == 1


def test_a_prompt_waits_for_its_turn_where_the_context_finds_no_room_now(contexts_with):
    """The request has its tokens, and computes it, as it does where others have displaced it."""
    core = Core(has_room=False)
    contexts = contexts_with(core)
    assert asked(contexts, [7, 8]) == TOKENS + array("i", [7, 8])
    assert (core.carried, core.published) == ([], 0)
    with pytest.raises(UserError, match="does not fit into the free part") as refused:
        contexts.load("papers")
    assert refused.value.code == "kv_cache_exceeded"


def test_nothing_is_read_for_what_is_refused(contexts_with):
    core = Core(has_room=True)
    with pytest.raises(UserError, match="prompt token 100"):
        asked(contexts_with(core), [100])
    assert core.carried == []


def test_a_request_whose_keys_are_rotated_otherwise_computes_the_context(contexts_with):
    core = Core(has_room=True)
    longer = SamplingParams(max_new_tokens=30)
    assert asked(contexts_with(core), [7], longer) == TOKENS + array("i", [7])
    assert (core.carried, core.published) == ([], 0)


def test_what_is_cached_is_not_held(contexts_with):
    """That would take time between two steps: the request holds it when it begins. It has the hashes."""
    core = Core(has_room=True)
    core.is_cached = True
    contexts = contexts_with(core)
    context = contexts.read("papers", "")
    assert contexts.before(context, [7, 8], NEW) == (TOKENS + array("i", [7, 8]), context.hashes)
    assert (core.carried, core.published) == ([], 0)
    assert contexts.load("papers").loaded_blocks == 0


def test_a_context_that_was_replaced_after_it_was_read_is_not_loaded(contexts_with, monkeypatch):
    """Its blocks would have the KV of other tokens."""
    core = Core(has_room=True)
    contexts = contexts_with(core)
    context = contexts.read("papers", "")
    other = SavedContext("papers", origin(41), "small", "", len(TOKENS), 41, "other", ())
    monkeypatch.setattr(Folder, "manifest", lambda self, name: other)
    with pytest.raises(UserError, match="was replaced while a request"):
        contexts.before(context, [7, 8], NEW)
    assert core.carried == []
