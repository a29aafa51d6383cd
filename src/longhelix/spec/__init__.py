"""What models and hardware are: shapes and numbers, read from mappings. Pure."""

from longhelix.spec.dtypes import BYTES, DTYPES, KV_DTYPES, WEIGHT_DTYPES, weight_bytes
from longhelix.spec.hardware import HardwareSpec, Link
from longhelix.spec.mla import MLA
from longhelix.spec.model import ARCHITECTURES, ModelSpec
from longhelix.spec.moe import MoE
from longhelix.spec.rope import ROPE_KINDS, RopeSpec

__all__ = [
    "ARCHITECTURES",
    "BYTES",
    "DTYPES",
    "KV_DTYPES",
    "MLA",
    "ROPE_KINDS",
    "WEIGHT_DTYPES",
    "HardwareSpec",
    "Link",
    "MoE",
    "ModelSpec",
    "RopeSpec",
    "weight_bytes",
]
