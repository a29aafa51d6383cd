"""Values from outside: settings, layouts and prompts take what they can and refuse the rest in a sentence."""

import dataclasses
import math
from array import array
from collections import UserDict
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch
from cyclopts import Token
from hypothesis import given
from hypothesis import strategies as st

from anything import VALUES
from longhelix import Layout, SamplingParams, UserError
from longhelix.cli.values import size
from longhelix.engine.prompt import as_prompts, token_ids
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit


def test_max_tokens_is_another_name_for_max_new_tokens():
    assert SamplingParams(max_tokens=5) == SamplingParams(max_new_tokens=5)
    assert SamplingParams(max_tokens=5, max_new_tokens=5).max_new_tokens == 5
    with pytest.raises(UserError, match="max_tokens and max_new_tokens are the same setting"):
        SamplingParams(max_tokens=5, max_new_tokens=6)
    with pytest.raises(UserError, match=r"^max_tokens is 0"):
        SamplingParams(max_tokens=0)


FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]


class OddList(list):
    def __len__(self):
        raise RuntimeError


class OddMapping(UserDict):
    def items(self):
        raise RuntimeError


def assert_sentence(error):
    """Short, and can be written."""
    assert 10 < len(str(error).encode()) < 400


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_sampling_params_are_plain_values_that_travel_or_are_refused_in_a_sentence(settings):
    try:
        params = SamplingParams(**settings)
    except UserError as refused:
        assert_sentence(refused)
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    plain = {int, float, str, bool, tuple, dict, type(None)}
    assert {type(getattr(params, name)) for name in FIELDS} <= plain
    assert {type(item) for item in params.stop} <= {str}
    assert {type(item) for item in params.stop_token_ids} <= {int}
    assert {(type(key), type(bias)) for key, bias in params.logit_bias.items()} <= {(int, float)}
    assert hash(params) == hash(SamplingParams(**settings))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("stop", ("\ud800",), "half a surrogate pair at character 0"),
        ("stop", ("a",) * 65, "has 65 strings: give at most 64"),
        ("stop", ("a" * 1001,), "has 1001 characters: give at most 1000"),
        ("stop", (5,), "a stop string is 5: set it to a string"),
        ("stop", b"ab", "give a tuple of strings"),
        ("top_k", 10**20, "set it to an integer from 0 to 2147483647"),
        ("top_k", 5.5, "set it to an integer"),
        ("top_k", True, "set it to an integer"),
        ("max_new_tokens", 2.0, "set it to an integer"),
        ("max_new_tokens", "12", "set it to an integer"),
        ("stop_token_ids", (10**20,), "set it to an integer from 0 to 2147483647"),
        ("stop_token_ids", 5, "stop_token_ids is 5: set it to a tuple of token ids"),
        ("temperature", "warm", "temperature is 'warm': set it to 0"),
        ("temperature", True, "temperature is True"),
        ("temperature", 1e-300, "set it to 0 (greedy), or a number from 1e-30"),
        ("temperature", 10**400, "set it to 0"),
        ("top_p", math.nan, "top_p is nan"),
        ("repetition_penalty", 1e300, "set it to a number from"),
        ("temperature", 1e300, "set it to 0 (greedy), or a number from 1e-30 to 1e+30"),
        ("ignore_eos", 1, "ignore_eos is 1: set it to True or False"),
        ("seed", 1.5, "seed is 1.5"),
        ("logprobs", "all", "logprobs is 'all'"),
        ("presence_penalty", 2.1, "presence_penalty is 2.1: set it to a number from -2 to 2 (0 is off)"),
        ("presence_penalty", math.nan, "presence_penalty is nan"),
        ("frequency_penalty", True, "frequency_penalty is True"),
        ("frequency_penalty", "0.5", "frequency_penalty is '0.5': set it to a number from -2 to 2"),
        ("frequency_penalty", -math.inf, "frequency_penalty is -inf"),
        ("min_tokens", 129, "min_tokens is 129: set it to an integer from 0 to 128 (max_new_tokens)"),
        ("min_tokens", -1, "min_tokens is -1"),
        ("min_tokens", 1.0, "min_tokens is 1.0: set it to an integer"),
        ("min_tokens", True, "min_tokens is True"),
        ("logit_bias", None, "logit_bias is None: set it to a mapping of token ids to numbers"),
        ("logit_bias", [(1, 2)], "logit_bias is [(1, 2)]: set it to a mapping of token ids to numbers"),
        ("logit_bias", {1: 100.5}, "the logit bias of token 1 is 100.5: set it to a number from -100 to 100"),
        ("logit_bias", {1: math.nan}, "the logit bias of token 1 is nan"),
        ("logit_bias", {1: True}, "the logit bias of token 1 is True"),
        ("logit_bias", {1: "5"}, "the logit bias of token 1 is '5'"),
        ("logit_bias", {"1": 5}, "a token id of logit_bias is '1': set it to an integer"),
        ("logit_bias", {True: 5}, "a token id of logit_bias is True"),
        ("logit_bias", {1.0: 5}, "a token id of logit_bias is 1.0"),
        ("logit_bias", {-1: 5}, "a token id of logit_bias is -1: set it to an integer from 0 to 2147483647"),
        ("logit_bias", dict.fromkeys(range(1025), 1), "logit_bias has 1025 entries: give at most 1024"),
        ("logit_bias", UserDict.fromkeys([10**5000], 1), "a token id of logit_bias is"),
        ("logit_bias", OddMapping(), "set it to a mapping of token ids to numbers"),
        ("prompt_logprobs", 1.5, "prompt_logprobs is 1.5: set it to an integer from 0 to 100"),
        ("prompt_logprobs", True, "prompt_logprobs is True"),
        ("max_new_tokens", 0, "set it to an integer from 1 to 2147483647 (0 needs prompt_logprobs)"),
    ],
)
def test_what_no_request_can_have_is_refused_in_words(name, value, words):
    with pytest.raises(UserError) as refused:
        SamplingParams(**{name: value})
    assert words in str(refused.value)


