"""What log-probabilities say of tokens: their bytes, their text, and the one that was taken."""

import math

import pytest
import tokenizers
from tokenizers import decoders, models

from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.serve.token_logprobs import chat_logprobs, completion_logprobs

pytestmark = pytest.mark.unit

# The two bytes of \u00e9, another character's first byte, and a blank, as byte-level vocabularies write them.
VOCAB = {"a": 0, "\u00c3": 1, "\u00a9": 2, "\u00c4": 3, "\u0120": 4}


@pytest.fixture(scope="module")
def tokenizer():
    backend = tokenizers.Tokenizer(models.BPE(VOCAB, []))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, None)


def test_bytes_are_the_tokens_own(tokenizer):
    """Half a character's, too, which is no text."""
    logprobs = [{0: -0.5, 1: -1.0}, {2: -0.1, 3: -3.0}, {4: -0.1, 9: -math.inf}]
    first, second, third = chat_logprobs(tokenizer, [1, 2, 4], logprobs, 2).content
    assert bytes(first.bytes + second.bytes + third.bytes).decode() == "\u00e9 "
    assert [each.bytes for each in first.top_logprobs] == [[97], [0xC3]]
    assert [each.bytes for each in third.top_logprobs] == [[32], []]
    assert third.top_logprobs[1].logprob == -9999.0


def test_a_tokenizer_without_bytes_has_none():
    backend = tokenizers.Tokenizer(models.WordLevel({"one": 0, "two": 1}, "one"))
    (found,) = chat_logprobs(Tokenizer(backend, None), [1], [{1: -0.5}], 0).content
    assert (found.bytes, found.top_logprobs, found.logprob) == (None, [], -0.5)


def test_completions_have_the_token_that_was_taken_among_the_likeliest(tokenizer):
    found = completion_logprobs(tokenizer, [0, 4], ["a", " "], [None, {0: -0.5, 4: -7.0, 3: -1.0}], 3)
    assert found.top_logprobs == [None, {"a": -0.5, "\ufffd": -1.0, " ": -7.0}]
    assert (found.token_logprobs, found.text_offset) == ([None, -7.0], [3, 4])


def test_of_tokens_that_read_the_same_the_likeliest_is_told(tokenizer):
    found = completion_logprobs(tokenizer, [3], ["\ufffd"], [{1: -0.5, 3: -2.0}], 0)
    assert found.top_logprobs == [{"\ufffd": -0.5}]
