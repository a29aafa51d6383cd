"""Vision-language models: their configuration, and by which axis each frequency pair turns."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_spec import assert_read_or_refused
from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

from anything import VALUES
from longhelix.errors import UserError
from longhelix.spec import ModelSpec, MoE, VisionSpec, read_hf_config
from toy_model import attention_of, moe_of

pytestmark = pytest.mark.unit

# As published with Qwen3-VL-8B-Instruct, without what nobody reads.
PUBLISHED = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "text_config": {
        "attention_bias": False,
        "dtype": "bfloat16",
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "vocab_size": 151936,
    },
    "tie_word_embeddings": False,
    "vision_config": {
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_size": 1152,
        "out_hidden_size": 4096,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
}
SMALL = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 200,
    "vocab_size": 152000,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}


def changed(part=None, **changes):
    if part is None:
        return PUBLISHED | changes
    return PUBLISHED | {part: PUBLISHED[part] | changes}


def with_rope(**changes):
    return changed("text_config", rope_scaling=PUBLISHED["text_config"]["rope_scaling"] | changes)


def test_a_published_config_is_read():
    spec = read_hf_config(PUBLISHED)
    assert (spec.num_layers, spec.hidden_size, attention_of(spec).head_size, spec.checkpoint.dtype) == (
        36,
        4096,
        128,
        "bfloat16",
    )
    assert (attention_of(spec).norms.qk, attention_of(spec).projections.qkv_bias) == (True, False)
    assert (spec.vocabulary.tied_embeddings, spec.vocabulary.eos_token_ids) == (False, (151645,))
    assert (attention_of(spec).rope.theta, attention_of(spec).rope.sections) == (5e6, (24, 20, 20))
    assert spec.vision == VisionSpec(151655, 151652, 151653, 3)
    assert read_hf_config(changed(tie_word_embeddings=True)).vocabulary.tied_embeddings
    assert read_hf_config(changed("text_config", rope_scaling=None)) == spec  # which are the defaults
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


@pytest.mark.parametrize("config", [Qwen3VLConfig, Qwen3VLMoeConfig])
def test_what_transformers_writes_is_read(config):
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
    tower = {"out_hidden_size": SMALL["hidden_size"], "deepstack_visual_indexes": [0, 2, 1]}
    made = config(text_config=SMALL | experts, vision_config=tower, dtype="float16")
    spec = read_hf_config(made.to_dict())
    assert (spec.architecture, attention_of(spec).head_size, spec.checkpoint.dtype) == (
        config.model_type,
        16,
        "float16",
    )
    assert moe_of(spec) == (MoE(5, 2, 40) if config is Qwen3VLMoeConfig else None)
    assert not spec.vocabulary.tied_embeddings  # whatever stands with the decoder


def test_axes_are_those_of_transformers():
    """Which overwrites pairs of time by those of rows and columns."""
    for sections in ((24, 20, 20), (4, 3, 1), (2, 1, 5), (8, 0, 0)):
        size = sum(sections)
        text = {"head_dim": 2 * size, "rope_scaling": None, "rope_parameters": None}
        rope = {"mrope_section": list(sections), "mrope_interleaved": True, "rope_theta": 1e4}
        expected = [0] * size
        for axis, offset in enumerate((1, 2), start=1):
            for pair in range(offset, min(3 * sections[axis], size), 3):
                expected[pair] = axis
        spec = read_hf_config(changed("text_config", **text | {"rope_parameters": rope}))
        assert attention_of(spec).rope.axes == tuple(expected)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({key: PUBLISHED[key] for key in PUBLISHED if key != "text_config"}, "no text_config"),
        (changed(vision_config=None), "no vision_config"),
        (changed(image_token_id=None), "image_token_id"),
        (changed(image_token_id=151936), "an image token id is 151936, but the model's vocabulary has 151936"),
        (changed("vision_config", deepstack_visual_indexes=3), "deepstack_visual_indexes"),
        (changed("vision_config", deepstack_visual_indexes=list(range(37)), depth=37), "names 37 layers"),
        (changed("vision_config", deepstack_visual_indexes=[8, 27]), "is 27: set it to an integer from 0 to 26"),
        (changed("vision_config", deepstack_visual_indexes=[-1, 8]), "is -1: set it to an integer from 0 to 26"),
        (changed("vision_config", deepstack_visual_indexes=[8, 16, 8]), "a list of different layers"),
        (changed("vision_config", depth=None), "depth in the model's settings"),
        (changed("vision_config", out_hidden_size=8192), "tower outputs 8192 values per token, but .* expects 4096"),
        (changed("vision_config", out_hidden_size=None), "out_hidden_size in the model's settings"),
        (with_rope(mrope_section=[24, 20]), "mrope_section"),
        (with_rope(mrope_section=[24, 20, 21]), "three numbers that add up to 64"),
        (with_rope(mrope_section=[24.0, 20, 20]), "three numbers that add up to 64"),
        (with_rope(mrope_interleaved=False), "mrope_interleaved is not true"),
    ],
)
def test_what_cannot_be_is_refused_in_words(config, words):
    with pytest.raises(UserError, match=words):
        read_hf_config(config)


@given(data=st.data())
def test_a_config_with_any_value_is_read_or_refused_in_a_sentence(data):
    part = data.draw(st.sampled_from([None, "text_config", "vision_config", "rope"]))
    known = {"rope": ["mrope_section", "mrope_interleaved", "rope_type"]}.get(part)
    key = data.draw(st.sampled_from(known or sorted(PUBLISHED if part is None else PUBLISHED[part])))
    change = {key: data.draw(VALUES)}
    config = with_rope(**change) if part == "rope" else changed(part, **change)
    assert_read_or_refused(lambda: read_hf_config(config))