def test_numbers_of_numpy_are_welcome():
    params = SamplingParams(
        max_new_tokens=np.int32(7), top_k=np.uint8(5), temperature=np.float32(0.5), top_p=Fraction(1, 2),
        seed=np.int64(3), stop_token_ids=np.array([4, 5]), stop=np.array(["x"]), logprobs=np.int8(2),
        min_tokens=np.int64(7), presence_penalty=np.float32(-2), logit_bias=UserDict({np.int32(4): np.int64(-100)}),
        prompt_logprobs=np.int64(3),
    )  # fmt: skip
    assert params == SamplingParams(
        max_new_tokens=7, top_k=5, temperature=0.5, top_p=0.5, seed=3, stop_token_ids=(4, 5), stop=("x",), logprobs=2,
        min_tokens=7, presence_penalty=-2.0, logit_bias={4: -100.0}, prompt_logprobs=3,
    )  # fmt: skip
    assert type(params.stop[0]) is str
    assert Layout(kvp=np.int64(2)) == Layout(kvp=2)
    assert type(scheduler_config(kvp=1, num_blocks=np.int64(4), max_model_len=9).num_blocks) is int


@pytest.mark.parametrize("name", ["num_blocks", "max_model_len", "block_tokens", "chunk_tokens", "max_running"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "16", 10**20, None])
def test_scheduler_settings_are_whole_numbers(name, value):
    with pytest.raises(UserError, match=f"{name} is .*: set it to an integer from 1 to"):
        scheduler_config(**{"kvp": 1, "num_blocks": 1, "max_model_len": 1} | {name: value})


