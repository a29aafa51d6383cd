"""Numbers of nvfp4 as Triton computes with them, by integers: GPUs without FP8 have no instructions for them."""

import triton
import triton.language as tl


@triton.jit
def e2m1_numbers(codes):
    """What the lowest four bits of int32 codes stand for."""
    magnitudes = codes & 7
    # From 1 on, two bits of exponent and one of mantissa where float32 has them.
    normal = ((magnitudes << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    numbers = tl.where(magnitudes > 1, normal, magnitudes.to(tl.float32) * 0.5)
    return tl.where((codes & 8) != 0, -numbers, numbers)


@triton.jit
def e2m1_codes(numbers):
    """Codes (int32) of the nearest numbers, of two the smaller one. Magnitudes above 6 become 6."""
    sizes = tl.abs(numbers)
    codes = (sizes > 0.25).to(tl.int32) + (sizes > 0.75).to(tl.int32) + (sizes > 1.25).to(tl.int32)
    codes += (sizes > 1.75).to(tl.int32) + (sizes > 2.5).to(tl.int32) + (sizes > 3.5).to(tl.int32)
    codes += (sizes > 5.0).to(tl.int32)
    return codes + 8 * (numbers < 0).to(tl.int32)


@triton.jit
def e4m3_numbers(codes):
    """What int32 codes without a sign stand for."""
    normal = ((codes << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(codes > 7, normal, codes.to(tl.float32) * 0.001953125)


@triton.jit
def e4m3_codes(numbers):
    """Codes (int32) of the nearest numbers, ties to even. No number is negative or above 448."""
    bits = numbers.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # At 1.5 * 2 ** 23 the next float32 is 1 away: the sum rounds to an integer, to nearest even.
    small = ((numbers * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    return tl.where(numbers < 0.015625, small, normal)
