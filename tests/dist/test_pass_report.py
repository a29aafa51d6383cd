"""What LLM.sequence_parallel_report says of our own models: every pattern that their layers have, by its name."""

import pytest
import shown
from test_llm import needs_compiler

from longhelix import LLM, ImagePrompt, Layout, SamplingParams
from oracle import NATIVE_EXPERTS, NATIVE_SIZES, make_oracle, save_tokenizer_files

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800), needs_compiler]

SETTINGS = {
    "block_tokens": 16,
    "chunk_tokens": 16,
    "dtype": "float32",
    "execution": "compiled",
    "enable_sp": True,
    "sp_min_token_num": 9,
}


def patterns_of(report):
    return {name for name, count in report["patterns"].items() if count}


@pytest.mark.parametrize("layout", [Layout(tpa=2), Layout(kvp=2, pp=2)], ids=["tpa", "stages"])
@pytest.mark.parametrize("activations", [None, "int8"])
def test_a_dense_model(tmp_path, layout, activations):
    """All graphs are there when the first request comes: none compiles another, however long its prompts are."""
    made = make_oracle(NATIVE_SIZES, tmp_path, prompt_lengths=(1,))
    save_tokenizer_files(made.path)
    with LLM(str(made.path), layout, activation_dtype=activations, **SETTINGS) as llm:
        report = llm.sequence_parallel_report()
        llm.generate([list(range(length)) for length in (1, 8, 9, 10, 40, 3, 15)], SamplingParams(max_new_tokens=12))
        for length in (13, 16):
            llm.generate([list(range(length))], SamplingParams(max_new_tokens=2))
        assert llm.sequence_parallel_report() == report
    # The norm after the last layer belongs to the head.
    names = {"MiddleAllReduceRMSNorm"}
    assert patterns_of(report) == ({name + "DynamicINT8" for name in names} if activations else names)
    before, after = report["collectives"]["before"], report["collectives"]["after"]
    assert set(before) == {"all_reduce"}
    assert after == {"reduce_scatter": before["all_reduce"], "all_gather": after["all_gather"]}
    assert report["left_alone"] == []
    assert ("int8" in report["bytes"]["after"]) == bool(activations)


@pytest.mark.parametrize("activations", [None, "int8"])
def test_experts(tmp_path, activations):
    made = make_oracle(NATIVE_EXPERTS["native-qwen3_moe"], tmp_path, prompt_lengths=(1,))
    save_tokenizer_files(made.path)
    with LLM(str(made.path), Layout(kvp=2), activation_dtype=activations, **SETTINGS) as llm:
        report = llm.sequence_parallel_report()
        llm.generate([list(range(length)) for length in (1, 9, 40)], SamplingParams(max_new_tokens=3))
        assert llm.sequence_parallel_report() == report
    narrow = "DynamicINT8" if activations else ""
    # A router takes what the norm before it gives on this rank's rows; the layer itself gathers that for the experts.
    names = {"MiddleAllReduceRMSNorm", "AllGatherChunkNoOp", f"MiddleLayerAllgatherAddRMSNorm{narrow}"}
    assert patterns_of(report) == names | {f"MiddleAllReduceRMSNorm{narrow}"}
    assert "all_reduce" not in report["collectives"]["after"]
    assert all(sentence.startswith("all-gather") for sentence in report["left_alone"])


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_moe"])
def test_images(tmp_path, name):
    """Rows of images have graphs of their own, which add them between a sum and the next norm. They too are there when
    the first request comes."""
    made = shown.make_shown_oracle({"qwen3_vl": shown.PACKED, "qwen3_vl_moe": shown.PACKED_EXPERTS}[name], tmp_path)
    save_tokenizer_files(made.path)
    with LLM(str(made.path), Layout(kvp=2), **SETTINGS) as llm:
        report = llm.sequence_parallel_report()
        prompts = [
            ImagePrompt(given, [made.images[image] for image in images]) if images else given
            for given, images in zip(made.given, made.shown, strict=True)
        ]
        results = llm.generate(prompts, SamplingParams(shown.NEW_TOKENS))
        assert llm.sequence_parallel_report() == report
    assert [result.token_ids for result in results] == made.tokens
    names = {"MiddleAllReduceRMSNorm"}
    more = {"Qwen3VLMiddleAllReduceRMSNorm"}
    if name == "qwen3_vl_moe":
        names |= {"MiddleLayerAllgatherAddRMSNorm", "AllGatherChunkNoOp"}
        more = {"Qwen3VLMiddleLayerAllgatherAddRMSNorm"}
    assert patterns_of(report) == names | more
    assert "all_reduce" not in report["collectives"]["after"]


def test_without_the_pass_there_is_none(tmp_path):
    made = make_oracle(NATIVE_SIZES, tmp_path, prompt_lengths=(1,))
    save_tokenizer_files(made.path)
    with LLM(str(made.path), Layout(kvp=2), flash_comm_v1=True, chunk_tokens=16) as llm:
        assert llm.sequence_parallel_report() is None
