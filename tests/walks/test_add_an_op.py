"""A newcomer's walk: an op is one file of kernels/, with its signature, its forms and its fake side by side, and a line
of the library."""

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from longhelix.compute.kernels.library import is_compiling, library

pytestmark = pytest.mark.unit


def soft_cap(scores_TX: Tensor, cap: float) -> Tensor:
    """cap * tanh(scores / cap): scores_TX stay within -cap and cap (Gemma 2, arXiv 2408.00118, section 2)."""
    if not is_compiling():
        return _soft_cap(scores_TX, cap)
    return torch.ops.longhelix.soft_cap(scores_TX, cap)


def reference(scores_TX: Tensor, cap: float) -> Tensor:
    return (cap * torch.tanh(scores_TX.double() / cap)).to(scores_TX.dtype)


def _soft_cap(scores_TX: Tensor, cap: float) -> Tensor:
    """The fast form."""
    return scores_TX.div(cap).tanh_().mul_(cap)


@pytest.fixture(scope="module", autouse=True)
def registered():
    if not hasattr(torch.ops.longhelix, "soft_cap"):
        library.define("soft_cap(Tensor scores_TX, float cap) -> Tensor")
        library.impl("soft_cap", _soft_cap, "CompositeExplicitAutograd")
        torch.library.register_fake(
            "longhelix::soft_cap", lambda scores_TX, _: scores_TX.new_empty(scores_TX.shape), lib=library
        )


def test_the_fast_form_is_the_reference():
    scores_TX = 100 * torch.randn(7, 33, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(soft_cap(scores_TX, 30.0), reference(scores_TX, 30.0))
    assert soft_cap(scores_TX, 30.0).abs().max() <= 30


def test_graphs_keep_it_whole():
    arguments = torch.randn(7, 33), 30.0
    assert set(opcheck(torch.ops.longhelix.soft_cap.default, arguments).values()) == {"SUCCESS"}
    compiled = torch.compile(soft_cap, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*arguments), reference(*arguments))
