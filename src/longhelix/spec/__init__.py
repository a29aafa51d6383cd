"""What models and hardware are: shapes and numbers, read from mappings. Pure."""

from longhelix.spec.dtypes import BYTES, DTYPES, KV_DTYPES, WEIGHT_DTYPES, weight_bytes
from longhelix.spec.family import FAMILIES
from longhelix.spec.hardware import HardwareSpec, Link
from longhelix.spec.mla import MLA
from longhelix.spec.model import ModelSpec
from longhelix.spec.moe import MoE
from longhelix.spec.rope import ROPE_KINDS, RopeSpec

__all__ = [
    "BYTES",
    "DTYPES",
    "FAMILIES",
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
