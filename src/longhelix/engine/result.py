"""What a request produces: its final result, and its text piece by piece."""

from dataclasses import dataclass

from longhelix.engine.exchanges import HopB
from longhelix.scheduler.token_event import FinishReason


@dataclass(frozen=True)
class Result:
    """One finished request."""

    text: str
    token_ids: list[int]  # new tokens, without the end-of-sequence or stop token that ended the answer
    prompt_tokens: int  # tokens of the prompt, with those of a saved context
    finish_reason: FinishReason
    ttft_s: float | None  # seconds from arrival to the first token; None without a token
    tbt_s: list[float]  # seconds between consecutive tokens, one entry fewer than tokens
    layout: dict[str, int]  # kvp, tpa, tpf, ep and pp
    kv_tokens_per_rank: list[int]  # tokens of this request's KV on each KVP rank at its end
    cached_tokens: int  # prompt tokens taken from the prefix cache
    preemptions: int  # how often the request was preempted
    recomputed_tokens: int  # tokens computed again because preemption evicted their KV
    swapped_tokens: int  # tokens whose KV was swapped out and back in
    moved_tokens: int  # tokens whose KV moved to another KVP rank because one was full, counted at each move
    moved_bytes: int  # bytes of those moves over all ranks
    moved_s: float  # seconds that steps spent on those moves
    exchanged_bytes_per_token: float  # bytes that all ranks sent in exchanges, per prompt and output token that ran
    hop_b: HopB  # how exchanges overlapped attention
    logprobs: list[dict[int, float]] | None  # per new token: token id to natural log; None if not requested
    error: str | None = None  # why this request failed; set if finish_reason is "error"
    # Per prompt token: token id to natural log. None for the first token, which has no predecessor. Tokens that an
    # abort or an error left out are missing. None as a whole if not requested.
    prompt_logprobs: list[dict[int, float] | None] | None = None
    ending_token_id: int | None = None  # the end-of-sequence or stop token that ended the answer
    ending_logprobs: dict[int, float] | None = None  # its entry, as in `logprobs`
    token_texts: list[str] | None = None  # text of each new token before stop strings cut it; None without logprobs
    reasoning: str | None = None  # text between the model's reasoning tags, not in `text`; None if not requested
    reasoning_tokens: int | None = None  # tokens of the reasoning, including its tags


@dataclass(frozen=True)
class Delta:
    """What a step adds to one request."""

    request_id: int
    text: str  # new text; may be empty
    result: Result | None  # set on the last delta
    # The new token; its text may come with a later delta. None if there is no new token, as after an abort or a stop
    # token. The tokens of all deltas together are the result's `token_ids`.
    token_id: int | None = None
    logprobs: dict[int, float] | None = None  # the token's entry of the result's `logprobs`
    token_text: str | None = None  # the token's entry of the result's `token_texts`
    reasoning: str | None = None  # more of the result's `reasoning`; None if the token is not part of it
