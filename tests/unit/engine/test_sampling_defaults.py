"""Sampling settings that models recommend."""

import pytest

from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.sampling_defaults import gguf_generation_config, sampling_defaults

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "max_length": 4096, "transformers_version": "4.57.0"}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": None, "min_p": 0.1}, {"min_p": 0.1}),
        ({"top_k": -1}, {"top_k": 0}),
    ],
)
def test_settings_are_read_by_their_names(config, expected):
    assert sampling_defaults(config) == expected


@pytest.mark.parametrize(
    ("config", "words"), [({"temperature": "hot"}, "temperature"), ({"top_p": 7}, "top_p"), ({"top_k": -3}, "top_k")]
)
def test_settings_out_of_range_are_left_out_with_a_warning(config, words):
    with pytest.warns(UserWarning, match=f"not used for {words}: {words} is "):
        assert sampling_defaults(config | {"min_p": 0.1}) == {"min_p": 0.1}


def test_the_built_in_model_has_its_publishers_settings():
    config = gguf_generation_config(open_checkpoint("builtin").metadata)
    assert sampling_defaults(config) == {"temperature": 0.2, "top_p": 0.9}
