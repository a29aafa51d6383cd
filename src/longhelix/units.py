"""Numbers with units as people read them: token counts, bytes and times with three digits."""

_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB"))
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def count(number: int) -> str:
    """Return a number of tokens, such as "256K", "1.5M" or "8,192". K is 1,000, as on the command line."""
    if number >= 10**6 and number % 10**5 == 0:
        return f"{number / 10**6:,.1f}".removesuffix(".0") + "M"
    if number >= 10**4 and number % 10**3 == 0:
        return f"{number // 10**3:,}K"
    return f"{number:,}"


def size(num_bytes: float) -> str:
    """Return a number of bytes, such as "14.7 GB"."""
    for unit, name in _SIZES:
        if num_bytes >= 0.9995 * unit:
            return f"{digits(num_bytes / unit)} {name}"
    return f"{num_bytes:.0f} bytes"


def duration(seconds: float) -> str:
    """Return a time, such as "49.1 ms"."""
    for unit, name in _TIMES:
        if seconds >= 0.9995 * unit:
            return f"{digits(seconds / unit)} {name}"
    return f"{digits(seconds / 1e-6)} us"


def digits(number: float) -> str:
    """Return a number with three digits, or with all digits before the point if these are more."""
    return f"{number:,.0f}" if abs(number) >= 999.5 else f"{number:.3g}"
