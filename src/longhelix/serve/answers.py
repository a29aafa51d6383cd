"""Response bodies, in OpenAI's format."""

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from longhelix.engine.result import Result
from longhelix.engine.saving import Status
from longhelix.scheduler.token_event import FinishReason

_REASONS: dict[FinishReason, str] = {"stop": "stop", "length": "length", "abort": "abort"}


class Answer(BaseModel):
    """Base of all response bodies. The docstring below a field is its description in the OpenAPI schema."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class PromptDetails(Answer):
    """Details of the prompt tokens."""

    cached_tokens: int


class CompletionDetails(Answer):
    """Details of the new tokens."""

    reasoning_tokens: int
    """Number of tokens in the reasoning, including its tags."""


class UsageAnswer(Answer):
    """Token counts of a call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None
    """Present if reasoning is returned separately."""


class CompletionLogprobs(Answer):
    """Log-probabilities of a completion. Each list has one entry per token."""

    tokens: list[str]
    """Text of each token."""
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """Log-probabilities of the likeliest tokens, by text."""
    text_offset: list[int]
    """Position at which each token's text begins in the text of the choice, in characters."""


class PromptToken(Answer):
    """Log-probability of a token at a position of the prompt."""

    logprob: float
    rank: int | None
    """Rank by probability, starting at 1; null if the rank is greater than the request's `prompt_logprobs`."""
    decoded_token: str


# One item per prompt token: the log-probabilities of the likeliest tokens and of the prompt token itself, by token id.
# The item of the first prompt token is null.
PromptLogprobs = list[dict[int, PromptToken] | None]


class CompletionChoice(Answer):
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int] | None = None
    """Ids of the new tokens and of the stop token, if the request asked for token ids."""
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer):
    """Response of /v1/completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None


class LikelyToken(Answer):
    """Token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Bytes of the token's text. A token may be only a part of a character. Null if the bytes are unknown."""


class ChosenToken(LikelyToken):
    """Token of an answer, its log-probability, and the likeliest tokens at its position."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(Answer):
    """Log-probabilities of a chat answer."""

    content: list[ChosenToken]


class AssistantMessage(Answer):
    """Message of the assistant."""

    role: str = "assistant"
    content: str | None
    """Null if the answer ended inside the reasoning."""
    reasoning_content: str | None = None
    """Reasoning, under DeepSeek's name for this field; null if there is no reasoning."""
    reasoning: str | None = None
    """Same value as `reasoning_content`, under vLLM's newer name."""


class AnswerFunctionCall(Answer):
    """Function that the model calls."""

    name: str
    arguments: str
    """Arguments as JSON text."""


class AnswerToolCall(Answer):
    """Tool call of the assistant."""

    id: str
    type: str = "function"
    function: AnswerFunctionCall


class ToolCallingMessage(AssistantMessage):
    """Message of the assistant with tool calls."""

    tool_calls: list[AnswerToolCall]


class ChatChoice(Answer):
    """One answer to a conversation."""

    index: int
    message: ToolCallingMessage | AssistantMessage
    token_ids: list[int] | None = None
    """Ids of the new tokens and of the stop token, if the request asked for token ids."""
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatCompletion(Answer):
    """Response of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    prompt_logprobs: PromptLogprobs | None = None


class OutputText(Answer):
    """Text of a message."""

    type: str = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(Answer):
    """Message of a response."""

    id: str
    type: str = "message"
    role: str = "assistant"
    status: str
    content: list[OutputText]


class ReasoningTextAnswer(Answer):
    """Text of the reasoning."""

    type: str = "reasoning_text"
    text: str


class OutputReasoning(Answer):
    """Reasoning of a response."""

    id: str
    type: str = "reasoning"
    status: str
    summary: list[Any] = []
    content: list[ReasoningTextAnswer]


OutputItem = OutputReasoning | OutputMessage


class InputDetails(Answer):
    """Details of the input tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Answer):
    """Details of the output tokens."""

    reasoning_tokens: int = 0


class ResponseUsage(Answer):
    """Token counts of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails = OutputDetails()
    total_tokens: int


class FailureReason(Answer):
    """Reason for a failure."""

    message: str
    code: str


class ResponseObject(Answer):
    """Response of the Responses API."""

    id: str
    object: str = "response"
    created_at: int
    model: str
    status: str
    """`in_progress`, `completed`, `incomplete` (the token limit was reached) or `failed`."""
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


class Model(Answer):
    """Model that this server runs."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "longhelix"
    max_model_len: int


class Models(Answer):
    """List of models."""

    object: str = "list"
    data: list[Model]


class TokenizeAnswer(Answer):
    """Token ids of a text or a conversation."""

    tokens: list[int]
    count: int
    max_model_len: int


class PromptText(Answer):
    """Text of tokens."""

    prompt: str


class Health(Answer):
    """State of the engine."""

    status: Literal["ok", "draining", "restarting", "failed"]
    restarts: int
    """Number of restarts after failures."""
    steps: int
    """Number of steps since the server started."""
    idle_s: float
    """Seconds since the last step."""
    running: int
    """Number of requests that have produced their first token."""
    waiting: int
    """Number of requests that have not produced a token yet."""


class Context(Answer):
    """Context that is saved, is being saved, or could not be saved."""

    id: str
    object: str = "context"
    status: Status
    prefilled_tokens: int
    """Number of tokens whose KV has been computed so far."""
    num_tokens: int
    saved_at: str | None = None
    """Time at which the context was saved, as an ISO 8601 string in UTC."""
    bytes: int | None = None
    """Size of the context's files on disk."""
    error: FailureReason | None = None
    """Why saving failed, or why the files cannot be used."""


class ContextList(Answer):
    """List of contexts."""

    object: str = "list"
    data: list[Context]


class DeletedContext(Answer):
    """Confirmation that a context is deleted."""

    id: str
    object: str = "context.deleted"
    deleted: bool = True


class Version(Answer):
    """Version of longhelix."""

    version: str


def finish_reason(result: Result) -> str:
    return _REASONS[result.finish_reason]


def new_tokens(result: Result, with_ending: bool) -> tuple[list[int], list[dict[int, float]] | None]:
    """Return the new tokens and their log-probabilities.

    Args:
        result: the result of a request.
        with_ending: include the token that ended the answer.
    """
    if not with_ending or result.ending_token_id is None:
        return result.token_ids, result.logprobs
    logprobs = None
    if result.logprobs is not None and result.ending_logprobs is not None:
        logprobs = [*result.logprobs, result.ending_logprobs]
    return [*result.token_ids, result.ending_token_id], logprobs


def usage(results: Iterable[Result], choices: int) -> UsageAnswer:
    """Return the token counts of a call. A prompt counts once for all its choices.

    Args:
        results: results of all choices of all prompts, in order.
        choices: choices per prompt.
    """
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
