"""What models and hardware are: shapes and numbers, read from mappings. Pure."""

from longhelix.spec.cache_entry import CacheEntry
from longhelix.spec.config_fields import unread_fields
from longhelix.spec.family import FAMILIES, PLANNED_FAMILIES
from longhelix.spec.formats import (
    DTYPES,
    FORMATS,
    KV_DTYPES,
    WEIGHT_DTYPES,
    NumberFormat,
    Scales,
    number_format,
    product_dtype,
)
from longhelix.spec.hardware import HardwareSpec, Link
from longhelix.spec.linear import LinearAttention
from longhelix.spec.mla import MLA
from longhelix.spec.model import ModelSpec
from longhelix.spec.moe import MoE
from longhelix.spec.rope import ROPE_KINDS, RopeSpec
from longhelix.spec.sparse import Indexer
from longhelix.spec.vision import VisionSpec

__all__ = [
    "DTYPES",
    "FAMILIES",
    "FORMATS",
    "KV_DTYPES",
    "MLA",
    "PLANNED_FAMILIES",
    "ROPE_KINDS",
    "WEIGHT_DTYPES",
    "CacheEntry",
    "HardwareSpec",
    "Indexer",
    "LinearAttention",
    "Link",
    "MoE",
    "ModelSpec",
    "NumberFormat",
    "RopeSpec",
    "Scales",
    "VisionSpec",
    "number_format",
    "product_dtype",
    "unread_fields",
]
