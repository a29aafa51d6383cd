"""The packed arrangement of the native kernels' pool, decoded a second time, from its description, in numpy."""

from dataclasses import dataclass

import numpy as np

from longhelix.compute.kernels import KVLayer

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp8": 8, "int8": 8, "int4": 4, "nvfp4": 4}
# Of formats with one scale for a vector:
LARGEST = {"fp8": 448.0, "int8": 127.0, "int4": -8.0}  # the stored number of the largest element of a vector
ROTATED = ("int4", "nvfp4")  # formats whose keys are stored rotated where there are values
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


def nvfp4_codes(raw: np.ndarray, size: int, values: bool) -> np.ndarray:
    """Codes (..., 16 tokens, size) of a tile's bytes (..., X): 128 for each 16 channels, of which each has two codes of
    a token, of channels c (low) and c + 8."""
    token, pair = np.indices((TILE, TILE // 2))
    lane, row = (token % 8 // 4 * 8 + pair, token // 8 * 4 + token % 4) if values else (token, pair)
    at = row // 4 * 64 + lane // 4 * 16 + row % 4 // 2 * 8 + lane % 4 * 2 + row % 2
    bytes_ = raw.reshape(*raw.shape[:-1], size // TILE, 128)[..., at]
    codes = np.concatenate((bytes_ & 15, bytes_ >> 4), axis=-1)
    return np.moveaxis(codes, -3, -2).reshape(*raw.shape[:-1], TILE, size)


def rotated(vectors: np.ndarray) -> np.ndarray:
    """Vectors (..., C) times a Hadamard matrix for each run of as many channels as the largest power of two in C, in
    float32: sums and differences of channels, one step after the other, as the kernels add them."""
    size = vectors.shape[-1] & -vectors.shape[-1]
    found = vectors.astype(np.float32).reshape(*vectors.shape[:-1], vectors.shape[-1] // size, size)
    half = 1
    while half < size:
        low, high = np.moveaxis(found.reshape(*found.shape[:-1], size // (2 * half), 2, half), -2, 0)
        found = np.stack((low + high, low - high), axis=-2).reshape(found.shape)
        half *= 2
    return (found * np.float32(size**-0.5)).reshape(vectors.shape)


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
    if kv_dtype == "nvfp4":
        return np.where(codes & 8, -1, 1) * np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7]
    return codes - 8.0


def int4_scales(vectors: np.ndarray) -> np.ndarray:
    """The bfloat16 scales (3, ..., 1) that vectors (..., C) in float32 may have: the number of the largest magnitude
    over -8, -8.5 and -9."""
    most = np.take_along_axis(vectors, np.abs(vectors).argmax(-1)[..., None], -1)
    quotients = np.stack([most / np.float32(code) for code in (-8, -8.5, -9)]).view(np.uint32)
    return bfloat16_numbers((quotients + 0x7FFF + (quotients >> 16 & 1) >> 16).astype(np.uint16))


def int4_numbers(vectors: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The nearest multiples of the scales from -8 to 7, in float64, before their scales."""
    quotients = np.divide(vectors, scales, out=np.zeros(np.broadcast(vectors, scales).shape), where=scales != 0)
    return np.clip(np.rint(quotients), -8, 7)


@dataclass
class Stored:
    """Bit patterns of a pool: keys and values (P, D, k, C), and the scales of narrow ones (P, D, k), ones elsewhere.

    Those of nvfp4 are (P, D, k, G + 1).
    """

    keys: np.ndarray
    values: np.ndarray
    key_scales: np.ndarray
    value_scales: np.ndarray
    kv_dtype: str

    def decoded(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values in float64."""
        keys, values = numbers(self.keys, self.kv_dtype), numbers(self.values, self.kv_dtype)
        if self.kv_dtype not in LARGEST and self.kv_dtype != "nvfp4":
            return keys, values
        return keys * self.scales(self.key_scales), values * self.scales(self.value_scales)

    def scales(self, codes: np.ndarray) -> np.ndarray:
        """Of each vector, or of nvfp4 of each number."""
        if self.kv_dtype != "nvfp4":
            return bfloat16_numbers(codes).astype(np.float64)[..., None]
        vectors = np.where(codes[..., -1:] == 255, np.nan, 2.0 ** (codes[..., -1:].astype(np.float64) - 127))
        return (fp8_numbers(codes[..., :-1]) * vectors).repeat(TILE, axis=-1)

    def parts(self) -> list[np.ndarray]:
        return [self.keys, self.values, self.key_scales, self.value_scales]


def stored(layer: KVLayer) -> Stored:
    """A tile of 16 tokens: keys [channel][token], values [16 channels][token][channel], key scales, value scales.

    Keys are what is stored of them, rotated in formats of ROTATED where there are values.
    """
    format = layer.format
    raw = layer.values.numpy().swapaxes(0, 1)  # heads are outermost
    lead = raw.shape[:3]

    def by_token(part: np.ndarray) -> np.ndarray:  # (P, k, tiles, 16, ...) to (P, D, k, ...)
        return np.moveaxis(part, 1, 3).reshape(lead[0], -1, lead[1], *part.shape[4:])

    panel_bytes = TILE * TILE * BITS[format.dtype] // 8
    key_bytes = panel_bytes * format.key_size // TILE
    value_bytes = 0 if format.shared_values else panel_bytes * format.value_size // TILE
    if format.dtype == "nvfp4":
        return _stored_nvfp4(raw, format, key_bytes, value_bytes, by_token)
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


def _stored_nvfp4(raw, format, key_bytes: int, value_bytes: int, by_token) -> Stored:
    def scales(first: int, size: int) -> np.ndarray:
        rows = raw[..., first : first + size + TILE].reshape(*raw.shape[:3], -1, TILE)
        return by_token(rows.swapaxes(-1, -2))

    key_scales_at = key_bytes + value_bytes
    keys = by_token(nvfp4_codes(raw[..., :key_bytes], format.key_size, values=False))
    key_scales = scales(key_scales_at, format.key_size)
    if format.shared_values:
        assert raw.shape[-1] == key_scales_at + format.key_size + TILE
        shared_scales = np.concatenate((key_scales[..., : format.value_size // TILE], key_scales[..., -1:]), axis=-1)
        return Stored(keys, keys[..., : format.value_size], key_scales, shared_scales, format.dtype)
    values = by_token(nvfp4_codes(raw[..., key_bytes:key_scales_at], format.value_size, values=True))
    value_scales = scales(key_scales_at + format.key_size + TILE, format.value_size)
    return Stored(keys, values, key_scales, value_scales, format.dtype)
