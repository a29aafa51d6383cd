"""Saved contexts over real ranks: KV that one layout has computed answers under another one, as a fresh prefill."""

import json
import os
import resource
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from longhelix import LLM, Layout, SamplingParams, ServiceLevel, UserError
from longhelix.compute.cache.context_folder import ContextFolder
from longhelix.compute.kernels import native
from oracle import FAMILIES, NATIVE_LATENTS, NATIVE_SIZES, NEW_TOKENS, make_oracle, save_tokenizer_files

pytestmark = pytest.mark.dist

MODELS = {"gqa-rows": FAMILIES["llama"], "gqa-packed": NATIVE_SIZES, "mla-packed": NATIVE_LATENTS}
CONTEXT_TOKENS = 35  # of a prompt of 41: two blocks of 16, or eight of 4, and some tokens that no block is full of
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    made = {}

    def oracle(model):
        if model not in made:
            made[model] = make_oracle(MODELS[model], tmp_path_factory.mktemp(model))
            save_tokenizer_files(made[model].path)
        return made[model]

    return oracle


@contextmanager
def engine(oracle, folder, layout, **settings):
    with LLM(str(oracle.path), layout, contexts_dir=folder, chunk_tokens=16, **settings) as llm:
        llm.rows = lambda: llm._core.counters.rows
        yield llm


def settle(llm):
    while llm.has_work:
        llm.step()


def free(llm):
    return [allocator.available for allocator in llm._core._scheduler.pool.allocators]


def split(oracle):
    prompt = oracle.prompts[3]
    return prompt[:CONTEXT_TOKENS], prompt[CONTEXT_TOKENS:]


LAYOUTS = [
    (Layout(), {}),
    (Layout(kvp=3), {}),
    (Layout(tpa=2), {}),
    (Layout(kvp=2), {"placement": "growing", "growth_limit_tokens": 16}),
    (Layout(kvp=3), {"placement": "local"}),
    (Layout(kvp=2, tpa=2), {}),
    (Layout(tpa=4), {}),  # more ranks than KV heads: some keep the same
    (Layout(kvp=2, pp=2), {}),
]


@pytest.mark.parametrize("model", MODELS)
def test_a_context_answers_under_every_layout_as_transformers_does(oracles, tmp_path, model):
    oracle, block_tokens = oracles(model), 4 if model == "gqa-rows" else 16
    context, question = split(oracle)
    with engine(oracle, tmp_path, Layout(kvp=2), block_tokens=block_tokens) as llm:
        saved = llm.save_context("document", context)
        settle(llm)
        assert free(llm) == [llm.config.scheduler.num_blocks] * 2
    assert (saved.num_tokens, saved.num_blocks, len(saved.files)) == (35, 35 // block_tokens, 2)
    for layout, settings in LAYOUTS:
        with engine(oracle, tmp_path, layout, block_tokens=block_tokens, **settings) as llm:
            assert llm.load_context("document").loaded_blocks == 35 // block_tokens
            assert llm.load_context("document").loaded_blocks == 0
            assert llm.rows() == 0
            (result,) = llm.generate([question], GREEDY, context="document")
            assert result.token_ids == oracle.tokens[3], (layout, settings)
            # Only what fills no block is computed again.
            assert llm.rows() == len(oracle.prompts[3]) - 35 // block_tokens * block_tokens + NEW_TOKENS - 1
            assert sum(result.kv_tokens_per_rank) == len(oracle.prompts[3]) + NEW_TOKENS - 1
            assert result.cached_tokens == 35 // block_tokens * block_tokens


@pytest.mark.parametrize("saved_by", [Layout(tpa=2), Layout(tpa=4), Layout(kvp=2, tpa=3), Layout(tpa=2, pp=2)], ids=str)
def test_heads_that_were_apart_come_together(oracles, tmp_path, saved_by):
    """Of three KV heads; where four ranks keep them, one head is saved once."""
    oracle = oracles("gqa-packed")
    context, question = split(oracle)
    with engine(oracle, tmp_path, saved_by) as llm:
        saved = llm.save_context("document", context)
    assert len(saved.files) == min(saved_by.tpa, 3) * saved_by.kvp * saved_by.pp
    assert saved.num_bytes < 1.2 * 32 * 3 * 2 * 16 * 4 * 2  # tokens, heads, keys and values, channels, bytes, layers
    for layout in (Layout(), Layout(kvp=2), Layout(kvp=2, pp=2)):
        with engine(oracle, tmp_path, layout) as llm:
            (result,) = llm.generate([question], GREEDY, context="document")
            assert result.token_ids == oracle.tokens[3]


@pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "fp8", "int8", "int4", "nvfp4"])
def test_narrow_numbers_come_back_as_they_were(oracles, tmp_path, kv_dtype):
    """On one rank, in chunks that end with the context's blocks, each step has the same numbers either way."""
    oracle = oracles("gqa-packed")
    context, question = oracle.prompts[3][:32], oracle.prompts[3][32:]
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, logprobs=3)
    with engine(oracle, tmp_path, Layout(), kv_dtype=kv_dtype) as llm:
        (fresh,) = llm.generate([context + question], sampling)
        llm.save_context("document", context)
    with engine(oracle, tmp_path, Layout(), kv_dtype=kv_dtype) as llm:
        (result,) = llm.generate([question], sampling, context="document")
    assert (result.token_ids, result.logprobs) == (fresh.token_ids, fresh.logprobs)


