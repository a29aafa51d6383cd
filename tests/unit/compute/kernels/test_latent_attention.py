"""The kernel of latents for Hopper GPUs, as far as it can be looked at without one. test_triton.py runs it."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed; it comes with torch for CUDA")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from longhelix.compute.kernels.triton import latent_attention

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("split_tokens", [0, 4096])
def test_hoppers_kernel_of_latents_compiles_and_fits(split_tokens):
    """It cannot be interpreted; its compiler needs no GPU."""
    kernel = latent_attention.attend
    given = {
        "q_ptr": "*bf16",
        "latents": f"tensordesc<bf16[16, 64],{latent_attention.LAYOUT!r}>",
        "out_ptr": "*fp32" if split_tokens else "*bf16",
        "lse_ptr": "*fp32",
        "scale_log2": "fp32",
    }
    constants = {"LEAST_ROWS": 1, "MOST_ROWS": 16, "SPLIT": split_tokens, "D": 16, "Q": 128}
    signature = {}
    for name in kernel.arg_names:
        other = "constexpr" if name in constants else "*i64" if name.endswith("_ptr") else "i32"
        signature[name] = given.get(name, other)
    source = GluonASTSource(kernel, signature, {(kernel.arg_names.index(name),): constants[name] for name in constants})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert compiled.metadata.shared <= 227 * 1024
    assert compiled.metadata.num_warps == 12  # two groups that compute, and one that loads
