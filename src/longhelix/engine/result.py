"""What a request gave: its result, and its text as it comes."""

from dataclasses import dataclass

from longhelix.engine.exchanges import HopB
from longhelix.scheduler.token_event import FinishReason


@dataclass(frozen=True)
class Result:
    """One finished request.

    token_ids: the new tokens, without the end-of-sequence or stop token that ended them. ttft_s: from `add` to the
    first token. tbt_s: between tokens, one entry fewer than tokens. kv_tokens_per_rank: this request's tokens on
    each KVP rank at its end. cached_tokens: of its prompt, those whose KV was there already. preemptions: how often
    others took its room; recomputed_tokens: those whose KV it lost by that and that ran again. swapped_tokens: those
    whose KV had been swapped and came back. moved_tokens: those whose KV moved to other KVP ranks while it ran, because
    one had no room left, each time; moved_bytes: what that was over all ranks; moved_s: how long steps took for it.
    exchanged_bytes_per_token: what all ranks together sent in the exchange, per token of prompt and output that ran.
    hop_b: how exchanges overlapped attention. logprobs: per new token, token id to natural log (None if not asked
    for); prompt_logprobs: the same per token of the prompt, None for the first one, which nothing comes before, without
    those that an abort or an error came before. token_texts: what each new token adds to the text, before any stop
    string has cut it (None without logprobs). error: why the request failed, where finish_reason is "error": this
    request alone. ending_token_id: the end-of-sequence or stop token that ended it; ending_logprobs: its entry, as in
    `logprobs`.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_s: float | None
    tbt_s: list[float]
    layout: dict[str, int]
    kv_tokens_per_rank: list[int]
    cached_tokens: int
    preemptions: int
    recomputed_tokens: int
    swapped_tokens: int
    moved_tokens: int
    moved_bytes: int
    moved_s: float
    exchanged_bytes_per_token: float
    hop_b: HopB
    logprobs: list[dict[int, float]] | None
    error: str | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    ending_token_id: int | None = None
    ending_logprobs: dict[int, float] | None = None
    token_texts: list[str] | None = None
    reasoning: str | None = None  # between the model's tags, and no part of `text`; None if it was not asked for apart
    reasoning_tokens: int | None = None  # those of the tags included


@dataclass(frozen=True)
class Delta:
    """What a step gave one request: new text (may be empty), and its result if it ended.

    token_id: the new token, whose text may come with a later one; None where there is none, as after an abort or a stop
    token. Those of all deltas are the result's `token_ids`. logprobs, token_text: the token's entries of the result's
    `logprobs` and `token_texts`.
    reasoning: more of the result's `reasoning`; None if the token is no part of it.
    """

    request_id: int
    text: str
    result: Result | None
    token_id: int | None = None
    logprobs: dict[int, float] | None = None
    token_text: str | None = None
    reasoning: str | None = None
