"""Number formats: their names, which of them the engine runs, and the bytes that they take."""

from collections.abc import Mapping

DTYPES = ("float32", "bfloat16", "float16")
WEIGHT_DTYPES = (*DTYPES, "int8", "int4")
KV_DTYPES = (*DTYPES, "fp8", "int8", "int4")

# Bytes of one number, its share of a scale not counted. fp4 can be planned with, not run.
BYTES: Mapping[str, float] = {
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "fp8": 1.0,
    "int8": 1.0,
    "int4": 0.5,
    "fp4": 0.5,
}


def weight_bytes(num_elements: int, dtype: str) -> int:
    """Bytes of a product's weights in the engine; narrow ones have a float16 scale and offset for every 32."""
    scale_bits = 0 if dtype in DTYPES else 1
    return num_elements * (int(8 * BYTES[dtype]) + scale_bits) // 8
