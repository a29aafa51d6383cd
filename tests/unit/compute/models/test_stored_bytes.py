"""The bytes of weights: what the table says against what the tensors of a laid out model take."""

import pytest
import torch
from torch import Tensor

from longhelix.compute.kernels import Experts, Weight, native
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.parameters import declare, stored_bytes
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.mesh import Mesh
from longhelix.spec import MLA, MoE, Routing
from longhelix.spec.layout import Layout
from tensors import Tensors
from toy_model import toy_model

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(native.module is None, reason="narrow weights need the native kernels, which are not built"),
]

# Multiples of 32, and 16 rows of the router and the shared gate together: panels and scales without padding.
SIZES = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "head_size": 16,
    "ffn_size": 96,
    "vocab_size": 160,
    "max_positions": 64,
    "dtype": "bfloat16",
}
DENSE = {"qkv_bias": True, "ffn_bias": True, "qk_norm": True}
EXPERTS = MoE(15, 2, 32, shared_size=64, routing=Routing(bias=True, shared_gate=True))
SPECS = {
    "dense": toy_model(**SIZES, **DENSE),
    "tied": toy_model(**SIZES, **DENSE, tied_embeddings=True),
    "experts": toy_model(**SIZES, qkv_bias=True, qk_norm=True, moe=EXPERTS, num_dense_layers=1),
    "latent": toy_model("deepseek_v3", **SIZES, ffn_bias=True, mla=MLA(64, 32, 16, 16, 16)),
}


def tensors(value):
    """All that keeps numbers in an attribute of a module."""
    match value:
        case Tensor():
            yield value
        case Weight():
            yield value.values
        case Experts():
            yield from (weight.values for weight in (*value.gate_up, *value.down))
        case tuple():
            yield from (tensor for each in value if isinstance(each, Experts) for tensor in tensors(each))


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "int8", "int4", "fp8-block", "int4-g128", "nvfp4"])
@pytest.mark.parametrize("name", SPECS)
def test_weights_take_the_bytes_that_the_table_says(name, weight_dtype):
    spec, layout = SPECS[name], Layout()
    parameters = declare(spec, layout, 0)
    weights = Weights(Tensors.of(spec), parameters, torch.bfloat16, weight_dtype, torch.device("cpu"))
    decoder = Decoder(spec, Mesh.build(layout, 0), weights)
    found = [tensor for module in decoder.modules() for value in vars(module).values() for tensor in tensors(value)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
    assert sum(storages.values()) == sum(stored_bytes(spec, layout, 0, "bfloat16", weight_dtype).values())
