"""Log-probabilities of new tokens in the formats of OpenAI's two endpoints, and of prompts in vLLM's format."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.errors import UserError
from longhelix.serve.answers import (
    ChatLogprobs,
    ChosenToken,
    CompletionLogprobs,
    LikelyToken,
    PromptLogprobs,
    PromptToken,
)

_LEAST_LOGPROB = -9999.0  # replaces minus infinity, as in vLLM


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: list[int], logprobs: list[dict[int, float]], num_best: int
) -> ChatLogprobs:
    """Return the `logprobs` object of a chat choice.

    Args:
        tokenizer: the tokenizer.
        token_ids: the new tokens.
        logprobs: for each token, log-probabilities of the likeliest tokens and of the token itself.
        num_best: number of likeliest tokens to show at each token.
    """
    known = bytes_of_tokens(tokenizer)
    return ChatLogprobs(
        content=[
            ChosenToken(
                **_likely(tokenizer, known, token_id, found[token_id]),
                top_logprobs=[
                    LikelyToken(**_likely(tokenizer, known, other, logprob))
                    for other, logprob in _best(found, num_best)
                ],
            )
            for token_id, found in zip(token_ids, logprobs, strict=True)
        ]
    )


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    texts: Sequence[str],
    logprobs: Sequence[dict[int, float] | None],
    offset: int,
) -> CompletionLogprobs:
    """Return the `logprobs` object of a completion choice.

    Args:
        tokenizer: the tokenizer.
        token_ids: the tokens.
        texts: text that each token adds.
        logprobs: for each token, log-probabilities of the likeliest tokens and of the token itself; None for the first
            prompt token.
        offset: position of the first token's text in the choice's text, in characters.
    """
    return CompletionLogprobs(
        tokens=list(texts),
        token_logprobs=[
            None if found is None else _finite(found[token_id])
            for token_id, found in zip(token_ids, logprobs, strict=True)
        ],
        top_logprobs=[
            None if found is None else _by_text(tokenizer, _best(found, len(found)), {token_id: text})
            for token_id, text, found in zip(token_ids, texts, logprobs, strict=True)
        ],
        text_offset=[offset + before for before in accumulate(map(len, texts[:-1]), initial=0)],
    )


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[dict[int, float] | None], num_best: int | None
) -> PromptLogprobs | None:
    """Return the `prompt_logprobs` of a choice in vLLM's format.

    Args:
        tokenizer: the tokenizer.
        logprobs: for each prompt token, log-probabilities of the likeliest tokens and of the token itself; None for the
            first token.
        num_best: number of likeliest tokens to show at each token; None if the request does not set `prompt_logprobs`.
    """
    if num_best is None:
        return None
    return [None if found is None else _ranked(tokenizer, found, num_best) for found in logprobs]


def _ranked(tokenizer: Tokenizer, found: Mapping[int, float], num_best: int) -> dict[int, PromptToken]:
    return {
        token_id: PromptToken(
            logprob=_finite(logprob),
            rank=place if place <= num_best else None,
            decoded_token=tokenizer.piece(token_id),
        )
        for place, (token_id, logprob) in enumerate(_best(found, len(found)), 1)
    }


def fewer_best(
    logprobs: Sequence[dict[int, float] | None], token_ids: Sequence[int], num_best: int
) -> list[dict[int, float] | None]:
    """Keep only the log-probabilities of the `num_best` likeliest tokens and of the actual token at each position."""
    return [
        None if found is None else dict(_best(found, num_best)) | {token_id: found[token_id]}
        for token_id, found in zip(token_ids, logprobs, strict=True)
    ]


def _finite(logprob: float) -> float:
    """Replace minus infinity, because JSON cannot represent it."""
    return max(logprob, _LEAST_LOGPROB)


def _best(found: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    return sorted(found.items(), key=lambda item: -item[1])[:count]


def _by_text(tokenizer: Tokenizer, best: Sequence[tuple[int, float]], chosen: Mapping[int, str]) -> dict[str, float]:
    """Return log-probabilities by text. If several tokens have the same text, the likeliest token is used.

    Args:
        tokenizer: the tokenizer.
        best: token ids and log-probabilities, in descending order of probability.
        chosen: id of the actual token and the text that this token adds after the previous tokens.
    """
    found: dict[str, float] = {}
    for token_id, logprob in best:
        text = chosen[token_id] if token_id in chosen else tokenizer.piece(token_id)
        found.setdefault(text, _finite(logprob))
    return found


def bytes_of_tokens(tokenizer: Tokenizer) -> Mapping[int, bytes] | None:
    """Return the bytes of each token, or None if they are not known. The first call takes a while."""
    try:
        return tokenizer.token_bytes
    except UserError:
        return None


def _likely(tokenizer: Tokenizer, known: Mapping[int, bytes] | None, token_id: int, logprob: float) -> dict:
    token_bytes = None if known is None else list(known.get(token_id, b""))
    return {"token": tokenizer.piece(token_id), "logprob": _finite(logprob), "bytes": token_bytes}