@given(VALUES)
def test_prompts_are_ids_of_the_vocabulary_or_refused_in_a_sentence(value):
    try:
        for prompt in as_prompts(value):
            if not isinstance(prompt, str):
                ids = token_ids(prompt, 100, 1000)
                assert (ids.typecode, ids.itemsize) == ("i", 4)
                assert all(0 <= token_id < 100 for token_id in ids)
                assert list(ids) == [int(token_id) for token_id in prompt]
    except UserError as refused:
        assert_sentence(refused)


@pytest.mark.parametrize(
    "prompt", [[1, 2, 3], (1, 2, 3), range(1, 4), array("q", [1, 2, 3]), np.array([1, 2, 3], dtype=np.uint16),
               [np.int64(1), 2, np.uint8(3)], torch.tensor([1, 2, 3])],
    ids=lambda prompt: type(prompt).__name__,
)  # fmt: skip
def test_whole_numbers_of_every_kind_are_token_ids(prompt):
    assert token_ids(prompt, 10, 10) == array("i", [1, 2, 3])
    assert len(as_prompts(prompt)) == 1


class Unlooked(array):
    """Ids that nobody may go through one by one."""

    def __iter__(self):
        raise AssertionError


@pytest.mark.parametrize("typecode", ["b", "B", "h", "i", "q", "Q"])
def test_the_ids_of_an_array_are_looked_at_all_at_once(typecode):
    assert token_ids(Unlooked(typecode, [1, 2, 3]), 10, 10) == array("i", [1, 2, 3])
    with pytest.raises(UserError, match="prompt token 10 is outside the model's vocabulary of 10"):
        token_ids(Unlooked(typecode, [1, 10]), 10, 10)


def test_an_array_that_changes_afterwards_is_no_other_prompt():
    given = array("i", [1, 2, 3])
    found = token_ids(given, 10, 10)
    given[0] = 99
    given.append(99)
    assert found == array("i", [1, 2, 3])


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (array("d", [1.0]), "a one-dimensional list of integers"),
        ([1, 2.0], "a prompt token is 2.0: give token ids as integers"),
        ([True, 2], "a prompt token is True"),
        ([1, "a"], "a prompt token is 'a'"),
        ([1, None], "a prompt token is None"),
        ([1, 10**20], "larger than any vocabulary"),
        ([1, 10], "prompt token 10 is outside the model's vocabulary of 10"),
        ([-1], "prompt token -1 is outside"),
        (np.array([1.0, 2.0]), "a one-dimensional list of integers"),
        (np.array([[1, 2]]), "one-dimensional"),
        (np.array([True]), "a one-dimensional list of integers"),
        (5, "a prompt is 5: give text, or a list of token ids"),
        (b"abc", "give text, or a list of token ids"),
        ({"a": 1}, "give text, or a list of token ids"),
        (range(10**12), "has 1000000000000 tokens, but --max-model-len is 50"),
        (range(10**20), "its length cannot be read"),
        (torch.ones(3, dtype=torch.bfloat16), "integers in host memory"),
        (torch.ones(3, requires_grad=True), "integers in host memory"),
        (torch.ones(3, dtype=torch.int64, device="meta"), "integers in host memory"),
        (OddList([1]), "its length cannot be read"),
    ],
)
def test_what_is_no_prompt_is_refused_in_words(prompt, words):
    with pytest.raises(UserError) as refused:
        token_ids(prompt, 10, 50)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("128k", 128_000),
        ("64Ki", 65_536),
        ("1.5M", 1_500_000),
        ("0.5Ki", 512),
        ("0", 0),
        ("9007199254740993", 2**53 + 1),
        ("9007199254740.993k", 2**53 + 1),
        ("8589934593Gi", 8589934593 * 2**30),
    ],
)
def test_a_size_is_exact(text, number):
    assert size(int, (Token(value=text),)) == number


@pytest.mark.parametrize("text", ["8x", "1.5", "2i", "0.3Ki", "", "-1", "9" * 400, "9" * 400 + "Gi", "9" * 5000])
def test_what_is_no_size_is_said(text):
    with pytest.raises(ValueError, match="is not a size: give an integer"):
        size(int, (Token(value=text),))