def test_a_prompt_as_text_comes_behind_the_context(oracles, tmp_path):
    oracle = oracles("gqa-packed")
    words = " ".join(f"w{token}" for token in oracle.prompts[3])
    with engine(oracle, tmp_path, Layout(kvp=2)) as llm:
        llm.save_context("document", " ".join(words.split()[:CONTEXT_TOKENS]))
        *_, last = llm.stream(" ".join(words.split()[CONTEXT_TOKENS:]), GREEDY, context="document")
        assert last.result.token_ids == oracle.tokens[3]
        assert last.result.prompt_tokens == 41


def test_a_context_is_built_and_taken_up_beside_other_requests(oracles, tmp_path):
    oracle = oracles("gqa-packed")
    context, question = split(oracle)
    with engine(oracle, tmp_path, Layout(kvp=2), kv_cache_tokens=1024) as llm:
        streams = [llm.stream(prompt, GREEDY) for prompt in oracle.prompts]
        firsts = [next(stream) for stream in streams]
        llm.save_context("document", context)
        streams.append(llm.stream(question, GREEDY, context="document"))
        tokens = [[*stream][-1].result.token_ids for stream in streams]
    assert firsts
    assert tokens == [*oracle.tokens, oracle.tokens[3]]


def test_a_context_that_another_thread_has_read_answers_alike(oracles, tmp_path):
    """Loaded and from the cache, each with the salt that it was read with."""
    oracle = oracles("gqa-packed")
    context, question = split(oracle)
    with engine(oracle, tmp_path, Layout(kvp=2)) as llm:
        llm.save_context("document", context)
    with engine(oracle, tmp_path, Layout(kvp=2)) as llm, ThreadPoolExecutor(1) as thread:
        for salt in ("", "other"):
            service = ServiceLevel(cache_salt=salt)
            read = thread.submit(llm.read_context, "document", salt).result()
            for _ in range(2):
                llm.add(question, GREEDY, service, context=read)
                deltas = []
                while llm.has_work:
                    deltas += llm.step()
                assert deltas[-1].result.token_ids == oracle.tokens[3]
                assert deltas[-1].result.cached_tokens == 32
        with pytest.raises(UserError, match="cache_salt differs from"):
            llm.add(question, GREEDY, context=read)


def test_a_name_is_given_once_unless_it_is_replaced(oracles, tmp_path):
    oracle = oracles("gqa-packed")
    context, question = split(oracle)
    with engine(oracle, tmp_path, Layout()) as llm:
        llm.save_context("document", oracle.prompts[2])
        assert llm.generate([[1]], GREEDY, context="document")[0].prompt_tokens == 19
        with pytest.raises(UserError, match=r"a context 'document' already exists in") as refused:
            llm.save_context("document", context)
        assert refused.value.code == "context_exists"
        llm.save_context("document", context, replace=True)
        (result,) = llm.generate([question], GREEDY, context="document")  # not what was loaded before
        assert result.token_ids == oracle.tokens[3]
    assert os.listdir(tmp_path) == ["document"]


