"""What this engine runs of a plan's layout: settings that its own files have, and what is missing, in sentences."""

from dataclasses import fields, replace
from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix import UserError
from longhelix.cli.layout_file import read_layout
from longhelix.compute.kernels import native
from longhelix.compute.models.parameters import declare
from longhelix.engine.options import EngineOptions
from longhelix.plan import deployment as module
from longhelix.plan.candidate import degrees
from longhelix.plan.deployment import Deployment, as_yaml, comment, runnable
from longhelix.plan.space import space
from longhelix.scheduler.config import SchedulerConfig, StepConfig
from longhelix.spec import DTYPES, FORMATS, KV_DTYPES, MLP, WEIGHT_DTYPES, Scores, Visibility
from longhelix.spec.presets import load_model
from longhelix.spec.weights import WeightDtype
from toy_model import moe_of, with_attention, with_ffns

pytestmark = pytest.mark.unit

SMOL, R1, LLAMA, MIXTRAL = (
    load_model(name) for name in ("smollm2-135m", "deepseek-r1", "llama-3.1-405b", "mixtral-8x22b")
)
ONE = {"dp": 1, "kvp": 1, "tpa": 1, "tpf": 1, "ep": 1, "pp": 1, "ffn_replicas": 1, "placement": "striped"}


def test_a_model_that_is_only_planned_keeps_the_planned_length_in_its_file():
    """Longhelix does not run it anyway, and the file says so."""
    found = runnable(deployment(load_model("gpt-oss-120b"), device="cuda", context=100_000, tpa=8, tpf=8))
    assert found.settings["max_model_len"] == 100_000
    assert any("cannot run it" in sentence for sentence in found.missing)


def deployment(
    model=SMOL, weights="bfloat16", kv="bfloat16", device="cpu", context=8192, users=1, chunk=None, hop_b=True, **layout
):
    return Deployment(model, ONE | layout, weights, kv, device, context, users, chunk, hop_b)


def read(found, tmp_path):
    file = tmp_path / "plan.yaml"
    file.write_text(as_yaml(found))
    return read_layout(file)


def test_the_built_in_model_on_cpus_runs_as_planned(tmp_path):
    found = runnable(deployment(kvp=2, tpa=3, tpf=6, users=3, chunk=512))
    assert found.missing == ()
    assert as_yaml(found) == (
        "kvp: 2\ntpa: 3\ntpf: 6\nep: 1\npp: 1\nplacement: striped\ndevice: cpu\ndtype: bfloat16\n"
        "weight_dtype: bfloat16\nkv_dtype: bfloat16\nmax_model_len: 8192\nkv_cache_tokens: 24576\nchunk_tokens: 512\n"
    )
    degrees, settings = read(found, tmp_path)
    assert degrees == {"kvp": 2, "tpa": 3, "tpf": 6, "ep": 1, "pp": 1}
    assert settings == {
        "placement": "striped",
        "device": "cpu",
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "max_model_len": 8192,
        "kv_cache_tokens": 24576,
        "chunk_tokens": 512,
    }


def test_formats_that_nobody_stores_become_the_nearest_that_runs_and_the_file_says_so(tmp_path):
    found = runnable(deployment(weights="fp4", kv="fp4", kvp=2, tpf=2))
    assert found.missing == (
        "weights are planned in fp4, which the engine cannot store yet: int4 here",
        "the KV cache is planned in fp4, which the engine cannot store yet: nvfp4 here",
    )
    assert as_yaml(found).startswith(
        "# Not as planned: weights are planned in fp4, which the engine cannot store yet: int4 here\n"
        "# Not as planned: the KV cache is planned in fp4, which the engine cannot store yet: nvfp4 here\n"
        "kvp: 2\n"
    )
    _, settings = read(found, tmp_path)
    assert (settings["device"], settings["weight_dtype"], settings["kv_dtype"]) == ("cpu", "int4", "nvfp4")


