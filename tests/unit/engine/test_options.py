"""The engine's options, from Python: resolved or refused in a sentence, whatever they are."""

import math
import warnings
from dataclasses import fields

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anything import VALUES, Text
from builtin import builtin
from longhelix import LLM, UserError
from longhelix.compute.kernels import native
from longhelix.compute.machine import host
from longhelix.compute.models.rope import inverse_frequencies
from longhelix.compute.runner import pool_size
from longhelix.compute.runner.config import EngineConfig
from longhelix.engine import places
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.engine.settings import formats, kernels
from longhelix.spec import RopeSpec
from longhelix.spec.layout import Layout
from toy_model import attention_of

pytestmark = pytest.mark.unit

SOUND = {"kv_cache_tokens": 1024, "device": "cpu"}


def resolved(layout=Layout(kvp=2), **settings):  # noqa: B008 - frozen
    return resolve(builtin(), layout, EngineOptions.of(SOUND | settings))


@pytest.mark.parametrize("settings", [{"placement": "auto"}, {"kvp_threshold_tokens": 3000}, {"placement": "growing"}])
def test_no_rank_is_meant_to_have_more_of_a_request_than_its_pool_holds(settings):
    scheduler = resolved(max_model_len=4096, kv_cache_tokens=2048, **settings).scheduler
    assert scheduler.num_blocks * scheduler.block_tokens == 1024
    assert max(scheduler.placement.kvp_threshold_tokens, scheduler.placement.growth_limit_tokens) == 1024


def test_activations_in_fp8_are_refused_with_the_formats_of_a_gguf_file():
    words = r"needs fp8 weights, but those of the checkpoint are quantised otherwise \(q8_0 and q4_1\): leave out"
    for more in ({}, {"weight_dtype": "fp8-block"}):
        with pytest.raises(UserError, match=words):
            resolved(activation_dtype="fp8", **more)


ROPE_KEYS = ["rope_type", "type", "factor", "rope_theta", "truncate", "mscale", "mscale_all_dim", "beta_fast",
             "original_max_position_embeddings", "attention_factor", "partial_rotary_factor"]  # fmt: skip
ROPE = st.dictionaries(st.sampled_from(ROPE_KEYS), VALUES | st.sampled_from(["yarn", "dynamic", 2.0]), max_size=4)


@pytest.mark.parametrize("name", ["layout", *(setting.name for setting in fields(EngineOptions))])
@given(st.data())
def test_any_option_is_resolved_or_refused_in_a_sentence(name, data):
    value = data.draw(VALUES | ROPE if name == "rope_scaling" else VALUES)
    try:
        with warnings.catch_warnings(action="ignore"):
            resolved(**{name: value})
    except UserError as refused:
        assert_sentence(refused)


@pytest.mark.parametrize("kind", [np.str_, Text])
def test_strings_of_every_kind_are_kept_as_plain_ones(kind):
    texts = {
        "dtype": "float32", "weight_dtype": "int8", "kv_dtype": "int4", "placement": "auto", "device": "cpu",
        "execution": "eager", "attention": "own",
    }  # fmt: skip
    options = {name: kind(text) for name, text in texts.items()} | {"rope_scaling": {"rope_type": kind("default")}}
    config = resolved(**options)
    assert config == resolved(**texts, rope_scaling={"rope_type": "default"})
    # As workers get it: the encoder takes plain strings alone.
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


def assert_sentence(error):
    assert 10 < len(str(error).encode()) < 400


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layout": "kvp=2"}, "layout is 'kvp=2': set it to a Layout"),
        ({"max_model_len": 12.0}, "max_model_len is 12.0: set it to an integer"),
        ({"kv_cache_tokens": True}, "kv_cache_tokens is True: set it to an integer"),
        ({"hop_b": 2.5}, "hop_b is 2.5: set it to an integer from 1"),
        ({"dtype": ""}, "dtype '' is not known: use one of float32"),
        ({"kv_dtype": 8}, "kv_dtype 8 is not known"),
        ({"placement": "spread"}, "placement 'spread' is not known: use one of striped, growing, local, auto"),
        ({"batch_invariant": "no"}, "batch_invariant is 'no': set it to True or False"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn': set it to settings by name"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 10**400}}, "factor in the model's settings is"),
        ({"device": ["cpu"]}, "device ['cpu'] is not known"),
        ({"kv_dtpye": "int8"}, "unknown setting 'kv_dtpye': did you mean kv_dtype?"),
        ({"zzz": 1}, "unknown setting 'zzz': use one of activation_dtype, allow_without_key, allow_"),
        ({"attention_dtype": "fp8"}, "attention_dtype 'fp8' is not known: use one of int8"),
        ({"attention_dtype": "int8"}, "but kv_dtype is bfloat16: set kv_dtype to int8 or int4"),
        ({"activation_dtype": "int4"}, "activation_dtype 'int4' is not known: use one of int8, fp8"),
        (
            {"activation_dtype": "int8", "weight_dtype": "int4"},
            "activation_dtype int8 needs int8 weights, but weight_dtype is int4: leave one of them out",
        ),
        ({"attention_dtype": "int8", "kv_dtype": "fp8"}, "but kv_dtype is fp8: set kv_dtype to int8 or int4"),
    ],
)
def test_options_of_a_wrong_type_are_refused_in_words(options, words):
    with pytest.raises(UserError) as refused:
        resolved(**options)
    assert words in str(refused.value)