@pytest.fixture(scope="module")
def saved(oracles, tmp_path_factory):
    """A context in float32 over KVP 2."""
    folder, oracle = tmp_path_factory.mktemp("saved"), oracles("gqa-packed")
    with engine(oracle, folder, Layout(kvp=2)) as llm:
        llm.save_context("document", split(oracle)[0])
    return folder


@pytest.fixture
def contexts(saved, tmp_path):
    """A copy that a test may damage."""
    shutil.copytree(saved, tmp_path / "contexts")
    return tmp_path / "contexts"


@pytest.fixture(scope="module")
def llm(oracles, tmp_path_factory):
    with engine(oracles("gqa-packed"), tmp_path_factory.mktemp("none"), Layout(kvp=3)) as started:
        yield started


def refusal(llm, folder, name="document"):
    """What is said of a context, which nothing is done with; the engine goes on."""
    llm._contexts._folder = ContextFolder(folder)
    settle(llm)
    before = free(llm)
    with pytest.raises(UserError) as refused:
        llm.generate([[1, 2, 3]], GREEDY, context=name)
    assert free(llm) == before
    assert not llm.has_work
    assert "\n" not in str(refused.value)
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))[0].token_ids) == 2
    return refused.value.code, str(refused.value)


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["rank-0.safetensors", "rank-1.safetensors", "token_ids.int32", "context.json"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "altered", "empty"])
def test_damaged_files_are_named_and_not_used(llm, contexts, name, damage):
    path = contexts / "document" / name
    match damage:
        case "missing":
            path.unlink()
        case "truncated":
            path.write_bytes(path.read_bytes()[:-5])
        case "altered":
            flip(path, -6)
        case "empty":
            path.write_bytes(b"")
    code, words = refusal(llm, contexts)
    assert code == "invalid_context"
    assert f"(file {name}: " in words
    assert "missing" in words or damage != "missing"


def test_every_rank_file_may_be_altered_anywhere(llm, contexts):
    path = contexts / "document" / "rank-1.safetensors"
    size = path.stat().st_size
    for at in range(3, size, size // 9):
        flip(path, at)
        assert refusal(llm, contexts)[0] == "invalid_context"
        flip(path, at)


@pytest.mark.parametrize("version", [2, 3])
def test_a_context_of_an_earlier_version_is_read(llm, contexts, version):
    """Models without windows are saved as then."""
    path = contexts / "document" / "context.json"
    path.write_bytes(path.read_bytes().replace(b'{"version":4', b'{"version":%d' % version))
    llm._contexts._folder = ContextFolder(contexts)
    assert llm.load_context("document").saved.num_tokens > 0


def test_a_manifest_of_another_version_is_refused(llm, contexts):
    path = contexts / "document" / "context.json"
    path.write_bytes(path.read_bytes().replace(b'{"version":4', b'{"version":1'))
    code, words = refusal(llm, contexts)
    assert (code, "has version 1 of the format, but this version of longhelix reads 2, 3, 4" in words) == (
        "invalid_context",
        True,
    )


def test_a_context_that_is_not_there_is_refused_with_those_that_are(llm, contexts, tmp_path):
    assert refusal(llm, contexts, "other") == (
        "unknown_context",
        f"there is no context 'other' in {contexts}: known contexts are document",
    )
    assert "the folder has no contexts" in refusal(llm, tmp_path / "nowhere")[1]
    for name in ("", ".", "..", "a/b", ".hidden", "-x", "a\nb", "x" * 200, 5, b"x"):
        code, words = refusal(llm, contexts, name)
        assert (code, words.startswith("a context's name is")) == ("invalid_argument", True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"kv_dtype": "bfloat16"},
            "saved with kv_dtype float32, but kv_dtype is now bfloat16: set kv_dtype to float32",
        ),
        ({"dtype": "bfloat16"}, "saved with dtype float32, but dtype is now bfloat16"),
        ({"block_tokens": 32}, "saved with block_tokens 16, but block_tokens is now 32"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "was saved with other RoPE settings"),
        ({"kv_cache_tokens": 16}, "does not fit into the free part of the KV cache"),
    ],
)
def test_other_settings_are_refused_in_words(oracles, contexts, settings, words):
    with engine(oracles("gqa-packed"), contexts, Layout(), **settings) as llm, pytest.raises(UserError) as refused:
        llm.load_context("document")
    assert words in str(refused.value)
    assert refused.value.code == ("kv_cache_exceeded" if "kv_cache_tokens" in settings else "context_mismatch")


