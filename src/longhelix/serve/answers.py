"""What clients get, in OpenAI's form."""

from collections.abc import Iterable

from pydantic import BaseModel

from longhelix.engine.result import Result
from longhelix.scheduler.scheduler import FinishReason

_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "abort": "abort"}


class PromptDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None


class CompletionLogprobs(BaseModel):
    """Of each token: its text, its log-probability, those of the likeliest by their text, where it begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None


class Completion(BaseModel):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class LikelyToken(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    content: list[ChosenToken]


class Reply(BaseModel):
    role: str = "assistant"
    content: str


class CalledFunction(BaseModel):
    """arguments: JSON."""

    name: str
    arguments: str


class Called(BaseModel):
    id: str
    type: str = "function"
    function: CalledFunction


class CallingReply(BaseModel):
    role: str = "assistant"
    content: str | None
    tool_calls: list[Called]


class ChatChoice(BaseModel):
    index: int
    message: CallingReply | Reply
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(BaseModel):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(BaseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "longhelix"
    max_model_len: int


class Models(BaseModel):
    object: str = "list"
    data: list[Model]


class Tokens(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class Text(BaseModel):
    prompt: str


class Health(BaseModel):
    """status: ok, draining or failed. steps: those that have ended since the start; idle_s: since the last one ended.
    running, waiting: requests with a first token, and without."""

    status: str
    steps: int
    idle_s: float
    running: int
    waiting: int


class Version(BaseModel):
    version: str


def finish_reason(result: Result) -> str:
    return _REASONS[result.finish_reason]


def usage(results: Iterable[Result], choices: int) -> Usage:
    """Of all choices of all prompts, in order; a prompt counts once."""
    results = list(results)
    prompts = results[::choices]
    prompt_tokens = sum(result.prompt_tokens for result in prompts)
    completion_tokens = sum(len(result.token_ids) for result in results)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(result.cached_tokens for result in prompts)),
    )
