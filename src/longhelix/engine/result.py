"""What a request gave: its result, and its text as it comes."""

from dataclasses import dataclass

from longhelix.request import StepResult
from longhelix.scheduler.scheduler import FinishReason


@dataclass(frozen=True)
class HopB:
    """The exchanges of the steps that ran between a request's arrival and its end.

    parts: the most that one of them attended in; 1 is one exchange. exchanges: those of each layer, over all steps; 0
    with one KVP rank. exposed_s: seconds that the rank that waited longest in a step waited for exchanges with nothing
    left to attend to, for peers that came late too, over all steps; None where that is not measured: ranks that share
    memory, GPUs, compiled layers, one KVP rank.
    """

    parts: int = 1
    exchanges: int = 0
    exposed_s: float | None = 0.0

    def after(self, step: StepResult, kvp: int) -> "HopB":
        """These, and those of one more step, on `kvp` ranks."""
        exposed_s = None if self.exposed_s is None or step.exposed_s is None else self.exposed_s + step.exposed_s
        return HopB(max(self.parts, step.parts), self.exchanges + (step.parts if kvp > 1 else 0), exposed_s)


@dataclass(frozen=True)
class Result:
    """One finished request.

    token_ids: the new tokens, without the end-of-sequence or stop token that ended them. ttft_s: from `add` to the
    first token. tbt_s: between tokens, one entry fewer than tokens. kv_tokens_per_rank: this request's tokens on
    each KVP rank at its end. exchanged_bytes_per_token: what all ranks together sent in the exchange, per token of
    prompt and output that ran. hop_b: how exchanges overlapped attention. logprobs: per new token, token id to natural
    log (None if not asked for).
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_s: float | None
    tbt_s: list[float]
    layout: dict[str, int]
    kv_tokens_per_rank: list[int]
    exchanged_bytes_per_token: float
    hop_b: HopB
    logprobs: list[dict[int, float]] | None


@dataclass(frozen=True)
class Delta:
    """What a step gave one request: new text (may be empty), and its result if it ended."""

    request_id: int
    text: str
    result: Result | None
