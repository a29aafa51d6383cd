"""Adjusts the logits of one sequence before candidates are chosen: logit bias, penalties, stop tokens, guides."""

from array import array
from collections.abc import Collection
from copy import copy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longhelix.compute.runner.matchers import GuideError, Matcher
from longhelix.scheduler.step import NewSequence


class TokenCounts:
    """Counts how often a sequence has generated each token of `vocabulary`, for presence and frequency penalties."""

    def __init__(self, vocabulary: range) -> None:
        self._vocabulary = vocabulary
        self._indices: dict[int, int] = {}  # of tokens, in the arrays
        self._places, self._counts = array("q"), array("q")  # of the distinct tokens, in order of their first use

    def add_one(self, token_id: int) -> None:
        if token_id not in self._vocabulary:
            return
        index = self._indices.setdefault(token_id, len(self._counts))
        if index == len(self._counts):
            self._places.append(token_id - self._vocabulary.start)
            self._counts.append(0)
        self._counts[index] += 1

    def with_token(self, token_id: int) -> "TokenCounts":
        """Return a copy with one more token."""
        copied = TokenCounts(self._vocabulary)
        copied._indices = self._indices.copy()
        copied._places, copied._counts = self._places[:], self._counts[:]
        copied.add_one(token_id)
        return copied

    def penalise(self, logits_v: Tensor, presence: float, frequency: float) -> None:
        """Subtract presence + frequency * count from logits_v (float32), in place, where the count is above 0."""
        if not self._counts:
            return
        # `to` reads pageable memory before it returns, so the arrays may change afterwards.
        counts_X, places_X = (
            torch.frombuffer(numbers, dtype=torch.int64).to(logits_v.device, non_blocking=True)
            for numbers in (self._counts, self._places)
        )
        logits_v.index_add_(0, places_X, counts_X.float() * frequency + presence, alpha=-1)


Record = TokenCounts | Matcher  # records every token that a sequence generates


class Adjustments:
    """Adjusts logits: applies logit bias and presence and frequency penalties, bans stop tokens before `min_tokens` new
    tokens, and bans tokens that the guide does not allow.

    Add every generated token to all `records`.

    Attributes:
        counts: Counts of generated tokens. None: the request has no such penalty.

    Args:
        vocabulary: The part of the vocabulary that this rank has.
        matcher: Matcher of the request's guide at the start of the text. None: there is no guide.
    """

    def __init__(
        self,
        new: NewSequence,
        vocabulary: range,
        eos_token_ids: Collection[int],
        device: torch.device,
        matcher: Matcher | None = None,
    ) -> None:
        params = new.sampling
        biased = [token_id for token_id in params.logit_bias if token_id in vocabulary]
        self._stops = sorted({*params.stop_token_ids, *eos_token_ids})
        stops = [token_id for token_id in self._stops if token_id in vocabulary]
        self._biased_X = torch.tensor(biased, dtype=torch.int64, device=device) - vocabulary.start
        biases = [params.logit_bias[token_id] for token_id in biased]
        self._biases_X = torch.tensor(biases, dtype=torch.float32, device=device)
        self._stops_X = torch.tensor(stops, dtype=torch.int64, device=device) - vocabulary.start
        self._first_end = new.capacity_tokens - params.max_new_tokens + params.min_tokens  # length at which it may end
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self._part = slice(vocabulary.start, vocabulary.stop)
        self._matcher = matcher
        self.counts = TokenCounts(vocabulary) if params.counts_tokens else None

    def with_draft_token(self, token_id: int) -> "Adjustments":
        """Return the adjustments of the row after a draft token."""
        copied = copy(self)
        copied.counts = None if self.counts is None else self.counts.with_token(token_id)
        copied._matcher = None if self._matcher is None else self._matcher.with_draft_token(token_id)
        return copied

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(record for record in (self.counts, self._matcher) if record is not None)

    def adjust(self, logits_v: Tensor, length: int) -> str:
        """Adjust logits_v (float32) in place, before the token after the first `length` tokens is chosen.

        Returns:
            "", or an error message if no token can be chosen. Then all logits are NaN.
        """
        if len(self._biased_X):
            logits_v.index_add_(0, self._biased_X, self._biases_X)
        if self.counts is not None:
            self.counts.penalise(logits_v, self._presence, self._frequency)
        if self._matcher is not None and not self._matcher.has_ended:
            try:
                allowed_V = self._allowed(self._matcher, length)
            except GuideError as error:
                logits_v.fill_(torch.nan)
                return f"the guide cannot be followed any further: {error}"
            banned_v = torch.from_numpy(~allowed_V[self._part]).to(logits_v.device)
            logits_v.masked_fill_(banned_v, -torch.inf)
        elif length < self._first_end:
            logits_v.index_fill_(0, self._stops_X, -torch.inf)
        return ""

    def _allowed(self, matcher: Matcher, length: int) -> NDArray[np.bool_]:
        """Return allowed_V for the whole vocabulary, so that ranks agree on whether any token is left."""
        allowed_V = matcher.allowed()
        if length < self._first_end:
            going_on_V = allowed_V.copy()
            going_on_V[[token_id for token_id in self._stops if token_id < len(allowed_V)]] = False
            if going_on_V.any():
                return going_on_V
        return allowed_V
