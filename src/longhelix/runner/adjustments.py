"""What is done to the logits of one sequence, in a part of the vocabulary, before candidates are taken of them."""

from array import array
from collections.abc import Collection

import torch
from torch import Tensor

from longhelix.request import NewSequence


class TokenCounts:
    """How often a sequence has generated each token of `vocabulary`, for its penalties of presence and frequency."""

    def __init__(self, vocabulary: range) -> None:
        self._vocabulary = vocabulary
        self._indices: dict[int, int] = {}  # of tokens, in the arrays
        self._places, self._counts = array("q"), array("q")  # of the different ones, in the order in which they came

    def add_one(self, token_id: int) -> None:
        if token_id not in self._vocabulary:
            return
        index = self._indices.setdefault(token_id, len(self._counts))
        if index == len(self._counts):
            self._places.append(token_id - self._vocabulary.start)
            self._counts.append(0)
        self._counts[index] += 1

    def penalise(self, logits_v: Tensor, presence: float, frequency: float) -> None:
        """Subtract presence + frequency * count where the count is above 0, in place. logits_v: float32."""
        if not self._counts:
            return
        # What is in pageable memory is read before `to` returns, and may change from then on.
        counts_X, places_X = (
            torch.frombuffer(numbers, dtype=torch.int64).to(logits_v.device, non_blocking=True)
            for numbers in (self._counts, self._places)
        )
        logits_v.index_add_(0, places_X, counts_X.float() * frequency + presence, alpha=-1)


class Adjustments:
    """Logit bias, penalties of presence and frequency, and no stop token before `min_tokens` new tokens, in the part
    `vocabulary` of the vocabulary.

    counts: of the tokens that it has generated, None where none are counted; whoever has the sequence adds them.
    """

    def __init__(
        self, new: NewSequence, vocabulary: range, eos_token_ids: Collection[int], device: torch.device
    ) -> None:
        params = new.sampling
        biased = [token_id for token_id in params.logit_bias if token_id in vocabulary]
        stops = [token_id for token_id in {*params.stop_token_ids, *eos_token_ids} if token_id in vocabulary]
        self._biased_X = torch.tensor(biased, dtype=torch.int64, device=device) - vocabulary.start
        biases = [params.logit_bias[token_id] for token_id in biased]
        self._biases_X = torch.tensor(biases, dtype=torch.float32, device=device)
        self._stops_X = torch.tensor(stops, dtype=torch.int64, device=device) - vocabulary.start
        self._first_end = new.capacity_tokens - params.max_new_tokens + params.min_tokens  # of its tokens, prompt first
        self._presence, self._frequency = params.presence_penalty, params.frequency_penalty
        self.counts = TokenCounts(vocabulary) if params.counts_tokens else None

    def adjust(self, logits_v: Tensor, length: int) -> None:
        """In place, before the token behind `length` others is chosen. logits_v: float32."""
        if len(self._biased_X):
            logits_v.index_add_(0, self._biased_X, self._biases_X)
        if self.counts is not None:
            self.counts.penalise(logits_v, self._presence, self._frequency)
        if length < self._first_end:
            logits_v.index_fill_(0, self._stops_X, -torch.inf)
