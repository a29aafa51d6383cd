"""Packed weights work with saved contexts, cached prefixes, preemption and batch-invariant mode, and save memory."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import httpx
import psutil
import pytest
from serving_process import serving
from test_cached_prefix import assert_continues, assert_moved, cached_tokens_of, run
from test_contexts import GREEDY, refusal, split
from test_contexts import engine as engine_with_contexts
from test_equality import assert_batch_invariant
from test_gguf import CONFIGS as GGUF_CONFIGS
from test_gguf import mixed, of_blocks
from test_packed_weights import CONFIGS, changed

from gguf_files import Q, make_gguf_oracle
from longhelix import Layout, SamplingParams, ServiceLevel
from longhelix.compute.kernels import native
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from oracle import make_oracle, save_tokenizer_files
from packed_checkpoints import FORMS, make_packed_oracle, save_large
from tiers import few

pytestmark = pytest.mark.dist

needs_native = pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")
engine = partial(engine_with_contexts, dtype="float32")  # GGUF files do not say a dtype
ONE, TWO = Layout(), Layout(kvp=2)
LENGTHS = (38, 33, 1, 41)
# Kinds of the weights of GGUF files.
GGUF = {"gguf-q4_k_m": mixed, "gguf-q8_0": Q.Q8_0, "gguf-q6_k": Q.Q6_K}


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    """Oracles of quantised checkpoints, by family and form. The folder `plain` next to each has the same numbers."""
    made = {}

    def oracle(family, form):
        if (family, form) not in made and form in GGUF:
            folder = tmp_path_factory.mktemp(f"{family}-{form}")
            saved = make_oracle(of_blocks(GGUF_CONFIGS[family]), folder / "saved", prompt_lengths=(1,), new_tokens=1)
            made[family, form] = make_gguf_oracle(folder / "toy.gguf", saved.path, GGUF[form], prompt_lengths=LENGTHS)
        elif (family, form) not in made:
            folder = tmp_path_factory.mktemp(f"{family}-{form}")
            made[family, form] = make_packed_oracle(CONFIGS[family], FORMS[form], folder, LENGTHS)
            for name in ("packed", "plain"):
                save_tokenizer_files(folder / name)
        return made[family, form]

    return oracle


@pytest.mark.parametrize(
    ("family", "form", "saved_by", "loaded_by"),
    few(
        [
            ("deepseek_v3", "nvfp4", TWO, Layout(tpa=2)),
            ("deepseek_v3", "gguf-q4_k_m", TWO, Layout(tpa=2)),
            ("llama", "gguf-q4_k_m", Layout(tpa=2), Layout(kvp=3)),
            ("qwen3_moe", "gguf-q6_k", ONE, Layout(kvp=2, tpa=2, ep=2)),
            ("llama", "fp8-block", Layout(tpa=2), Layout(kvp=3)),
            ("llama", "int4-zero", TWO, ONE),
            ("qwen3_moe", "kimi-int4", ONE, Layout(kvp=2, tpa=2, ep=2)),
            ("qwen3_moe", "nvfp4", Layout(kvp=2, pp=2), TWO),
            ("deepseek_v3", "fp8-block", Layout(pp=2), Layout(kvp=2, tpa=2)),
        ],
        2,
    ),
)
def test_a_saved_context_answers_in_another_layout(oracles, tmp_path, family, form, saved_by, loaded_by):
    oracle = oracles(family, form)
    context, question = split(oracle)
    with engine(oracle, tmp_path, saved_by) as llm:
        llm.save_context("document", context)
    with engine(oracle, tmp_path, loaded_by) as llm:
        assert llm.load_context("document").loaded_blocks == 2
        (result,) = llm.generate([question], GREEDY, context="document")
    assert (result.cached_tokens, result.token_ids) == (32, oracle.tokens[3])


@pytest.mark.parametrize(
    ("family", "forms"), few([("llama", ("fp8-block", "int4-zero")), ("deepseek_v3", ("nvfp4", "kimi-int4"))])
)
def test_a_context_is_refused_with_weights_of_another_format(oracles, tmp_path, family, forms):
    """A plain checkpoint with the same numbers is another format too, and so are weights quantised while loading."""
    oracle = oracles(family, forms[0])
    plain = replace(oracle, path=oracle.path.parent / "plain")
    models = {
        forms[0]: (oracle, {}),
        forms[1]: (oracles(family, forms[1]), {}),
        "plain": (plain, {}),
        "quantised": (plain, {"weight_dtype": "int4-g128"}),
    }
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(engine(model, tmp_path / name, ONE, **settings))
            for name, (model, settings) in models.items()
        }
        for llm in engines.values():
            llm.save_context("document", split(oracle)[0])
        for name, llm in engines.items():
            for other in engines.keys() - {name}:
                code, words = refusal(llm, tmp_path / other)
                assert code == "context_mismatch"
                same_files = {name, other} == {"plain", "quantised"}
                assert ("was saved with weight_dtype" if same_files else "was saved with another model") in words


@pytest.mark.parametrize(
    ("family", "form", "kvp", "tpa"),
    few(
        [
            ("deepseek_v3", "nvfp4", 2, 1),
            ("llama", "gguf-q4_k_m", 2, 2),
            ("deepseek_v3", "gguf-q8_0", 2, 1),
            ("llama", "fp8-block", 2, 2),
            ("llama", "int4-zero", 3, 1),
        ]
    ),
)
@pytest.mark.parametrize("moved", [False, True], ids=["left", "moved"])
def test_a_request_goes_on_from_another_ones_blocks(worlds, oracles, family, form, kvp, tpa, moved):
    """The logits are those of transformers, whether or not the blocks were moved to other ranks."""
    oracle, kind = oracles(family, form), "mla-packed" if family == "deepseek_v3" else "gqa-packed"
    ranks = run(worlds, oracle, kind, kvp, tpa, whole=False, moved=moved, dtype="float32")
    assert_continues(oracle, ranks, cached_tokens_of(kind, whole=False))
    if moved and form in GGUF:  # with other heads
        assert any(int(rank["copied_bytes"]) for rank in ranks)
    elif moved:
        assert_moved(kind, kvp, tpa, ranks)


@pytest.mark.parametrize(
    ("family", "form", "layout"),
    few(
        [
            ("qwen3_moe", "kimi-int4", TWO),
            ("qwen3_moe", "gguf-q4_k_m", TWO),
            ("llama", "gguf-q6_k", Layout(kvp=2, tpa=2)),
            ("deepseek_v3", "gguf-q4_k_m", Layout(kvp=2, pp=2)),
            ("llama", "fp8-block", ONE),
            ("llama", "int4-zero", Layout(kvp=2, tpa=2)),
            ("deepseek_v3", "nvfp4", Layout(kvp=2, pp=2)),
        ],
        2,
    ),
)
def test_a_cached_prefix_changes_no_token(oracles, tmp_path, family, form, layout):
    oracle = oracles(family, form)
    other = [*oracle.prompts[3][:35], 1, 2, 3]
    with engine(oracle, tmp_path, layout) as llm:
        (first,) = llm.generate([oracle.prompts[3]], GREEDY)
        (cached,) = llm.generate([other], GREEDY)
        (fresh,) = llm.generate([other], GREEDY, ServiceLevel(cache_salt="fresh"))
    assert first.token_ids == oracle.tokens[3]
    assert (cached.cached_tokens, fresh.cached_tokens) == (32, 0)
    assert cached.token_ids == fresh.token_ids


@pytest.mark.parametrize(("swap_tokens", "counted"), [(0, "recomputed_tokens"), (512, "swapped_tokens")])
@pytest.mark.parametrize(
    ("family", "form", "layout"),
    few(
        [
            ("llama", "int4-zero", TWO),
            ("llama", "gguf-q4_k_m", TWO),
            ("qwen3_moe", "gguf-q6_k", Layout(kvp=2, tpa=2, ep=2)),
            ("deepseek_v3", "gguf-q4_k_m", Layout(pp=2)),
            ("qwen3_moe", "fp8-block", Layout(kvp=2, tpa=2, ep=2)),
            ("qwen3_moe", "kimi-int4", ONE),
            ("deepseek_v3", "nvfp4", Layout(pp=2)),
            ("deepseek_v3", "fp8-block", TWO),
        ],
        2,
    ),
)
def test_preempted_requests_have_the_same_tokens(oracles, tmp_path, family, form, layout, swap_tokens, counted):
    oracle = oracles(family, form)
    with engine(oracle, tmp_path, layout, kv_cache_tokens=96, swap_tokens=swap_tokens) as llm:
        llm._core._scheduler._swap_s = 0.0  # otherwise the model is too small to swap
        results = llm.generate(oracle.prompts * 2, GREEDY)
    assert [result.token_ids for result in results] == oracle.tokens * 2
    assert sum(result.preemptions for result in results) > 0
    assert sum(getattr(result, counted) for result in results) > 0


@needs_native
@pytest.mark.parametrize(
    ("family", "form", "kvp", "tpa", "more"),
    few(
        [
            ("llama", "fp8-block", 2, 1, {}),
            ("llama", "gguf-q4_k_m", 2, 1, {"dtype": "float32"}),
            ("qwen3_moe", "gguf-q4_k_m", 2, 1, {"ep": 2, "dtype": "bfloat16"}),
            ("llama", "gguf-q8_0", 2, 2, {"dtype": "bfloat16"}),
            ("qwen3_moe", "kimi-int4", 2, 1, {"ep": 2}),
            ("llama", "nvfp4", 2, 2, {"dtype": "bfloat16"}),
            ("llama", "int4-zero", 3, 1, {}),
            ("llama", "int4-zero", 1, 1, {"dtype": "bfloat16"}),
            ("qwen3_moe", "fp8-block", 1, 1, {}),
            ("qwen3_moe", "nvfp4", 2, 2, {"ep": 2}),
        ],
        2,
    ),
)
def test_logits_are_batch_invariant(worlds, oracles, family, form, kvp, tpa, more):
    """Each request has the same bits alone and beside others, in chunks of any size."""
    assert_batch_invariant(worlds, oracles(family, form), kvp, tpa, **more)


@needs_native
@pytest.mark.parametrize(
    ("family", "form", "layout"),
    few(
        [
            ("qwen3_moe", "kimi-int4", TWO),
            ("qwen3_moe", "gguf-q4_k_m", TWO),
            ("llama", "gguf-q6_k", Layout(kvp=2, tpa=2)),
            ("llama", "int4-zero", Layout(kvp=2, tpa=2)),
            ("llama", "fp8-block", Layout(tpa=2, pp=2)),
            ("qwen3_moe", "nvfp4", Layout(kvp=2, ep=2)),
        ]
    ),
)
def test_log_probabilities_are_batch_invariant(oracles, tmp_path, family, form, layout):
    """Through the engine, which checks at its start that it can run in this mode."""
    oracle, sampling = oracles(family, form), SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, logprobs=5)
    with engine(oracle, tmp_path, layout, batch_invariant=True, prefix_cache=False) as llm:
        alone = [llm.generate([prompt], sampling)[0] for prompt in oracle.prompts]
        together = llm.generate(oracle.prompts * 2, sampling)
    for own, other in zip(together, alone * 2, strict=True):
        assert (own.token_ids, own.logprobs) == (other.token_ids, other.logprobs)


# Eight layers of these sizes have about a hundred million weights.
LARGE = {
    "llama": {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_key_value_heads": 2},
    "qwen3_moe": {"hidden_size": 1024, "num_local_experts": 12, "moe_intermediate_size": 512},
    "deepseek_v3": {"hidden_size": 1024, "n_routed_experts": 8, "moe_intermediate_size": 512},
}
KV_TOKENS = 256


def held_bytes(path, layout):
    """Return the memory of a server's processes after its first answer: that of libraries, and all other.

    Pages that several processes share count once.
    """
    flags = ["--kvp", layout.kvp, "--tpa", layout.tpa, "--kv-cache-tokens", KV_TOKENS, "--max-model-len", KV_TOKENS]
    with serving(*map(str, [path, *flags])) as server:
        asked = {"model": path.name, "prompt": [1, 2, 3] * 20, "max_tokens": 4}
        httpx.post(server.url + "/v1/completions", json=asked, timeout=240).raise_for_status()
        root = psutil.Process(server.process.pid)
        processes = [root, *root.children(recursive=True)]
        maps = [each for process in processes for each in process.memory_maps()]
    assert len(processes) == 2 + layout.world_size  # one is the process that forks the ranks
    libraries = {}  # other programs also map these files, so their PSS depends on what else runs
    for each in maps:
        if ".so" in each.path:
            libraries[each.path] = max(each.rss, libraries.get(each.path, 0))
    return sum(libraries.values()), sum(each.pss for each in maps if each.path not in libraries)


@pytest.mark.slow  # two servers and large files
@pytest.mark.parametrize(
    ("family", "form", "layout"),
    [
        ("llama", "fp8-block", ONE),
        ("llama", "nvfp4", TWO),
        ("qwen3_moe", "kimi-int4", TWO),
        ("deepseek_v3", "fp8-block", Layout(tpa=2)),
    ],
)
def test_a_server_holds_its_weights_once_and_little_else(tmp_path, family, form, layout):
    """The loader keeps no buffers: memory beside the weights does not grow with the weights."""
    beside = []
    for num_layers in (1, 8):
        path = tmp_path / str(num_layers)
        save_large(changed(CONFIGS[family], num_hidden_layers=num_layers, **LARGE[family]), FORMS[form], path)
        save_tokenizer_files(path)
        config = resolve(open_checkpoint(str(path)), layout, EngineOptions(device="cpu"))
        ranks = range(layout.world_size)
        weights = sum(config.weight_bytes(rank) for rank in ranks)
        kv = sum(config.kv_bytes(rank, KV_TOKENS // layout.kvp) for rank in ranks)
        libraries, other = held_bytes(path, layout)
        beside.append(other - weights)
        assert libraries + other - weights - kv < 450e6
    assert weights > 60e6
    assert beside[1] - beside[0] < 20e6
