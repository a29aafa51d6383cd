"""Routing by hand: which experts, with what weights."""

import pytest
import torch
from torch.library import opcheck

from longhelix.compute.kernels import native, route
from longhelix.errors import UserError
from longhelix.spec import MoE, Routing

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True, params=["native", "reference"])
def form(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(native, "module", None)
    elif native.module is None:
        pytest.skip("this install has no native CPU kernels")


LOGITS_TE = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.5, 3.0, 2.5]])


def test_softmax_weights_of_the_best_sum_to_one_where_normalised():
    weights_TY, experts_TY = route(LOGITS_TE, None, MoE(4, 2, 8))
    assert experts_TY.tolist() == [[0, 1], [2, 3]]
    assert torch.allclose(weights_TY.sum(1), torch.ones(2))
    assert weights_TY[0, 0] / weights_TY[0, 1] == pytest.approx(torch.tensor(1.0).exp().item())
    plain_TY, _ = route(LOGITS_TE, None, MoE(4, 2, 8, routing=Routing(normalised=False, scale=2.0)))
    assert torch.allclose(plain_TY, 2 * LOGITS_TE.softmax(1).gather(1, experts_TY))


def test_a_bias_chooses_and_does_not_weigh():
    moe = MoE(4, 1, 8, routing=Routing(sigmoid=True, normalised=False, bias=True))
    weights_TY, experts_TY = route(LOGITS_TE, torch.tensor([0.0, 0.0, 0.0, 5.0]), moe)
    assert experts_TY.tolist() == [[3], [3]]
    assert torch.allclose(weights_TY[:, 0], LOGITS_TE[:, 3].sigmoid())


def test_only_experts_of_the_best_groups_are_taken():
    """By the best score of a group, and, with sigmoid, by the sum of its two best."""
    logits_TE = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    softmax = route(logits_TE, None, MoE(4, 2, 8, routing=Routing(num_groups=2, groups_per_token=1)))[1]
    sigmoid = route(logits_TE, None, MoE(4, 2, 8, routing=Routing(num_groups=2, groups_per_token=1, sigmoid=True)))[1]
    assert sorted(softmax[0].tolist()) == [0, 1]
    assert sorted(sigmoid[0].tolist()) == [2, 3]


def test_of_equal_scores_the_first_is_taken():
    logits_TE = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 1.0]])
    assert route(logits_TE, None, MoE(6, 4, 8))[1].tolist() == [[1, 2, 4, 0]]
    grouped = MoE(6, 2, 8, routing=Routing(num_groups=3, groups_per_token=2))
    assert route(torch.zeros(1, 6), None, grouped)[1].tolist() == [[0, 1]]


def test_shared_experts_are_one_more_that_comes_last():
    plain, gated = (MoE(4, 2, 8, shared_size=8, routing=Routing(scale=2.0, shared_gate=gate)) for gate in (False, True))
    weights_TY, experts_TY = route(LOGITS_TE, None, plain)
    assert experts_TY.tolist() == [[0, 1, 4], [2, 3, 4]]
    assert weights_TY[:, 2].tolist() == [1.0, 1.0]
    gates_T1 = torch.tensor([[0.0], [-3.0]])
    weights_TY, experts_TY = route(torch.cat((LOGITS_TE, gates_T1), dim=1), None, gated)
    assert experts_TY.tolist() == [[0, 1, 4], [2, 3, 4]]
    assert torch.allclose(weights_TY[:, 2:], gates_T1.sigmoid())
    assert torch.allclose(weights_TY[:, :2].sum(1), torch.tensor(2.0))


@pytest.mark.parametrize(
    "wrong", [{"num_groups": 3}, {"num_groups": 2, "groups_per_token": 3}, {"num_groups": 4, "groups_per_token": 1}]
)
def test_groups_that_cannot_be(wrong):
    with pytest.raises(UserError, match="topk_group in the model's config"):
        MoE(4, 2, 8, routing=Routing(**wrong))


@pytest.mark.parametrize("shared", [False, True])
def test_torch_accepts_the_op_and_its_fake(shared):
    """Strides too: a compiled graph was made for those that the fake says."""
    op, logits_TX = torch.ops.longhelix.route.default, torch.randn(5, 6 + shared)
    for groups in ((1, 1), (3, 2)):
        arguments = logits_TX, torch.randn(6), 6, 2, shared, shared, True, True, *groups, 2.5
        assert set(opcheck(op, arguments).values()) == {"SUCCESS"}
