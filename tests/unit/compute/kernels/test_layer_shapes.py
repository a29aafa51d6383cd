"""Whole attention layers in others' sizes, on all ranks of a KVP group, against one dense layer in float64.

Weights, cached keys and rows are random; the ranks are threads of this process (threaded_ranks.py).
"""

import pytest
import torch

from longhelix.compute.models import latent_attention
from longhelix.compute.models.latent_attention import LatentAttention
from threaded_ranks import LayerCase, gqa_spec, mla_spec
from tiers import few
from toy_model import latents_of

pytestmark = pytest.mark.unit

# max|d| / max|ref| of what the layer adds. In bfloat16 every product and sum between ranks is rounded, 2^-8 each.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
LAYERS = {
    "gqa": gqa_spec(hidden_size=2048, num_query_heads=16, num_kv_heads=4, head_size=128),
    "mla": mla_spec(hidden_size=2560, num_query_heads=32, latent=512, rope=64, nope=128, value=128),
}
# Sequences, and tokens of each, the new one included.
SHORT, LONG = [(1, 64), (1, 512), (1, 4096)], [(1, 32768), (8, 8192), (16, 2048)]
CONTEXTS = [*SHORT, *(pytest.param(*context, marks=pytest.mark.slow) for context in LONG)]
BLOCK_TOKENS = 32


def assert_equals_dense(case, kvp, tolerance):
    added_TH = case.dense()
    for out_TH in case.run(kvp):
        assert out_TH.dtype == case.dtype
        deviation_TH = out_TH.double() - case.hidden_TH.double() - added_TH
        assert float(deviation_TH.abs().max() / added_TH.abs().max()) <= tolerance


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kvp", few([4, 2]))
@pytest.mark.parametrize(("sequences", "length"), CONTEXTS)
@pytest.mark.parametrize("layer", LAYERS)
def test_decode_rows_equal_a_dense_layer(layer, sequences, length, kvp, dtype):
    case = LayerCase(LAYERS[layer], [length - 1] * sequences, [1] * sequences, dtype, BLOCK_TOKENS)
    assert_equals_dense(case, kvp, TOLERANCE[dtype])


SMALL = mla_spec(hidden_size=96, num_query_heads=5, latent=64, rope=16, nope=16, value=16)


@pytest.mark.parametrize("kvp", [1, 2, 3])
@pytest.mark.parametrize("block_tokens", [4, 16], ids=["rows", "packed"])
def test_sequences_of_many_rows_attend_directly_and_others_absorbed(monkeypatch, kvp, block_tokens):
    """One batch of decodes and chunks, some of a row too few; ranks without tokens of a sequence among them."""
    assert 21 < latents_of(SMALL).direct_rows < 22
    prefixes, rows = [50, 0, 33, 70, 64, 0], [1, 40, 10, 21, 22, 3]
    attended, attend = [], latent_attention.direct_attention
    monkeypatch.setattr(
        latent_attention, "direct_attention", lambda q_TqC, *more: attended.append(len(q_TqC)) or attend(q_TqC, *more)
    )
    assert_equals_dense(LayerCase(SMALL, prefixes, rows, torch.float32, block_tokens), kvp, 1e-5)
    assert attended == [40 + 22] * kvp
    attended.clear()
    assert_equals_dense(LayerCase(SMALL, prefixes[:4], [1, 21, 10, 21], torch.float32, block_tokens), kvp, 1e-5)
    assert attended == []


def test_a_long_chunk_in_bfloat16_equals_a_dense_layer():
    """DeepSeek's sizes with few heads: a chunk that is direct from the 171st row on, over two pieces of its context."""
    spec = mla_spec(hidden_size=256, num_query_heads=2, latent=512, rope=64, nope=128, value=128)
    for rows in (170, 171):
        case = LayerCase(spec, [4000], [rows], torch.bfloat16, BLOCK_TOKENS)
        assert_equals_dense(case, 1, TOLERANCE[torch.bfloat16])


def test_compiled_layers_keep_the_absorbed_form(monkeypatch):
    """What they launch must not depend on lengths; and what they give is the same."""
    monkeypatch.setattr(latent_attention, "direct_attention", None)
    monkeypatch.setattr(
        LatentAttention, "forward", torch.compile(LatentAttention.forward, fullgraph=True, backend="aot_eager")
    )
    torch._dynamo.reset()
    assert_equals_dense(LayerCase(SMALL, [50, 20], [40, 3], torch.float32, 16), 1, 1e-5)