@pytest.mark.parametrize("multiplies", [True, False])
def test_attention_in_bytes_wants_a_processor_that_multiplies_them(monkeypatch, multiplies):
    monkeypatch.setattr(formats, "multiplies_integers", lambda: multiplies)
    options = {"attention_dtype": "int8", "kv_dtype": "int4", "device": "cpu"}
    if multiplies:
        assert resolved(**options).formats.attention_dtype == "int8"
        assert resolved(kv_dtype="int4", device="cpu").formats.attention_dtype is None
        return
    with pytest.raises(UserError, match="needs the native kernels on a CPU with AVX-512 VNNI"):
        resolved(**options)


def test_products_in_bytes_have_weights_of_bytes():
    config, plain = resolved(activation_dtype="int8", weight_dtype="int8", device="cpu"), resolved(device="cpu")
    formats, plain_formats = config.formats, plain.formats
    assert (formats.weight_dtype, formats.activation_dtype, formats.product_dtype) == ("int8", "int8", "w8a8")
    assert (plain_formats.activation_dtype, plain_formats.product_dtype) == (None, plain_formats.weight_dtype)
    assert config.weight_bytes(0) < resolved(weight_dtype="int8", device="cpu").weight_bytes(0)


@pytest.mark.skipif(native.module is None, reason="GGUF files are expanded without native kernels")
def test_products_in_bytes_keep_the_packed_weights_of_gguf_files():
    config, plain = resolved(activation_dtype="int8", device="cpu"), resolved(device="cpu")
    assert config.weight_bytes(0) == plain.weight_bytes(0)
    for rounds, each in ((True, config), (False, plain)):
        rules = each.spec.checkpoint.quantisation.rules
        assert {rule.storage.rounds_inputs for rule in rules} == {rounds}
        assert {rule.storage.kept for rule in rules} == {rule.storage.repacked or rule.storage.format for rule in rules}


@pytest.mark.skipif(native.module is None, reason="GGUF files are expanded without native kernels")
def test_gpus_keep_the_packed_weights_of_gguf_files(monkeypatch):
    monkeypatch.setattr(places, "free_gpu_bytes", lambda: [2**34] * 2)
    config, expanded = resolved(device="cuda"), resolved(device="cuda", weight_dtype="bfloat16")
    assert config.spec.checkpoint.quantisation == resolved(device="cpu").spec.checkpoint.quantisation
    assert expanded.spec.checkpoint.quantisation is None
    assert config.weight_bytes(0) < expanded.weight_bytes(0) / 2


def test_products_in_bytes_run_on_cpus_with_native_kernels(monkeypatch):
    monkeypatch.setattr(places, "free_gpu_bytes", lambda: [2**34] * 2)
    with pytest.raises(UserError, match="activation_dtype int8 runs only on CPUs: set device to cpu"):
        resolved(activation_dtype="int8", device="cuda")
    monkeypatch.setattr(kernels, "has_native_kernels", lambda: False)
    with pytest.raises(UserError, match="activation_dtype int8 needs the native CPU kernels, which this install does"):
        resolved(activation_dtype="int8", device="cpu")