def test_another_model_is_refused_and_a_copy_of_the_same_is_not(oracles, contexts, tmp_path):
    oracle = oracles("gqa-packed")
    other = make_oracle(MODELS["gqa-packed"], tmp_path / "other", seed=1)
    save_tokenizer_files(other.path)
    with engine(other, contexts, Layout()) as llm, pytest.raises(UserError, match="with another model") as refused:
        llm.load_context("document")
    assert refused.value.code == "context_mismatch"
    copy = shutil.copytree(oracle.path, tmp_path / "copy")
    with LLM(str(copy), contexts_dir=contexts) as llm:
        assert llm.generate([split(oracle)[1]], GREEDY, context="document")[0].token_ids == oracle.tokens[3]


def test_a_request_whose_keys_are_rotated_otherwise_computes_the_context(oracles, tmp_path):
    """Longrope has one set of frequencies for requests within the positions that it was trained for, one beyond."""
    oracle = oracles("gqa-packed")
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    rope = {"rope_scaling": {"rope_type": "longrope", **factors}}
    longer, context_ids = SamplingParams(max_new_tokens=80), oracle.prompts[3][:32]
    with engine(oracle, tmp_path, Layout(), **rope) as llm:
        llm.save_context("document", context_ids)
        (short,) = llm.generate([[1]], GREEDY, context="document")
        (long,) = llm.generate([[1]], longer, context="document")
        assert (short.cached_tokens, long.cached_tokens) == (32, 0)
        assert long.token_ids == llm.generate([[*context_ids, 1]], longer)[0].token_ids


def test_what_fills_no_block_and_what_is_too_long_is_refused(llm, tmp_path):
    llm._contexts._folder = ContextFolder(tmp_path)
    with pytest.raises(UserError, match="a KV block has 16"):
        llm.save_context("short", list(range(15)))
    with pytest.raises(UserError, match="max-model-len"):
        llm.save_context("long", [1] * 128)
    with pytest.raises(UserError, match="a context's name"):
        llm.save_context("../x", [1] * 64)
    assert os.listdir(tmp_path) == []


@contextmanager
def small_disk(path, num_bytes):
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def can_mount():
    if os.geteuid():
        return False
    return (
        subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_mount(), reason="a small disk needs the right to mount one")
def test_a_full_disk_leaves_nothing_and_the_old_context_stays(llm, oracles, tmp_path):
    path = tmp_path / "disk"
    context, _ = split(oracles("gqa-packed"))
    with small_disk(path, 64 * 1024):
        llm._contexts._folder = ContextFolder(path)
        llm.save_context("document", context[:16])
        before = {file.name: file.read_bytes() for file in (path / "document").iterdir()}
        for name, replace in (("other", False), ("document", True)):
            with pytest.raises(UserError, match="the disk is full") as refused:
                llm.save_context(name, [1] * 96, replace=replace)
            assert refused.value.code == "disk_full"
        assert os.listdir(path) == ["document"]
        assert {file.name: file.read_bytes() for file in (path / "document").iterdir()} == before
        llm.save_context("document", context[:16], replace=True)  # there is room again
    assert llm.generate([[1]], SamplingParams(max_new_tokens=1))


