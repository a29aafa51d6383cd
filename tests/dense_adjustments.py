"""What requests may want to be done to logits before the repetition penalty, over the whole vocabulary at once."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from longhelix.scheduler.request import SamplingParams


def adjusted(logits_V: Tensor, params: SamplingParams, generated: Sequence[int], stops: Collection[int]) -> Tensor:
    """The logits behind `generated` tokens of the request. stops: the tokens that may end it."""
    size = len(logits_V)
    bias_V = torch.tensor([params.logit_bias.get(token_id, 0.0) for token_id in range(size)])
    counts_V = torch.tensor(generated, dtype=torch.int64).bincount(minlength=size)
    penalty_V = counts_V.float() * params.frequency_penalty + (counts_V > 0).float() * params.presence_penalty
    logits_V = logits_V + bias_V - penalty_V
    if len(generated) < params.min_tokens:
        logits_V[list(stops)] = -torch.inf
    return logits_V
