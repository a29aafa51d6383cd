"""How many tokens of prompts one call may have back."""

from array import array
from types import SimpleNamespace

import pytest

from longhelix.serve.bodies import CompletionBody
from longhelix.serve.errors import ClientError
from longhelix.serve.serving import Serving

pytestmark = pytest.mark.unit

MOST = 2**20


def ask(num_tokens, prompts=1, *, max_model_len=131_072, **fields):
    driver, call = SimpleNamespace(most_requests=1024), SimpleNamespace(arrival_s=0.0)
    serving = SimpleNamespace(driver=driver, max_model_len=max_model_len, call=call, sampling_defaults={})
    body = CompletionBody(prompt=[1], **fields)
    prompt = array("i", [1]) * num_tokens
    return len(Serving.requests(serving, body, [prompt] * prompts, 1, body.logprobs))


@pytest.mark.parametrize(("num_tokens", "prompts", "choices"), [(2**16, 1, 16), (2**14, 4, 16), (2**10, 16, 64)])
def test_as_many_as_an_answer_may_have(num_tokens, prompts, choices):
    assert num_tokens * prompts * choices == MOST
    assert ask(num_tokens, prompts, echo=True, n=choices) == prompts * choices
    with pytest.raises(ClientError, match=f"an answer repeats at most {MOST}") as refused:
        ask(num_tokens + 1, prompts, echo=True, n=choices)
    assert refused.value.param == "echo"
    assert ask(num_tokens + 1, prompts, n=choices) == prompts * choices, "without echo nothing goes back"


def test_one_prompt_may_be_as_long_as_the_models_context():
    assert ask(3 * MOST - 1, max_model_len=3 * MOST, echo=True) == 1
    with pytest.raises(ClientError, match=f"at most {3 * MOST}"):
        ask(2 * MOST, max_model_len=3 * MOST, echo=True, n=2)