YARN, HALVES = {"rope_type": "yarn", "factor": 2}, [1.0] * 32
LONGROPE = {"rope_type": "longrope", "factor": 8, "short_factor": HALVES, "long_factor": HALVES}


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (YARN | {"rope_theta": 1}, "rope_theta in the model's settings is 1.0: set it to a number above 1"),
        ({"rope_type": "default", "rope_theta": 1e-300}, "set it to a number above 1"),
        (YARN | {"beta_fast": 1e308}, "beta_fast in the model's settings is 1e+308: set it to a number from 0.001"),
        (YARN | {"beta_slow": 1e-308}, "beta_slow in the model's settings is 1e-308"),
        (YARN | {"original_max_position_embeddings": 0.5}, "is 0.5: set it to an integer from 1 to"),
        (YARN | {"original_max_position_embeddings": 1e300}, "is 1e+300: set it to an integer from 1 to"),
        (YARN | {"original_max_position_embeddings": 10**300}, "set it to an integer from 1 to"),
        (YARN | {"attention_factor": 1e300}, "attention_factor in the model's settings is 1e+300"),
        (YARN | {"mscale": 1e300, "mscale_all_dim": 1}, "mscale in the model's settings is 1e+300"),
        (YARN | {"truncate": "no"}, "truncate in the model's settings is 'no': set it to True or False"),
        ({"rope_type": "linear", "factor": 1e-300}, "factor in the model's settings is 1e-300"),
        (LONGROPE | {"original_max_position_embeddings": 1}, "is 1: set it to an integer from 2 to"),
        (
            LONGROPE | {"long_factor": [*HALVES[1:], 1e-300]},
            "a number of long_factor is 1e-300: set it to a number of 0.001 or more",
        ),
        (LONGROPE | {"long_factor": [*HALVES[1:], 10**400]}, "a number of long_factor is"),
        (LONGROPE | {"short_factor": 1}, "short_factor is 1: set it to a list of 32 numbers"),
        (
            {"rope_type": "dynamic", "factor": 1e6, "rope_theta": 1e308},
            "the rope settings give frequencies",
        ),
    ],
)
def test_rope_settings_that_give_no_frequencies_are_refused_in_words(rope, words):
    with pytest.raises(UserError) as refused, warnings.catch_warnings(action="ignore"):
        resolved(rope_scaling=rope, max_model_len=100_000)
    assert words in str(refused.value)
    assert_sentence(refused.value)


ODD = st.sampled_from([0.001, 0.5, 1, 1.0000000000000002, 2, 1e6, 1e308, 2**53])
EVERY_ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "dynamic", "llama3", "yarn", "longrope"])},
    optional={"short_factor": st.just(HALVES), "long_factor": st.just(HALVES), "truncate": st.booleans()}
    | dict.fromkeys([*ROPE_KEYS[2:4], *ROPE_KEYS[5:-1], "low_freq_factor", "high_freq_factor"], ODD),
)


@given(EVERY_ROPE, st.sampled_from([1, 8192, 2**31 - 1]))
def test_rope_settings_that_are_resolved_give_frequencies(rope, max_model_len):
    try:
        with warnings.catch_warnings(action="ignore"):
            spec = resolved(rope_scaling=rope, max_model_len=max_model_len).spec
    except UserError as refused:
        assert_sentence(refused)
        return
    assert (
        msgspec.msgpack.decode(msgspec.msgpack.encode(attention_of(spec).rope), type=RopeSpec)
        == attention_of(spec).rope
    )
    for length in (1, max_model_len):
        assert all(0 < frequency < math.inf for frequency in inverse_frequencies(attention_of(spec).rope, 64, length))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": 5}, 'model is 5: set it to "builtin", the path'),
        ({"model": "builtin", "layout": 2}, "layout is 2: set it to a Layout"),
        ({"model": "builtin", "trace": 7}, "trace is 7: set it to a path"),
    ],
)
def test_an_engine_of_nonsense_is_refused_before_anything_starts(arguments, words):
    with pytest.raises(UserError) as refused:
        LLM(**arguments)
    assert words in str(refused.value)


@pytest.mark.parametrize(("cores", "most"), [(2, 64), (96, 384)])
def test_more_ranks_than_cores_can_serve_are_refused_before_anything_is_done_for_each(monkeypatch, cores, most):
    asked = []

    def stored_bytes(spec, layout, rank, dtype, weight_dtype):
        asked.append(rank)
        return {}

    monkeypatch.setattr(host, "cores", lambda: cores)
    monkeypatch.setattr(pool_size, "stored_bytes", stored_bytes)
    with pytest.raises(UserError, match=f"10000 ranks, .* {cores} cores .* at most {most} ranks"):
        resolved(Layout(kvp=10_000))
    assert asked == []
    with warnings.catch_warnings(action="ignore"):
        resolved(Layout(kvp=most))
    assert asked == list(range(most))


@pytest.mark.parametrize(
    ("block_tokens", "available_bytes", "words"),
    [
        (16, 2**20, "the weights take "),
        (2**31 - 1, 2**30, "tokens of KV cache, less than one block of 2147483647: set --block-tokens to at most "),
    ],
)
def test_what_leaves_no_room_for_a_block_is_named(monkeypatch, block_tokens, available_bytes, words):
    monkeypatch.setattr(host, "available_bytes", lambda: available_bytes)
    with pytest.raises(UserError) as refused:
        resolved(kv_cache_tokens=None, block_tokens=block_tokens)
    assert words in str(refused.value)
    if "at most" in words:
        most = int(str(refused.value).split("at most ")[1].split(",")[0])
        with warnings.catch_warnings(action="ignore"):
            assert resolved(kv_cache_tokens=None, block_tokens=most).scheduler.num_blocks == 1
