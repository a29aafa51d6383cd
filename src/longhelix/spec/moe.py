"""Mixture of experts: FFNs in which a token passes through a few of many experts."""

import msgspec

from longhelix.errors import UserError
from longhelix.spec.ffn import Activation


class Routing(msgspec.Struct, frozen=True):
    """How tokens take experts.

    Of `num_groups` equal groups of experts, the best `groups_per_token` remain: those with the best score, or, with
    `sigmoid`, those with the largest sum of two scores. The best experts of these groups are taken. Their weights are
    their scores times `scale`.

    Attributes:
        bias: When experts are chosen, a number per expert is added to the scores.
        shared_gate: A product with the hidden state weighs the shared experts.
        sigmoid: Scores are the sigmoid of a product. Otherwise they are its softmax.
        normalised: The weights of a token's experts sum to one, before `scale`.
        num_groups: Groups of experts.
        groups_per_token: Groups whose experts can be taken.
        scale: Factor of the weights.
        weighted_inputs: The inputs of experts are weighted, not their outputs.
    """

    bias: bool = False
    shared_gate: bool = False
    sigmoid: bool = False
    normalised: bool = True
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    weighted_inputs: bool = False


class MoE(msgspec.Struct, frozen=True, tag=True):
    """An FFN with experts. Every size of an FFN is its number of columns.

    Attributes:
        num_experts: Routed experts.
        experts_per_token: Experts that a token takes.
        expert_size: Columns of an expert.
        shared_size: Columns of all shared experts together, which every token takes. 0: there are none.
        biases: The products of the router and of the experts have biases.
        shared_bias: The products of the shared experts have biases.
        activation: What experts do between their products.
        routing: How tokens take experts.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int = 0
    biases: bool = False
    shared_bias: bool = False
    activation: Activation = Activation()
    routing: Routing = Routing()

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise UserError(
                f"a token takes {self.experts_per_token} of {self.num_experts} experts: set num_experts_per_tok to at "
                "most the number of experts",
                "invalid_model",
            )
        groups, taken = self.routing.num_groups, self.routing.groups_per_token
        if self.num_experts % groups or taken > groups:
            raise UserError(
                f"a token cannot take {taken} of {groups} equal groups of {self.num_experts} experts: correct n_group "
                "or topk_group in the model's config",
                "invalid_model",
            )
        if self.experts_per_token > self.num_experts // groups * taken:
            raise UserError(
                f"a token takes {self.experts_per_token} experts, but {taken} groups have fewer: "
                "correct topk_group in the model's config",
                "invalid_model",
            )
