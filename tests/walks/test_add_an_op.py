"""A newcomer's walk: an op is one file of kernels/, with its signature, its forms and its fake side by side, and a line
of the library."""

from array import array

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import KVFormat
from longhelix.compute.kernels.library import is_compiling, library
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.parameters import declare
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.execution import Execution
from longhelix.compute.runner.rank import rank_capabilities
from longhelix.compute.runner.runner import ModelRunner
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.request import SamplingParams
from longhelix.scheduler.step import Chunk, InitialKV, NewSequence, Step
from longhelix.spec.layout import Layout
from tensors import Tensors
from toy_model import toy_model

pytestmark = pytest.mark.unit

CPU, VOCAB, CAP = torch.device("cpu"), 16, 0.5
TINY = toy_model(
    num_layers=2, hidden_size=32, num_query_heads=2, num_kv_heads=1, head_size=16, ffn_size=32, vocab_size=VOCAB,
    max_positions=64,
)  # fmt: skip


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


class CappedDecoder(Decoder):
    """A model that caps its logits, as Gemma 2 does."""

    def logits(self, hidden_TH: Tensor) -> Tensor:
        return soft_cap(super().logits(hidden_TH), CAP)


def capped_runner() -> ModelRunner:
    mesh = Mesh.build(Layout(), 0)
    weights = Weights(Tensors.of(TINY), declare(TINY, Layout(), 0), torch.float32, "float32", CPU)
    model = CappedDecoder(TINY, mesh, weights)
    pool = KVPool([{"kv": KVFormat.choose("float32", 16, 1, 16, 16, CPU)}] * TINY.num_layers, 2, CPU)
    execution = Execution.resolve(
        compile=False, replay=False, whole_batches=False, capabilities=rank_capabilities(mesh, model, pool)
    )
    return ModelRunner(TINY, mesh, model, pool, execution)


def test_a_model_computes_it():
    """The second of a prompt's two chunks has capped logits, whether they come from a graph or not, and samples from
    them."""
    runner, tokens = capped_runner(), array("i", range(VOCAB)).tobytes()
    new = NewSequence(0, SamplingParams(logprobs=VOCAB), seed=0, capacity_tokens=32, kv=InitialKV((2,), True))
    runner.execute(Step(1, (new,), chunks=(Chunk(0, tokens, (Block(0, 0), Block(0, 1)), sample=False),)))
    step = Step(2, chunks=(Chunk(0, tokens, (), sample=True),))
    hidden_TH = runner.forward(step)
    plain_TV = Decoder.logits(runner.model, hidden_TH)
    assert plain_TV.abs().max() > CAP
    for logits in (runner.model.logits, torch.compile(runner.model.logits, fullgraph=True, backend="aot_eager")):
        capped_TV = logits(hidden_TH)
        assert capped_TV.abs().max() <= CAP
        assert torch.equal(capped_TV.argsort(), plain_TV.argsort())
        torch.testing.assert_close(capped_TV, reference(plain_TV, CAP))
    (sampled,) = runner.next_tokens.sample(step, hidden_TH)
    logprobs_V = torch.tensor([sampled.logprobs[token_id] for token_id in range(VOCAB)])
    torch.testing.assert_close(logprobs_V, reference(plain_TV[-1], CAP).log_softmax(-1))
