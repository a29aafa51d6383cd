"""How many log-probabilities one call may ask for, and which of its requests have those of the prompt."""

from types import SimpleNamespace

import pytest

from longhelix.serve.bodies import ChatBody, CompletionBody
from longhelix.serve.errors import ClientError
from longhelix.serve.serving import Serving

pytestmark = pytest.mark.unit

SERVING = SimpleNamespace(
    driver=SimpleNamespace(most_requests=64),
    max_model_len=131_072,
    call=SimpleNamespace(arrival_s=0.0),
    sampling_defaults={},
)


def asked(prompts, most_tokens, **fields):
    body = CompletionBody(prompt=prompts, max_tokens=most_tokens, **fields)
    return Serving.requests(SERVING, body, body.prompt, most_tokens, body.logprobs)


def test_as_many_as_an_answer_may_have():
    """4096 tokens with 64 each in 16 answers are 2**22."""
    assert len(asked([[1] * 4096], 0, echo=True, logprobs=63, n=16)) == 16
    assert len(asked([[1] * 4080], 16, echo=True, logprobs=63, n=16)) == 16
    assert len(asked([[1] * 9000], 4096, logprobs=63, n=16)) == 16
    assert len(asked([[1] * 2048] * 2, 2048, logprobs=63, n=16)) == 32


@pytest.mark.parametrize(
    ("prompts", "most_tokens", "fields"),
    [
        ([[1] * 131_000], 0, {"echo": True, "logprobs": 100, "n": 64}),
        ([[1] * 4097], 0, {"echo": True, "logprobs": 63, "n": 16}),
        ([[1] * 4080], 17, {"echo": True, "logprobs": 63, "n": 16}),
        ([[1]], 4097, {"logprobs": 63, "n": 16}),
        ([[1], [2]], 2049, {"logprobs": 63, "n": 16}),
    ],
)
def test_more_are_refused(prompts, most_tokens, fields):
    with pytest.raises(ClientError, match="an answer has at most 4194304: ask for fewer tokens") as refused:
        asked(prompts, most_tokens, **fields)
    assert refused.value.param == "logprobs"


def test_a_chats_answer_may_be_as_long_as_the_context_leaves():
    def ask(**fields):
        body = ChatBody(messages=[{"role": "user", "content": "x"}], logprobs=True, **fields)
        return Serving.requests(SERVING, body, [[1] * 72], body.most_tokens, body.num_logprobs)

    assert len(ask(top_logprobs=20)) == 1
    with pytest.raises(ClientError, match="131000 tokens with 21"):
        ask(top_logprobs=20, n=2)
    assert len(ask(top_logprobs=20, n=2, max_tokens=1000)) == 2


@pytest.mark.parametrize(("most_tokens", "others"), [(4, None), (0, 0)])
def test_one_choice_has_those_of_the_prompt_for_all(most_tokens, others):
    found = asked([[1, 2], [3, 4]], most_tokens, echo=True, logprobs=5, n=3)
    assert [each.sampling.prompt_logprobs for each in found] == [5, others, others] * 2


def test_a_prompt_may_fill_the_whole_context_where_no_new_token_is_wanted():
    longest = [1] * SERVING.max_model_len
    (found,) = asked([longest], 0, echo=True, logprobs=0)
    assert (found.num_tokens, found.sampling.max_new_tokens) == (SERVING.max_model_len, 0)
    for prompt, most_tokens in ((longest, 1), ([*longest, 1], 0)):
        with pytest.raises(ClientError, match="the model's context length is 131072") as refused:
            asked([prompt], most_tokens, echo=True, logprobs=0)
        assert refused.value.param == "prompt"
