"""What clients get, in OpenAI's form."""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel

from longhelix.engine.result import Result
from longhelix.engine.saving import Status
from longhelix.scheduler.token_event import FinishReason

_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "abort": "abort"}


class PromptDetails(BaseModel):
    cached_tokens: int


class CompletionDetails(BaseModel):
    """reasoning_tokens: those of reasoning tags included."""

    reasoning_tokens: int


class UsageAnswer(BaseModel):
    """completion_tokens_details: of models whose reasoning is apart from their answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class CompletionLogprobs(BaseModel):
    """Of each token: its text, its log-probability, those of the likeliest by their text, where it begins."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(BaseModel):
    """rank: among all tokens, the likeliest first; null for one that is not among those that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


# Of each token of a prompt, by id: the likeliest ones and itself. Null for the first, which nothing comes before.
PromptLogprobs = list[dict[int, PromptToken] | None]


class CompletionChoice(BaseModel):
    """token_ids: of the new tokens and the one that ended them, where they were asked for."""

    index: int
    text: str
    token_ids: list[int] | None = None
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None


class LikelyToken(BaseModel):
    """bytes: those that the token stands for, which may be a part of a character; null where it is not known."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    content: list[ChosenToken]


class Reply(BaseModel):
    """reasoning_content, reasoning: what the model wrote before the content, by the name that DeepSeek gave it and by
    that of newer vLLM; null where there is none. content: null where the answer was cut inside the reasoning."""

    role: str = "assistant"
    content: str | None
    reasoning_content: str | None = None
    reasoning: str | None = None


class CalledFunction(BaseModel):
    """arguments: JSON."""

    name: str
    arguments: str


class Called(BaseModel):
    id: str
    type: str = "function"
    function: CalledFunction


class CallingReply(Reply):
    tool_calls: list[Called]


class ChatChoice(BaseModel):
    """token_ids: as in `CompletionChoice`."""

    index: int
    message: CallingReply | Reply
    token_ids: list[int] | None = None
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(BaseModel):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobs | None = None


class OutputText(BaseModel):
    type: str = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(BaseModel):
    id: str
    type: str = "message"
    role: str = "assistant"
    status: str
    content: list[OutputText]


class ReasoningTextAnswer(BaseModel):
    type: str = "reasoning_text"
    text: str


class OutputReasoning(BaseModel):
    id: str
    type: str = "reasoning"
    status: str
    summary: list[Any] = []
    content: list[ReasoningTextAnswer]


OutputItem = OutputReasoning | OutputMessage


class InputDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class FailureReason(BaseModel):
    message: str
    code: str


class ResponseObject(BaseModel):
    """status: in_progress, completed, incomplete (the tokens that it may have were not enough) or failed."""

    id: str
    object: str = "response"
    created_at: int
    model: str
    status: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    error: FailureReason | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    temperature: float
    top_p: float
    previous_response_id: str | None = None
    store: bool = False
    parallel_tool_calls: bool = True
    tool_choice: str = "auto"
    tools: list[Any] = []
    truncation: str = "disabled"
    text: dict[str, Any]


class Model(BaseModel):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "longhelix"
    max_model_len: int


class Models(BaseModel):
    object: str = "list"
    data: list[Model]


class TokenizeAnswer(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class PromptText(BaseModel):
    prompt: str


class Health(BaseModel):
    """restarts: how often the engine has failed and begun again. steps: those that have ended since the start; idle_s:
    since the last one ended. running, waiting: requests with a first token, and without."""

    status: Literal["ok", "draining", "restarting", "failed"]
    restarts: int
    steps: int
    idle_s: float
    running: int
    waiting: int


class Context(BaseModel):
    """A saved context, or one on its way. prefilled_tokens: those that are computed. saved_at: ISO 8601, UTC. bytes: on
    the disk. error: why it failed, or why its files cannot be used."""

    id: str
    object: str = "context"
    status: Status
    prefilled_tokens: int
    num_tokens: int
    saved_at: str | None = None
    bytes: int | None = None
    error: FailureReason | None = None


class ContextList(BaseModel):
    object: str = "list"
    data: list[Context]


class DeletedContext(BaseModel):
    id: str
    object: str = "context.deleted"
    deleted: bool = True


class Version(BaseModel):
    version: str


def finish_reason(result: Result) -> str:
    return _REASONS[result.finish_reason]


def new_tokens(result: Result, with_ending: bool) -> tuple[list[int], list[dict[int, float]] | None]:
    """Return the new tokens and their log-probabilities. with_ending: and those of the token that ended them."""
    if not with_ending or result.ending_token_id is None:
        return result.token_ids, result.logprobs
    logprobs = None
    if result.logprobs is not None and result.ending_logprobs is not None:
        logprobs = [*result.logprobs, result.ending_logprobs]
    return [*result.token_ids, result.ending_token_id], logprobs


def usage(results: Iterable[Result], choices: int) -> UsageAnswer:
    """Of all choices of all prompts, in order; a prompt counts once."""
    results = list(results)
    prompts = results[::choices]
    prompt_tokens = sum(result.prompt_tokens for result in prompts)
    completion_tokens = sum(len(result.token_ids) for result in results)
    reasoning_tokens = [result.reasoning_tokens for result in results if result.reasoning_tokens is not None]
    return UsageAnswer(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=sum(result.cached_tokens for result in prompts)),
        completion_tokens_details=CompletionDetails(reasoning_tokens=sum(reasoning_tokens))
        if reasoning_tokens
        else None,
    )


def response_usage(result: Result) -> ResponseUsage:
    output_tokens = len(result.token_ids)
    return ResponseUsage(
        input_tokens=result.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=result.cached_tokens),
        output_tokens=output_tokens,
        output_tokens_details=OutputDetails(reasoning_tokens=result.reasoning_tokens or 0),
        total_tokens=result.prompt_tokens + output_tokens,
    )
