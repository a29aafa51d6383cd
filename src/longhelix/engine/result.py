"""The output of a request: its final result, and the deltas that it produces while it runs."""

from dataclasses import dataclass

from longhelix.engine.exchanges import HopB
from longhelix.scheduler.token_event import FinishReason


@dataclass(frozen=True)
class Result:
    """One finished request."""

    text: str
    token_ids: list[int]  # new tokens, without the end-of-sequence or stop token that ended the answer
    prompt_tokens: int  # number of prompt tokens, including the tokens of a saved context
    finish_reason: FinishReason
    ttft_s: float | None  # seconds from arrival to the first token; None without a token
    tbt_s: list[float]  # seconds between consecutive tokens, one entry fewer than tokens
    layout: dict[str, int]  # kvp, tpa, tpf, ep and pp
    kv_tokens_per_rank: list[int]  # KV tokens of this request on each KVP rank when it ended
    cached_tokens: int  # prompt tokens taken from the prefix cache
    preemptions: int  # number of times the request was preempted
    recomputed_tokens: int  # tokens computed again because preemption evicted their KV
    swapped_tokens: int  # tokens whose KV was swapped out and back in
    moved_tokens: int  # tokens whose KV moved to another KVP rank because one was full, counted at each move
    moved_bytes: int  # bytes that these moves transferred, over all ranks
    moved_s: float  # seconds that steps spent on these moves
    # Bytes that all ranks have sent in exchanges since the engine started, divided by the number of tokens (prompt and
    # output) that the engine has run.
    exchanged_bytes_per_token: float
    hop_b: HopB  # how exchanges overlapped attention
    logprobs: list[dict[int, float]] | None  # for each new token, log-probabilities by token id; None if not requested
    error: str | None = None  # why this request failed; set if finish_reason is "error"
    # For each prompt token, natural log-probabilities by token id. The first entry is None, because the first token has
    # no predecessor. Tokens that were not run because of an abort or an error are missing. The whole list is None if
    # prompt log-probabilities were not requested.
    prompt_logprobs: list[dict[int, float] | None] | None = None
    ending_token_id: int | None = None  # the end-of-sequence or stop token that ended the answer
    ending_logprobs: dict[int, float] | None = None  # log-probabilities of that token, as in `logprobs`
    token_texts: list[str] | None = None  # text of each new token before stop strings cut it; None without logprobs
    reasoning: str | None = None  # text between the model's reasoning tags, not in `text`; None if not requested
    reasoning_tokens: int | None = None  # tokens of the reasoning, including its tags


@dataclass(frozen=True)
class Delta:
    """The output that a step adds to one request."""

    request_id: int
    text: str  # new text; may be empty
    result: Result | None  # set on the last delta
    # The new token. Its text may be in a later delta. None if there is no new token, for example after an abort or a
    # stop token. The tokens of all deltas together are the result's `token_ids`.
    token_id: int | None = None
    logprobs: dict[int, float] | None = None  # the token's entry of the result's `logprobs`
    token_text: str | None = None  # the token's entry of the result's `token_texts`
    reasoning: str | None = None  # the next part of the result's `reasoning`; None if the token is not part of it
