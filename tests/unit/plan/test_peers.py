"""Commands of other engines: each option is one of the engine's own, with a value that it takes, or the reason is said.

A command is read back as its engine would: split as a shell does, and parsed by a parser made of the stored options.
"""

import argparse
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from longhelix import UserError
from longhelix.plan.candidate import degrees
from longhelix.plan.deployment import Deployment
from longhelix.plan.peer_command import COUNT, INDEX, SWITCH, TEXT, Option, Options
from longhelix.plan.peers import CONFIG_FILE, OPTIONS, commands
from longhelix.plan.space import space
from longhelix.spec import FAMILIES, FORMATS, Visibility
from longhelix.spec.layout import HeadShape
from longhelix.spec.presets import load_model
from toy_model import attention_of, with_attention

pytestmark = pytest.mark.unit

NAMES = ("smollm2-135m", "llama-3.1-405b", "mixtral-8x22b", "qwen3-235b-a22b", "deepseek-r1")
MODELS = {name: load_model(name) for name in NAMES}
SMOL, LLAMA, MIXTRAL, QWEN, R1 = MODELS.values()
DENSE_QWEN = replace(LLAMA, architecture="qwen3")
ONE = {"dp": 1, "kvp": 1, "tpa": 1, "tpf": 1, "ep": 1, "pp": 1, "ffn_replicas": 1, "placement": "striped"}
PREFIXES = {
    "vLLM": ["vllm", "serve"],
    "TensorRT-LLM": ["trtllm-serve"],
    "SGLang": ["python3", "-m", "sglang.launch_server"],
}


def deployment(
    model, weights="bfloat16", kv="bfloat16", context=8192, users=4, chunk=2048, hop_b=False, **layout
) -> Deployment:
    return Deployment(model, ONE | layout, weights, kv, "cuda", context, users, chunk, hop_b)


def found(peer, *asked, **layout):
    return {command.engine: command for command in commands(deployment(*asked, **layout), "a/model")}[peer]


def settings_of(command):
    """A command's options and values as its engine would read them, those of its file by dotted names."""
    words = shlex.split(command.line)
    variables = [words.pop(0) for _ in command.environment]
    prefix = PREFIXES[command.engine]
    assert words[: len(prefix)] == prefix
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    known = OPTIONS[command.engine].known
    for option in known.values():
        if not option.name.startswith("--"):
            continue
        if option.takes == SWITCH:
            parser.add_argument(option.name, action="store_true", default=argparse.SUPPRESS)
        else:
            choices = option.takes if isinstance(option.takes, tuple) else None
            kind = int if option.takes in (COUNT, INDEX) else str
            parser.add_argument(option.name, type=kind, choices=choices, default=argparse.SUPPRESS)
    if command.engine != "SGLang":
        parser.add_argument("model")
    given = vars(parser.parse_args(words[len(prefix) :]))
    assert given.pop("model" if command.engine != "SGLang" else "model_path") == "a/model"
    given = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    given |= dict(variable.split("=") for variable in variables)
    given |= dict(flat(yaml.safe_load(command.config_yaml()) or {}))
    for name, value in given.items():
        assert known[name].allows(value), (command.engine, name, value)
    return given