def test_a_plan_for_gpus_in_formats_of_cpus_stays_on_gpus_and_says_what_cpus_run():
    found = runnable(deployment(LLAMA, "fp4", "fp4", "cuda", 1_000_000, 4, kvp=2, tpa=4, tpf=8))
    assert (found.settings["device"], found.settings["weight_dtype"], found.settings["kv_dtype"]) == (
        "cuda",
        "bfloat16",
        "nvfp4",
    )
    assert found.missing[2] == (
        "formats closer to the plan run on CPUs only: set device cpu, weight_dtype int4, kv_dtype nvfp4"
    )


def test_a_plan_for_gpus_in_formats_of_gpus_is_left_to_them():
    found = runnable(deployment(LLAMA, "bfloat16", "fp8", "cuda", 100_000, 4, kvp=2, tpa=4, tpf=8))
    assert found.missing == ()
    assert found.settings["device"] == "cuda"


def test_weights_that_a_checkpoint_packs_need_no_setting():
    for device in ("cpu", "cuda"):
        chosen = deployment(R1, "mxfp8", "bfloat16", device, 100_000, 4, kvp=3, tpf=3)
        found, packed = runnable(chosen), runnable(replace(chosen, packed=True))
        assert found.settings["weight_dtype"] == "bfloat16"  # 682 columns of an FFN are no whole blocks of int8
        assert not {"dtype", "weight_dtype"} & packed.settings.keys()
        assert not any("weights are planned" in sentence for sentence in packed.missing)
        assert any("weights are planned" in sentence for sentence in found.missing)
    for name in ("fp8-block", "int4-g128", "nvfp4"):  # in which the engine quantises, for all shapes
        made = runnable(replace(chosen, weight_dtype=name))
        assert made.settings["weight_dtype"] == name
        assert not any("weights are planned" in sentence for sentence in made.missing)
    mixed = replace(chosen, weight_dtype="bfloat16", expert_dtype="fp8-block")
    assert any("experts are planned" in sentence for sentence in runnable(mixed).missing)
    assert not any("experts are planned" in sentence for sentence in runnable(replace(mixed, packed=True)).missing)


def test_bytes_times_bytes_are_two_settings():
    found = runnable(deployment(weights="w8a8", kv="int8"))
    assert found.missing == ()
    assert [found.settings[name] for name in ("weight_dtype", "activation_dtype", "device")] == ["int8", "int8", "cpu"]
    assert "dtype" not in found.settings


def test_latents_are_kept_narrow_on_gpus_alone():
    layout = {"kvp": 4, "tpf": 4}
    planned = runnable(deployment(R1, "bfloat16", "fp8", "cuda", **layout))
    assert planned.settings["kv_dtype"] == "fp8"
    assert (planned.settings["device"], planned.missing) == ("cuda", ())
    on_cpus = runnable(deployment(R1, "bfloat16", "fp8", **layout))
    assert on_cpus.settings["kv_dtype"] == "bfloat16"
    assert on_cpus.missing == (
        "the KV cache is planned in fp8, which the engine cannot store for this model on CPUs: bfloat16 here",
    )


def test_weights_whose_inputs_do_not_come_in_blocks_stay_wide():
    # 1536 columns over 5 ranks are 308 and 307, of which neither is a multiple of 32.
    found = runnable(deployment(weights="int8", kvp=5, tpf=5))
    assert (found.settings["weight_dtype"], found.settings["dtype"]) == ("bfloat16", "bfloat16")
    assert found.missing == (
        "weights are planned in int8, which the engine stores only on CPUs, and only if every rank's inputs of "
        "products are whole blocks: bfloat16 here",
    )


def _small_models():
    moe = msgspec.structs.replace(moe_of(MIXTRAL), num_experts=3, experts_per_token=2, expert_size=192)
    routing = msgspec.structs.replace(moe_of(R1).routing, num_groups=1, groups_per_token=1)
    latent = msgspec.structs.replace(
        moe_of(R1), num_experts=4, experts_per_token=2, expert_size=96, shared_size=96, routing=routing
    )
    return (
        with_ffns(SMOL, MLP(192)),
        with_ffns(SMOL, MLP(160)),
        with_ffns(MIXTRAL, moe),
        with_ffns(R1, MLP(256), latent),
    )


