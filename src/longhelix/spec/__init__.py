"""What models and hardware are: shapes and numbers, read from mappings. Pure."""

from longhelix.spec.attention import (
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    Projections,
    Scores,
    Visibility,
)
from longhelix.spec.cache_entry import CacheEntry
from longhelix.spec.config_fields import unread_fields
from longhelix.spec.families import FAMILIES
from longhelix.spec.ffn import MLP, Activation
from longhelix.spec.formats import (
    ACTIVATION_DTYPES,
    DTYPES,
    FORMATS,
    KV_DTYPES,
    NL4_VALUES,
    WEIGHT_DTYPES,
    Codes,
    NumberFormat,
    Scales,
    number_format,
    product_dtype,
)
from longhelix.spec.gguf_metadata import read_gguf
from longhelix.spec.gguf_quantisation import gguf_quantisation
from longhelix.spec.hardware import HardwareSpec, Link
from longhelix.spec.hf_config import read_hf_config
from longhelix.spec.layer import LayerSpec
from longhelix.spec.linear import LinearAttention
from longhelix.spec.mla import MLA
from longhelix.spec.model import ModelSpec
from longhelix.spec.moe import MoE, Routing
from longhelix.spec.norms import HeadNorms, Norms
from longhelix.spec.rope import ROPE_KINDS, RopeSpec
from longhelix.spec.sparse import Indexer
from longhelix.spec.vision import VisionSpec

__all__ = [
    "ACTIVATION_DTYPES",
    "DTYPES",
    "FAMILIES",
    "FORMATS",
    "KV_DTYPES",
    "MLA",
    "MLP",
    "NL4_VALUES",
    "ROPE_KINDS",
    "WEIGHT_DTYPES",
    "Activation",
    "CacheEntry",
    "Codes",
    "GroupedQueryAttention",
    "HardwareSpec",
    "HeadNorms",
    "Indexer",
    "LayerSpec",
    "LinearAttention",
    "Link",
    "MoE",
    "ModelSpec",
    "MultiHeadLatentAttention",
    "Norms",
    "NumberFormat",
    "Projections",
    "RopeSpec",
    "Routing",
    "Scales",
    "Scores",
    "Visibility",
    "VisionSpec",
    "gguf_quantisation",
    "number_format",
    "product_dtype",
    "read_gguf",
    "read_hf_config",
    "unread_fields",
]
