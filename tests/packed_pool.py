"""The packed arrangement of the native kernels' pool, decoded a second time, from its description, in numpy."""

from dataclasses import dataclass

import numpy as np

from longhelix.compute.kernels import KVLayer

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4}
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": 7.0}  # the stored number of the largest element of a vector
TILE = 16


def panel_codes(raw: np.ndarray, rows: int, kv_dtype: str, fours: bool = True) -> np.ndarray:
    """Bit patterns (..., rows, 16 lanes) of a panel's bytes (..., X). `fours`: integers lie in fours of rows, as in the
    pool; in weights they lie as fp8 does."""
    row, lane = np.indices((rows, TILE))
    unit, position = row // 2, row % 2
    if BITS[kv_dtype] <= 8:
        per_line = 64 * 8 // (TILE * BITS[kv_dtype])  # rows in 64 bytes, of which int4 has the last in high nibbles
        in_bytes, high = row % per_line % 4, row % per_line >= 4
        pair = lane // 4 * 16 + in_bytes // 2 * 8 + lane % 4 * 2 + position
        codes = raw[..., row // per_line * 64 + (lane * 4 + in_bytes if fours and kv_dtype != "fp8" else pair)]
        return np.where(high, codes >> 4, codes & 15) if kv_dtype == "int4" else codes
    at = {
        "float32": row * 64 + lane * 4,
        "float16": row * 32 + lane * 2,
        "bfloat16": unit * 64 + lane * 4 + position * 2,
    }
    parts = [raw[..., at[kv_dtype] + i].astype(np.uint32) << 8 * i for i in range(BITS[kv_dtype] // 8)]
    return sum(parts).astype(np.uint32 if kv_dtype == "float32" else np.uint16)


def bfloat16_numbers(codes: np.ndarray) -> np.ndarray:
    return (codes.astype(np.uint32) << 16).view(np.float32)


def fp8_numbers(codes: np.ndarray) -> np.ndarray:
    """e4m3 of the Open Compute Project: bias 7, NaN is all ones, no infinity."""
    exponent, fraction = (codes >> 3 & 15).astype(np.float64), (codes & 7).astype(np.float64)
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.where(codes & 128, -1, 1) * np.where(codes & 127 == 127, np.nan, size)


def numbers(codes: np.ndarray, kv_dtype: str) -> np.ndarray:
    """What bit patterns stand for, before their scale; float64."""
    if kv_dtype in ("float32", "float16"):
        return codes.view(kv_dtype).astype(np.float64)
    if kv_dtype == "bfloat16":
        return bfloat16_numbers(codes).astype(np.float64)
    if kv_dtype == "fp8":
        return fp8_numbers(codes)
    if kv_dtype == "int8":
        return codes.view(np.int8).astype(np.float64)
    return codes - 8.0


@dataclass
class Stored:
    """Bit patterns of a pool: keys and values (P, D, k, C), and the scales of narrow ones (P, D, k), ones elsewhere."""

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray
    value_scales: np.ndarray
    kv_dtype: str

    def decoded(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values in float64."""
        keys, values = numbers(self.keys, self.kv_dtype), numbers(self.values, self.kv_dtype)
        if self.kv_dtype not in LARGEST:
            return keys, values
        return keys * self.scales(self.key_scales), values * self.scales(self.value_scales)

    @staticmethod
    def scales(codes: np.ndarray) -> np.ndarray:
        return bfloat16_numbers(codes).astype(np.float64)[..., None]

    def parts(self) -> list[np.ndarray]:
        return [self.keys, self.values, self.key_scales, self.value_scales]


def stored(layer: KVLayer) -> Stored:
    """A tile of 16 tokens: keys [channel][token], values [16 channels][token][channel], key scales, value scales."""
    format = layer.format
    raw = layer.values.numpy().swapaxes(0, 1)  # heads are outermost
    lead = raw.shape[:3]

    def by_token(part: np.ndarray) -> np.ndarray:  # (P, k, tiles, 16, ...) to (P, D, k, ...)
        return np.moveaxis(part, 1, 3).reshape(lead[0], -1, lead[1], *part.shape[4:])

    panel_bytes = TILE * TILE * BITS[format.dtype] // 8
    key_bytes = panel_bytes * format.key_size // TILE
    value_bytes = 0 if format.shared_values else panel_bytes * format.value_size // TILE
    key_codes = panel_codes(raw[..., :key_bytes], format.key_size, format.dtype)
    keys = by_token(key_codes.swapaxes(-1, -2))
    values = keys[..., : format.value_size]
    if not format.shared_values:
        panels = raw[..., key_bytes : key_bytes + value_bytes].reshape(*lead, -1, panel_bytes)
        values = by_token(panel_codes(panels, TILE, format.dtype).swapaxes(3, 4).reshape(*lead, TILE, -1))
    rest = raw[..., key_bytes + value_bytes :]
    if format.dtype not in LARGEST:
        assert rest.shape[-1] == 0
        ones = np.zeros(keys.shape[:-1], np.uint16)
        return Stored(keys, values, ones, ones, format.dtype)
    scales = np.ascontiguousarray(rest).view(np.uint16).reshape(*lead, 2, TILE)
    return Stored(keys, values, by_token(scales[..., 0, :]), by_token(scales[..., 1, :]), format.dtype)