@pytest.mark.parametrize("model", _small_models(), ids=lambda model: f"{model.architecture} {model.ffns[0]}")
def test_weights_are_narrow_exactly_where_each_ranks_products_divide_into_blocks(model):
    searched = space(model, 4)
    kept = set()
    for index in range(len(searched)):
        layout = degrees(searched.layouts, index)
        planned = Deployment(model, layout, "int8", "bfloat16", "cpu", 100, 1)
        depths = {
            parameter.local_shape[1]
            for rank in range(planned.degrees.world_size)
            for parameter in declare(model, planned.degrees, rank)
            if parameter.stored is WeightDtype.PRODUCT
        }
        divides = all(depth % 32 == 0 for depth in depths)
        assert (runnable(planned).settings["weight_dtype"] == "int8") == divides, layout
        kept.add(divides)
    assert kept == {True, False}


def test_every_file_is_one_of_the_engine(tmp_path):
    formats = {*product(FORMATS, ["fp8"]), *product(["fp8"], FORMATS)}
    for model, (weights, kv), device in product((SMOL, R1), formats, ("cpu", "cuda")):
        found = runnable(
            deployment(model, weights, kv, device, 100_000, 7, kvp=4, tpf=4, placement="local", hop_b=False)
        )
        degrees, settings = read(found, tmp_path)
        assert degrees == {"kvp": 4, "tpa": 1, "tpf": 4, "ep": 1, "pp": 1}
        assert settings["placement"] == "local"
        assert settings["weight_dtype"] in WEIGHT_DTYPES
        assert settings["kv_dtype"] in KV_DTYPES
        # The engine wants weights that are not quantised in the dtype of activations.
        assert settings["weight_dtype"] not in DTYPES or settings["dtype"] == settings["weight_dtype"]
        assert all(line.startswith("#") or ": " in line for line in as_yaml(found).splitlines())
        assert max(map(len, as_yaml(found).splitlines())) <= 120


def test_pools_hold_every_request_in_whole_blocks_of_every_rank():
    # 100 tokens of each of 2 requests: 3 blocks of 3 x 16 striped; 7 of 16 on the rank of each.
    assert runnable(deployment(context=100, users=2, kvp=3, tpf=3)).settings["kv_cache_tokens"] == 2 * 3 * 48
    local = runnable(deployment(context=100, users=4, kvp=3, tpf=3, placement="local"))
    assert local.settings["kv_cache_tokens"] == 2 * 3 * 112


def test_requests_at_a_time_are_said_where_the_engine_would_run_fewer():
    assert "max_running" not in runnable(deployment(users=64)).settings
    assert runnable(deployment(users=65)).settings["max_running"] == 65


def test_what_the_engine_has_by_default_is_known():
    defaults = {setting.name: setting.default for setting in fields(EngineOptions)}
    assert defaults["max_running"] == StepConfig.max_running
    assert defaults["block_tokens"] == SchedulerConfig.block_tokens
    assert module._LANES == native.LANES


def test_exchanges_that_are_not_hidden():
    assert runnable(deployment(kvp=2, tpf=2, hop_b=False)).settings["hop_b"] == 1
    assert "hop_b" not in runnable(deployment(kvp=2, tpf=2)).settings
    assert "hop_b" not in runnable(deployment(hop_b=False)).settings


def test_copies_of_the_ffn_are_the_tied_layout(tmp_path):
    degrees, _ = read(runnable(deployment(kvp=3, tpa=3, tpf=3, ffn_replicas=3)), tmp_path)
    assert degrees == {"kvp": 3, "tpa": 3, "tpf": 3, "ep": 1, "pp": 1, "tied": True}


@pytest.mark.parametrize(("placement", "pool"), [("striped", 8000 + 2 * 992), ("local", 2 * (8000 + 992))])
def test_the_pool_holds_one_longest_request_and_others_as_they_are(placement, pool):
    """Three of them: 8,000 tokens, and 980 in whole KV blocks of two ranks; where each is on one rank, two on one."""
    planned = replace(deployment(context=8000, users=3, kvp=2, tpf=2, placement=placement), other_tokens=980)
    assert runnable(planned).settings["kv_cache_tokens"] == pool


