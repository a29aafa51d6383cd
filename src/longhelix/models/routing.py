"""Which experts a row takes, and with what weight."""

import torch
from torch import Tensor

from longhelix.spec import MoE


def route(logits_TE: Tensor, bias_E: Tensor | None, moe: MoE) -> tuple[Tensor, Tensor]:
    """The taken experts' weights and ids, weights_TY (float32) and experts_TY (int64), Y experts per token.

    Softmax routing as in Mixtral (arXiv 2401.04088) and DeepSeek-V2 (arXiv 2405.04434, group-limited); sigmoid routing
    with a bias that only chooses as in DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    """
    scores_TE = logits_TE.float().sigmoid() if moe.sigmoid else logits_TE.float().softmax(-1)
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if moe.groups_per_token < moe.num_groups:
        choice_TE = _limit_groups(choice_TE, moe)
    experts_TY = choice_TE.topk(moe.experts_per_token, dim=-1).indices
    weights_TY = scores_TE.gather(1, experts_TY)
    if moe.normalised:
        weights_TY = weights_TY / weights_TY.sum(-1, keepdim=True)
    return weights_TY * moe.scale, experts_TY


def _limit_groups(choice_TE: Tensor, moe: MoE) -> Tensor:
    """Only experts of the best groups can be chosen."""
    groups_TGE = choice_TE.unflatten(1, (moe.num_groups, -1))
    best = min(2, groups_TGE.shape[-1]) if moe.sigmoid else 1
    of_group_TG = groups_TGE.topk(best, dim=-1).values.sum(-1)
    taken_TG = of_group_TG.topk(moe.groups_per_token, dim=-1).indices
    left_out_TG = torch.ones_like(of_group_TG, dtype=torch.bool).scatter_(1, taken_TG, False)
    return groups_TGE.masked_fill(left_out_TG.unsqueeze(-1), -torch.inf).flatten(1)
