"""A router that reads KV events alone knows what each next request of a real engine finds in the prefix cache."""

import os
import signal
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from test_kv_groups import make_model

from longhelix import LLM, EngineError, Layout, SamplingParams, ServiceLevel
from oracle import FAMILIES, make_oracle, save_tokenizer_files
from tiers import few

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

BLOCK_TOKENS = 4
TOPIC = "kv@pod@model"
DOCUMENTS = [[2 + (3 + 5 * index * (1 + number)) % 60 for index in range(60)] for number in range(3)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    oracle = make_oracle(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))
    save_tokenizer_files(oracle.path)
    return str(oracle.path)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return str(make_model(tmp_path_factory.mktemp("windowed"), kinds).path)


class Router:
    """Knows the blocks of an engine by their numbers: which are in each tier, and which one follows another."""

    def __init__(self, endpoint):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.rcvtimeo, self.socket.linger = 60_000, 0
        self.socket.connect(endpoint)
        self.next_sequence = 0
        self.found = {"GPU": set(), "CPU": set()}
        self.after = {}  # by the number of the block before, the tokens and the extra keys
        self.removed = self.cleared = 0
        self.windows = {}  # by KV group with a window: its tokens, and the blocks that are found there

    def read(self):
        """Take the events since the last call. An engine has published all changes when a call of it returns."""
        self.socket.send_multipart([b"", self.next_sequence.to_bytes(8, "big")])
        while True:
            _, topic, sequence, payload = self.socket.recv_multipart()
            if not payload:
                return
            assert topic == TOPIC.encode()
            assert int.from_bytes(sequence, "big") == self.next_sequence
            self.next_sequence += 1
            _, events, rank = msgspec.msgpack.decode(payload)
            assert rank == 0
            for event in events:
                self.take(event)

    def take(self, event):
        match event:
            case ["BlockStored", hashes, parent, tokens, size, None, medium, None, keys]:
                assert (size, len(tokens)) == (BLOCK_TOKENS, BLOCK_TOKENS * len(hashes))
                for index, number in enumerate(hashes):
                    content = parent, tuple(tokens[index * size :][:size]), tuple((keys and keys[index]) or ())
                    assert self.after.setdefault(content, number) == number
                    assert number not in self.found[medium]
                    self.found[medium].add(number)
                    parent = number
            case ["BlockStored", *stored, 0, "full_attention", None]:
                self.take(["BlockStored", *stored])
            case ["BlockStored", hashes, *_, group, "sliding_window", tokens]:
                size, found = self.windows.setdefault(group, (tokens, set()))
                assert size == tokens
                assert found.isdisjoint(hashes)
                found.update(hashes)
            case ["BlockRemoved", hashes, medium, 0]:
                self.take(["BlockRemoved", hashes, medium])
            case ["BlockRemoved", hashes, _, group]:
                assert self.windows[group][1].issuperset(hashes)
                self.windows[group][1].difference_update(hashes)
            case ["BlockRemoved", hashes, medium]:
                assert self.found[medium].issuperset(hashes)
                self.found[medium].difference_update(hashes)
                self.removed += len(hashes)
            case ["AllBlocksCleared"]:
                for numbers in self.found.values():
                    numbers.clear()
                self.cleared += 1
            case _:
                raise AssertionError(event)

    def hits(self, prompt, salt="", ignore_windows=False):
        """How many tokens of a prompt the engine need not compute. It computes at least one."""
        self.read()
        parent, stop, numbers = None, 0, []
        while stop + BLOCK_TOKENS <= len(prompt):
            keys = (salt,) if salt and not stop else ()
            parent = self.after.get((parent, tuple(prompt[stop : stop + BLOCK_TOKENS]), keys))
            if parent not in self.found["GPU"] | self.found["CPU"]:
                break
            stop += BLOCK_TOKENS
            numbers.append(parent)
        most = min(stop, len(prompt) - 1)
        return most if ignore_windows else self.within_windows(most, numbers)

    def within_windows(self, num_tokens, numbers):
        """The most tokens for which each window has what the next row sees."""
        missing = [
            place
            for window_tokens, found in self.windows.values()
            for place in range(max(num_tokens + 1 - window_tokens, 0) // BLOCK_TOKENS, -(-num_tokens // BLOCK_TOKENS))
            if numbers[place] not in found
        ]
        return self.within_windows(max(missing) * BLOCK_TOKENS, numbers) if missing else num_tokens


@contextmanager
def routed(path, folder, layout, **settings):
    """An engine with a small pool, and a router that reads its events."""
    endpoints = {"kv_events_endpoint": f"ipc://{folder}/events", "kv_events_replay_endpoint": f"ipc://{folder}/replays"}
    small = {
        "chunk_tokens": 16,
        "device": "cpu",
        "max_model_len": 96,
        "kv_cache_tokens": 256,
        "block_tokens": BLOCK_TOKENS,
    }
    with LLM(path, layout, kv_events_topic=TOPIC, **endpoints, **small | settings) as llm:
        router = Router(endpoints["kv_events_replay_endpoint"])
        yield llm, router
        router.context.destroy(linger=0)


def ask(llm, router, prompt, new_tokens=1, salt=""):
    """The answer, and how many tokens of the prompt were found: as many as the router has predicted."""
    expected = router.hits(prompt, salt)
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    (result,) = llm.generate([prompt], sampling, ServiceLevel(cache_salt=salt))
    assert result.cached_tokens == expected
    return result.token_ids, expected


@pytest.mark.parametrize(
    ("layout", "settings"),
    few(
        [
            (Layout(kvp=2), {}),
            (Layout(kvp=2), {"placement": "local"}),
            (Layout(kvp=2), {"placement": "growing", "growth_limit_tokens": 16}),
            (Layout(kvp=2), {"swap_tokens": 64}),
            (Layout(pp=2), {}),
        ]
    ),
)
def test_each_prefix_hit_is_predicted(path, tmp_path, layout, settings):
    with routed(path, tmp_path, layout, **settings) as (llm, router):
        hits = []
        for turn in range(24):
            document = DOCUMENTS[turn * 5 % 7 % 3]
            prompt = document[: 30 + turn * 11 % 31]
            answer, found = ask(llm, router, prompt, 1 + turn % 9)
            hits.append(found)
            if turn % 4 == 0:  # the next turn of the conversation
                _, found = ask(llm, router, [*prompt, *answer, 5, 6, 7])
                hits.append(found)
        assert 0 < sum(map(bool, hits)) < len(hits)
        assert router.removed > 0


@pytest.mark.parametrize(
    ("layout", "settings"), few([(Layout(kvp=2), {}), (Layout(kvp=2), {"placement": "local"}), (Layout(tpa=2), {})])
)
def test_each_prefix_hit_of_a_model_with_a_window_is_predicted(windowed, tmp_path, layout, settings):
    """Turns of conversations about a few documents, in pools for two requests."""
    settings = {"max_running": 2, "kv_cache_tokens": 512, **settings}
    with routed(windowed, tmp_path, layout, **settings) as (llm, router):
        hits, cut = [], 0
        for turn in range(30):
            document = DOCUMENTS[turn * 5 % 7 % 3]
            prompt = document[: 30 + turn * 11 % 31]
            full = router.hits(prompt, ignore_windows=True)
            answer, found = ask(llm, router, prompt, 1 + turn % 9)
            hits.append(found)
            cut += found < full
            if turn % 4 == 0:
                _, found = ask(llm, router, [*prompt, *answer, 5, 6, 7])
                hits.append(found)
        assert 0 < sum(map(bool, hits)) < len(hits)
        assert cut > 0
        assert list(router.windows) == [1]


def test_salted_prompts_and_loaded_contexts_are_predicted(path, tmp_path):
    with routed(path, tmp_path, Layout(kvp=2), contexts_dir=tmp_path / "contexts") as (llm, router):
        assert ask(llm, router, DOCUMENTS[0], salt="mine")[1] == 0
        assert ask(llm, router, DOCUMENTS[0])[1] == 0
        assert ask(llm, router, DOCUMENTS[0], salt="mine")[1] == len(DOCUMENTS[0]) - 1
        llm.save_context("document", DOCUMENTS[1])
        for other in range(8):
            ask(llm, router, [other + 10] * 60)
        assert router.hits(DOCUMENTS[1]) == 0
        llm.load_context("document")
        assert ask(llm, router, [*DOCUMENTS[1], 5, 6])[1] == len(DOCUMENTS[1])


def test_a_restart_clears_the_cache(path, tmp_path):
    with routed(path, tmp_path, Layout(kvp=2)) as (llm, router):
        ask(llm, router, DOCUMENTS[0])
        assert router.hits(DOCUMENTS[0]) == len(DOCUMENTS[0]) - 1
        os.kill(llm.process_ids[1], signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 1"):
            ask(llm, router, DOCUMENTS[2])
        llm.restart()
        assert router.hits(DOCUMENTS[0]) == 0
        assert router.cleared == 1
        ask(llm, router, DOCUMENTS[0])
        assert ask(llm, router, DOCUMENTS[0])[1] == len(DOCUMENTS[0]) - 1
