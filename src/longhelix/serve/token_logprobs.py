"""Log-probabilities of tokens, as OpenAI's two forms have them."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from longhelix.serve.answers import ChatLogprobs, ChosenToken, CompletionLogprobs, LikelyToken
from longhelix.text.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0  # as vLLM writes it


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: list[dict[int, float]], num_best: int
) -> ChatLogprobs:
    """logprobs: of each token the `num_best` likeliest ones and itself."""
    return ChatLogprobs(
        content=[
            ChosenToken(
                **_likely(tokenizer, token_id, found[token_id]),
                top_logprobs=[
                    LikelyToken(**_likely(tokenizer, other, logprob)) for other, logprob in _best(found, num_best)
                ],
            )
            for token_id, found in zip(token_ids, logprobs, strict=True)
        ]
    )


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, float] | None],
    num_best: int,
    offset: int,
) -> CompletionLogprobs:
    """logprobs: as above; None for the first token of a prompt. offset: where the text of the first token begins."""
    texts = [tokenizer.piece(token_id) for token_id in token_ids]
    return CompletionLogprobs(
        tokens=texts,
        token_logprobs=[
            None if found is None else _finite(found[token_id])
            for token_id, found in zip(token_ids, logprobs, strict=True)
        ],
        top_logprobs=[
            None
            if found is None
            else {tokenizer.piece(other): _finite(logprob) for other, logprob in _best(found, num_best)}
            for found in logprobs
        ],
        text_offset=[offset + before for before in accumulate(map(len, texts[:-1]), initial=0)],
    )


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, _LEAST_LOGPROB)


def _best(found: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(found.items(), key=lambda item: -item[1])[:count]


def _likely(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict:
    text = tokenizer.piece(token_id)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}