def flat(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def layouts(model, most_gpus):
    """Each layout of the planner's space once."""
    searched = space(model, most_gpus)
    for index in range(len(searched)):
        yield degrees(searched.layouts, index)


@pytest.mark.parametrize("name", NAMES)
def test_each_option_of_each_command_is_one_of_the_engines_own(name):
    model = MODELS[name]
    formats = [(weights, "fp8") for weights in FORMATS] + [("bfloat16", kv) for kv in FORMATS] + [("fp4", "fp4")]
    grid = [
        *layouts(model, 4),
        ONE
        | {"kvp": 8, "tpa": attention_of(model).heads.num_kv_heads, "tpf": 8 * attention_of(model).heads.num_kv_heads},
    ]
    answered = dict.fromkeys(OPTIONS, 0)
    for position, layout in enumerate(grid):
        weights, kv = formats[position % len(formats)]
        for context, chunk in ((8192, None), (1_000_000, 4096)):
            planned = Deployment(model, layout, weights, kv, "cuda", context, 5, chunk)
            for command in commands(planned, "a/model"):
                assert bool(command.argv) != bool(command.cannot)
                assert all(known_options(command)), command.notes
                if command.cannot:
                    assert command.as_text().count("# cannot: ") == len(command.cannot)
                    assert not command.config_yaml()
                else:
                    answered[command.engine] += 1
                    settings = settings_of(command)
                    gpus = gpus_of(command.engine, settings)
                    assert gpus == planned.degrees.world_size, (command.engine, layout)
    assert all(answered.values())


def known_options(command):
    """Of each option that notes and reasons name, whether it is in the list."""
    words = " ".join((*command.notes, *command.cannot))
    return [name in OPTIONS[command.engine].known for name in re.findall(r"(?<!\S)--[a-z][a-z-]+", words)]


def gpus_of(engine, settings):
    """Processes that the engine starts, by its own rule."""
    sizes = {
        # Decode context parallel ranks are tensor parallel ones, as are data parallel ones in SGLang and TensorRT-LLM.
        "vLLM": ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size"),
        "SGLang": ("--tp-size", "--pp-size"),
        "TensorRT-LLM": ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"),
    }[engine]
    gpus = 1
    for name in sizes:
        gpus *= settings.get(name, 1)
    return gpus


def test_helix_of_latents():
    planned = deployment(R1, "fp4", "fp8", 1_000_000, 32, 4096, kvp=8, tpf=8)
    vllm, tensorrt, sglang = commands(planned, "a/model")
    assert vllm.line == (
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 vllm serve a/model --tensor-parallel-size 8 --decode-context-parallel-size 8 "
        "--dcp-comm-backend a2a --kv-cache-dtype fp8 --max-model-len 1000000 --max-num-batched-tokens 4128 "
        "--enable-chunked-prefill --max-num-seqs 32"
    )
    assert tensorrt.line == f"TLLM_ALLOW_LONG_MAX_MODEL_LEN=1 trtllm-serve a/model --config {CONFIG_FILE}"
    assert yaml.safe_load(tensorrt.config_yaml()) == {
        "tensor_parallel_size": 1,
        "context_parallel_size": 8,
        "cp_config": {"cp_type": "HELIX", "tokens_per_block": 32},
        "moe_tensor_parallel_size": 8,
        "moe_expert_parallel_size": 1,
        "max_seq_len": 1_000_000,
        "max_batch_size": 32,
        "enable_chunked_prefill": False,
        "kv_cache_config": {"dtype": "fp8", "tokens_per_block": 32, "enable_block_reuse": False},
        "cache_transceiver_config": {"backend": "DEFAULT"},
    }
    assert sglang.line == (
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 python3 -m sglang.launch_server --model-path a/model --tp-size 8 "
        "--dcp-size 8 --dcp-comm-backend a2a --kv-cache-dtype fp8_e4m3 --context-length 1000000 "
        "--chunked-prefill-size 4096 --max-running-requests 32"
    )


def test_helix_of_kv_heads():
    llama = {"model": LLAMA, "kv": "fp8", "kvp": 8, "tpa": 8, "tpf": 64}
    assert settings_of(found("vLLM", **llama)) == {
        "--tensor-parallel-size": 64,
        "--decode-context-parallel-size": 8,
        "--dcp-comm-backend": "a2a",
        "--dtype": "bfloat16",
        "--kv-cache-dtype": "fp8",
        "--max-model-len": 8192,
        "--max-num-batched-tokens": 2052,
        "--enable-chunked-prefill": True,
        "--max-num-seqs": 4,
    }
    assert found("TensorRT-LLM", **llama).cannot[0].startswith("Helix is not supported for llama: it")
    assert (
        found("SGLang", **llama).cannot[0].startswith("decode context parallelism is not supported for llama: SGLang")
    )
    qwen = settings_of(found("TensorRT-LLM", **(llama | {"model": DENSE_QWEN})))
    assert (qwen["tensor_parallel_size"], qwen["context_parallel_size"]) == (8, 8)
    assert "moe_tensor_parallel_size" not in qwen


def test_vllms_bound_of_decode_context_parallelism():
    # 8 KV heads: with TPA 4, 32 tensor parallel ranks hold each KV head 4 times, which is less than KVP 8.
    assert found("vLLM", LLAMA, kvp=8, tpa=4, tpf=32).cannot == (
        "decode context parallel size 8 with tensor parallel size 32: at most 4 is allowed (tensor parallel size / "
        "8 KV heads, rounded down), and the tensor parallel size must exceed the number of KV heads "
        "(vllm/config/model.py at 0052a5b81898)",
    )
    # 16 query heads of each KV head do not divide by 3; nor do 128 query heads by 24.
    sentences = found("vLLM", LLAMA, kvp=3, tpa=8, tpf=24).cannot
    assert any(sentence.startswith("tensor parallel size 24 must divide the 128 query") for sentence in sentences)
    assert any("size 3 must divide the 16 query heads per KV head" in sentence for sentence in sentences)


def test_data_parallel_attention():
    layout = {"kvp": 4, "ep": 4, "placement": "local"}
    vllm, tensorrt, sglang = commands(deployment(R1, users=10, chunk=1024, **layout), "a/model")
    asked = settings_of(vllm)
    assert [asked[f"--{name}"] for name in ("tensor-parallel-size", "data-parallel-size", "max-num-seqs")] == [1, 4, 3]
    assert asked["--enable-expert-parallel"] is True
    assert "--decode-context-parallel-size" not in asked
    asked = settings_of(tensorrt)
    assert (asked["tensor_parallel_size"], asked["enable_attention_dp"], asked["max_batch_size"]) == (4, True, 3)
    assert (asked["moe_tensor_parallel_size"], asked["moe_expert_parallel_size"]) == (1, 4)
    asked = settings_of(sglang)
    assert [asked[f"--{name}-size"] for name in ("tp", "dp", "ep", "chunked-prefill")] == [4, 4, 4, 4096]
    assert asked["--max-running-requests"] == 12


def test_groups_of_kvp_ranks():
    """Two groups of four GPUs, each of which shards its requests' KV."""
    layout = {"dp": 2, "kvp": 4, "tpf": 1, "ep": 8}
    vllm, tensorrt, sglang = commands(deployment(R1, users=10, chunk=1024, **layout), "a/model")
    asked = settings_of(vllm)
    sizes = ("tensor-parallel-size", "data-parallel-size", "decode-context-parallel-size", "max-num-seqs")
    assert [asked[f"--{name}"] for name in sizes] == [4, 2, 4, 5]
    asked = settings_of(tensorrt)
    assert (asked["tensor_parallel_size"], asked["context_parallel_size"], asked["max_batch_size"]) == (2, 4, 5)
    assert (asked["enable_attention_dp"], asked["moe_expert_parallel_size"]) == (True, 8)
    asked = settings_of(sglang)
    assert [asked[f"--{name}-size"] for name in ("tp", "dp", "dcp", "ep")] == [8, 2, 4, 8]
    assert asked["--enable-dp-attention"] is True
    assert asked["--max-running-requests"] == 10
    dense = {"dp": 2, "kvp": 2, "tpa": 2, "tpf": 8}
    for command in commands(deployment(DENSE_QWEN, **dense), "a/model"):
        assert any("data parallel" in sentence for sentence in command.cannot), command.engine
    assert any(
        "groups of 2 GPUs that split the heads" in sentence for sentence in found("TensorRT-LLM", QWEN, **dense).cannot
    )


def test_drafts_have_to_be_set_up_as_well():
    for command in commands(replace(deployment(LLAMA, tpa=8, tpf=8), accepted_tokens=1.8), "a/model"):
        assert any("assumes 1.8 tokens per step" in note for note in command.notes)


def test_experts_by_columns_and_whole():
    both = {"kvp": 1, "tpa": 4, "tpf": 2, "ep": 2}
    assert found("vLLM", QWEN, **both).cannot[0].startswith("TPF 2 x EP 2: vLLM either shards the columns of every")
    assert settings_of(found("SGLang", QWEN, **both))["--ep-size"] == 2
    assert settings_of(found("TensorRT-LLM", QWEN, **both))["moe_tensor_parallel_size"] == 2
    whole = settings_of(found("vLLM", QWEN, tpa=4, tpf=1, ep=4))
    assert whole["--enable-expert-parallel"] is True
    # vLLM gives ranks different numbers of experts; the others do not: 8 experts over 3 ranks.
    uneven = with_attention(replace(MIXTRAL, hidden_size=6144), heads=HeadShape(48, 6))
    vllm, tensorrt, sglang = commands(deployment(uneven, tpa=3, tpf=1, ep=3), "a/model")
    assert not vllm.cannot
    assert tensorrt.cannot == ("moe_expert_parallel_size 3 must divide the 8 experts",)
    assert sglang.cannot == ("ep-size 3 must divide the 8 experts",)


@pytest.mark.parametrize("peer", OPTIONS)
@pytest.mark.parametrize(
    ("asked", "layout", "words"),
    [
        ((LLAMA,), {"kvp": 2, "tpa": 8, "tpf": 8, "ffn_replicas": 2}, "a copy of the FFN on every KVP rank"),
        ((LLAMA,), {"tpa": 5, "tpf": 5}, "5 must divide the 128 query heads"),
        ((SMOL,), {"tpa": 9, "tpf": 9}, "9 must divide the 1536 columns of the FFN"),
        ((with_attention(LLAMA, heads=HeadShape(36, 4)),), {"tpa": 3, "tpf": 3}, "3 must divide the 4 KV heads"),
        ((R1,), {"tpa": 64, "tpf": 64, "pp": 2}, None),
        ((LLAMA, "bfloat16", "float16"), {}, "a KV cache in float16 with activations in bfloat16"),
        ((R1, "fp8", "int8"), {"kvp": 2, "tpf": 2}, "a KV cache in int8"),
        ((R1, "fp8", "fp4"), {"kvp": 2, "tpf": 2}, "a KV cache in nvfp4"),
        ((LLAMA,), {"kvp": 2, "tpf": 2, "placement": "local"}, "data parallel"),
    ],
)
def test_layouts_that_no_peer_has(peer, asked, layout, words):
    command = found(peer, *asked, **layout)
    if words is None:
        assert not command.cannot
    else:
        assert any(words in sentence for sentence in command.cannot), command.cannot
        assert (command.argv, command.config_yaml()) == ((), "")
        assert command.as_text().startswith(f"# {peer}\n# cannot: ")
        assert all(line.startswith("#") for line in command.as_text().splitlines())


def test_formats_that_are_kept():
    def engines(kv):
        answers = commands(deployment(LLAMA, "fp8", kv, tpa=8, tpf=8), "a/model")
        return [command.engine for command in answers if command.argv]

    every = ["vLLM", "TensorRT-LLM", "SGLang"]
    packed_weights = {name for name, format in FORMATS.items() if format.codes is not None} - {"nvfp4", "mxfp4"}
    assert not any(engines(kv) for kv in packed_weights)
    assert {kv: engines(kv) for kv in FORMATS.keys() - packed_weights} == {
        "float32": every,
        "bfloat16": every,
        "float16": every,
        "fp8": every,
        "int8": ["vLLM"],
        "int4": ["vLLM"],
        "w8a8": [],
        "fp4": every,
        "nvfp4": every,
        "mxfp4": [],
    }


def test_pipelines_of_kvp_ranks():
    stages = {"kvp": 8, "tpf": 8, "pp": 2}
    assert settings_of(found("vLLM", R1, **stages))["--pipeline-parallel-size"] == 2
    assert settings_of(found("TensorRT-LLM", R1, **stages))["pipeline_parallel_size"] == 2
    assert found("SGLang", R1, **stages).cannot[0].startswith("decode context parallel size 8 with 2 pipeline stages")


def test_windows_with_decode_context_parallelism():
    window = with_attention(replace(LLAMA, architecture="mistral"), visibility=Visibility(window_tokens=4096))
    assert (
        found("vLLM", window, kvp=2, tpa=8, tpf=16)
        .cannot[0]
        .startswith("decode context parallelism is not supported for sliding windows")
    )
    assert not found("vLLM", window, tpa=8, tpf=8).cannot


def test_indexers_and_linear_attention_with_kvp():
    sparse, linear = load_model("deepseek-v3.2"), load_model("qwen3-next-80b-a3b")
    grid = {"kvp": 8, "tpf": 8}
    assert not found("vLLM", sparse, **grid).cannot
    (no_indexer, *_) = found("SGLang", sparse, **grid).cannot
    assert no_indexer.startswith("decode context parallelism is not supported for the indexer of deepseek_v32")
    (no_helix,) = found("TensorRT-LLM", sparse, **grid).cannot
    assert no_helix.startswith("Helix is not supported for deepseek_v32")
    assert not found("TensorRT-LLM", sparse, tpa=8, tpf=8).cannot
    for engine in PREFIXES:
        assert any("qwen3_next" in reason for reason in found(engine, linear, **grid).cannot)
    assert not found("vLLM", linear, tpa=8, tpf=8).cannot


PLANNED_ONLY = {"deepseek_v32", "gpt_oss", "llama4", "llama4_text", "qwen3_next"}


def test_each_family_is_answered():
    for family in FAMILIES.keys() - PLANNED_ONLY:
        is_latent, has_experts = family.startswith(("deepseek", "kimi")), "moe" in family or family == "mixtral"
        source = R1 if is_latent else MIXTRAL if has_experts else LLAMA
        vllm, tensorrt, sglang = commands(deployment(replace(source, architecture=family)), "a/model")
        assert not vllm.cannot
        assert not sglang.cannot
        assert bool(tensorrt.cannot) == (family in ("arcee", "deepseek_v2", "gemma2", "granite", "qwen2_moe"))
        assert any("AutoDeploy" in reason for reason in tensorrt.cannot) == (family in ("deepseek_v2", "granite"))


def test_notes():
    notes = found("vLLM", R1, "int4", "fp8", 200_000, 4, 512, True, kvp=16, tpf=16).notes
    assert [note.split(":")[0] for note in notes] == [
        "the checkpoint must already store its weights in int4",
        "the plan has 200000 tokens, but the model's config has 163840 positions",
        "the plan overlaps exchanges with attention (HOP-B)",
        "16 GPUs on several servers",
    ]
    # 2048 columns of an expert over 32 ranks are 64, half a block of 128.
    blocks = "a checkpoint with one scale per 128 columns of FP8 weights does not load"
    for weights in ("fp8", "fp8-block"):
        assert any(note.startswith(blocks) for note in found("SGLang", R1, weights, kvp=32, tpf=32).notes)
        assert not any(note.startswith(blocks) for note in found("SGLang", R1, weights, kvp=16, tpf=16).notes)


@pytest.mark.parametrize("name", ["", "-rf"])
def test_names_that_are_none(name):
    with pytest.raises(UserError, match="the model's name"):
        commands(deployment(SMOL), name)


def test_names_are_quoted_for_shells():
    vllm = commands(deployment(SMOL), "a folder/it's; rm")[0]
    assert shlex.split(vllm.line)[2] == "a folder/it's; rm"
    assert vllm.as_text().splitlines()[-1] == vllm.line


@pytest.mark.parametrize(
    ("takes", "allowed", "others"),
    [
        (COUNT, [1, 2**40], [0, -1, True, "1", 1.5, None]),
        (INDEX, [0, 1], [-1, False, "0", None]),
        (SWITCH, [True, False], [1, "true", None]),
        (TEXT, ["a"], ["", 1, None]),
        (("a2a", "ag_rs"), ["a2a"], ["a", "", None, True]),
    ],
)
def test_what_options_take(takes, allowed, others):
    option = Option("--name", takes, "a source")
    assert all(option.allows(value) for value in allowed)
    assert not any(option.allows(value) for value in others)


def test_settings_become_arguments_sections_and_assignments():
    options = Options([Option("--size", COUNT, "b"), Option("--on", SWITCH, "a"), Option("x.y.z", COUNT, "b")])
    assert options.arguments({"--size": 3, "--on": True}) == ("--size", "3", "--on")
    assert options.arguments({"--size": None, "--on": False}) == ()
    assert options.sections({"x.y.z": 1}) == {"x": {"y": {"z": 1}}}
    assert options.assignments({"--size": 2}) == ("--size=2",)
    assert options.sources({"--size": 3, "--on": None}, {"x.y.z": 1}) == ("b",)


def test_every_option_has_a_source_with_the_commit_at_which_it_was_read():
    for options in OPTIONS.values():
        for option in options.known.values():
            assert re.fullmatch(r"[\w./-]+\.(py|mdx?) at [0-9a-f]{12}", option.source), option


def test_the_documentation_has_every_option_and_its_source():
    text = (Path(__file__).parents[3] / "docs" / "guides" / "planning.md").read_text()
    for options in OPTIONS.values():
        for option in options.known.values():
            file, commit = option.source.split(" at ")
            assert f"`{option.name}`" in text
            assert f"`{file}` at {commit}" in text