def test_a_family_that_is_planned_alone_is_said_not_to_run():
    model = with_attention(replace(SMOL, architecture="gpt_oss"), scores=Scores(sinks=True))
    assert runnable(deployment(model=model)).missing[0] == (
        "longhelix can plan for this gpt_oss model, but cannot run it, because these parts are not implemented: "
        "attention sinks"
    )


def test_windows_do_not_bound_the_length():
    model = with_attention(replace(SMOL, architecture="mistral"), visibility=Visibility(window_tokens=4096))
    found = runnable(deployment(model))
    assert (found.settings["max_model_len"], found.settings["kv_cache_tokens"]) == (8192, 8192)
    assert not found.missing


def test_groups_of_kvp_ranks_become_one_and_the_file_says_so(tmp_path):
    planned = deployment(R1, users=7, dp=2, kvp=4, tpf=1, ep=8)
    assert (planned.groups, planned.kvp, planned.group_ranks, planned.users_of_a_group) == (2, 4, 4, 4)
    found = runnable(planned)
    assert (
        "the plan has 2 groups of 4 KVP ranks with separate requests, which longhelix cannot run: here all 8 KVP ranks "
        "share every request"
    ) in found.missing
    degrees, settings = read(found, tmp_path)
    assert (degrees["kvp"], degrees["ep"], settings["placement"]) == (8, 8, "striped")
    assert settings["kv_cache_tokens"] == 7 * 8192
    assert not any("groups" in sentence for sentence in runnable(deployment(kvp=4, tpf=4, placement="local")).missing)


def test_tokens_that_only_drafts_give_are_said():
    planned = replace(deployment(kvp=2, tpf=2), accepted_tokens=1.8)
    assert any("assumes 1.8 tokens per step" in sentence for sentence in runnable(planned).missing)


def test_more_than_one_host():
    on_gpus = deployment(LLAMA, "bfloat16", "bfloat16", "cuda", kvp=8, tpa=2, tpf=16)
    found = runnable(replace(on_gpus, host_ranks=8))
    assert (found.settings["nnodes"], found.missing) == (2, ())
    assert "nnodes" not in runnable(replace(on_gpus, host_ranks=16)).settings
    on_cpus = runnable(deployment(LLAMA, kvp=10, tpa=8, tpf=80))
    assert on_cpus.missing == ("all 80 ranks are processes on one host: it needs 20 cores or more",)


@given(words=st.lists(st.text("abc-:/", min_size=1, max_size=150), min_size=1, max_size=20))
def test_comments_keep_their_words(words):
    lines = comment(" ".join(words))
    assert all(line.startswith("# ") for line in lines)
    assert " ".join(line.removeprefix("#").strip() for line in lines).split() == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kvp": 2}, "tpf"),
        ({"kvp": 0}, "kvp"),
        ({"kvp": True}, "kvp"),
        ({"tpa": 9, "tpf": 9, "kvp": 2}, "."),
        ({"placement": "auto"}, "placement 'auto' is not known: use one of striped, local"),
        ({"ep": 2, "kvp": 2}, "ep"),
        ({"kvp": 4, "tpf": 2, "ffn_replicas": 2}, "set ffn_replicas to 4 and ep to 1"),
        ({"kvp": 2, "ffn_replicas": 2, "placement": "local"}, "are separate servers"),
        ({"dp": 2, "kvp": 2, "ffn_replicas": 4}, "are separate servers"),
        ({"dp": 0}, "dp"),
        ({"pp": 31}, "."),
    ],
)
def test_layouts_that_none_can_have(changes, words):
    with pytest.raises(UserError, match=words):
        deployment(**changes)


def test_a_layout_without_a_degree():
    layout = {name: value for name, value in ONE.items() if name != "ep"}
    with pytest.raises(UserError, match="the layout has no ep: give a number for each of dp, kvp, tpa"):
        Deployment(SMOL, layout, "bfloat16", "bfloat16", "cpu", 100, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "fp3"},
        {"kv": "fp3"},
        {"device": "tpu"},
        {"context": 0},
        {"users": 0},
        {"users": 2**16 + 1},
        {"chunk": 0},
        {"chunk": 1.5},
    ],
)
def test_values_that_are_none(changes):
    with pytest.raises(UserError):
        deployment(**changes)