def test_files_that_may_not_grow_are_refused_likewise(oracles, tmp_path):
    """As by a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with engine(oracles("gqa-packed"), tmp_path, Layout(kvp=2)) as llm:
        for process in llm.process_ids.values():
            resource.prlimit(process, resource.RLIMIT_FSIZE, (5000, before[1]))
        with pytest.raises(UserError, match="the file exceeds the limit on file sizes") as refused:
            llm.save_context("document", [1] * 100)
        assert refused.value.code == "disk_full"
        assert os.listdir(tmp_path) == []
        assert len(llm.generate([[1, 2, 3]], GREEDY)[0].token_ids) == NEW_TOKENS


def test_a_folder_that_cannot_be_written_is_refused(llm, tmp_path):
    (tmp_path / "file").write_text("")
    llm._contexts._folder = ContextFolder(tmp_path / "file" / "contexts")
    with pytest.raises(UserError, match="cannot be") as refused:
        llm.save_context("document", [1] * 64)
    assert "Not a directory" in str(refused.value)


BUILTIN_TOKENS = 4096


@pytest.mark.slow  # a prefill of four thousand tokens, five engines
def test_the_builtin_model_answers_alike_under_other_layouts(tmp_path):
    """TTFT and the time to load are measured in benchmarks/contexts.py."""
    repository = Path(__file__).parents[2]
    text = "".join(file.read_text() for file in sorted((repository / "docs").rglob("*.md")))
    question, sampling = "\n\nQuestion: what is a KV block?\nAnswer:", SamplingParams(max_new_tokens=32)
    with LLM("builtin", Layout(kvp=2), dtype="float32", contexts_dir=tmp_path) as llm:
        context = llm.tokenizer.encode(text)[:BUILTIN_TOKENS]
        (fresh,) = llm.generate([context + llm.tokenizer.encode_more(question)], sampling)
        llm.save_context("docs", context)
    assert len(context) == BUILTIN_TOKENS
    for layout in (Layout(), Layout(kvp=3), Layout(tpa=3)):
        with LLM("builtin", layout, dtype="float32", contexts_dir=tmp_path) as llm:
            (result,) = llm.generate([question], sampling, context="docs")
            assert result.token_ids == fresh.token_ids, layout
            assert llm._core.counters.rows < 64


def test_contexts_on_the_command_line(oracles, tmp_path, capfd):
    from longhelix.cli.main import main

    oracle, folder = oracles("gqa-packed"), tmp_path / "contexts"
    words = [f"w{token}" for token in oracle.prompts[3]]
    (tmp_path / "document.txt").write_text(" ".join(words[:CONTEXT_TOKENS]))

    def run(*arguments):
        status = main([str(argument) for argument in [*arguments, "--contexts-dir", folder, "--json"]])
        return status, json.loads(capfd.readouterr().out)

    model = ("--model", oracle.path, "--name", "document")
    status, found = run("context", "save", *model, "--kvp", 2, "--prompt-file", tmp_path / "document.txt")
    assert (status, found["name"], found["tokens"], found["files"]) == (0, "document", 35, 2)
    assert run("context", "save", *model, "--prompt-file", tmp_path / "document.txt")[1]["error"]["code"] == (
        "context_exists"
    )
    status, found = run("context", "list")
    assert (status, [saved["name"] for saved in found["contexts"]]) == (0, ["document"])
    status, found = run("context", "load", *model, "--kvp", 3)
    assert (status, found["tokens"]) == (0, 35)
    assert found["load_s"] > 0
    answer = ("generate", "--model", oracle.path, "--prompt", " ".join(words[CONTEXT_TOKENS:]))
    status, found = run(*answer, "--tpa", 3, "--context", "document", "--max-new-tokens", NEW_TOKENS)
    assert (status, found["token_ids"], found["prompt_tokens"]) == (0, oracle.tokens[3], 41)
    assert run(*answer, "--context", "other")[1]["error"]["code"] == "unknown_context"
    assert run(*answer, "--context", "document", "--chat")[0] == 2
    flip(folder / "document" / "context.json", 20)
    status, found = run("context", "list")
    assert (status, found["contexts"][0]["name"], "error" in found["contexts"][0]) == (0, "document", True)
    assert run("context", "rm", "document") == (0, {"removed": ["document"]})
    assert run("context", "list") == (0, {"contexts": []})
    assert run("context", "rm", "document")[1]["error"]["code"] == "unknown_context"
