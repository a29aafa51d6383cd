"""The length up to which a request's KV stays on one KVP rank (placement "auto")."""

from longhelix.perf.layouts import Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.step import decode_seconds
from longhelix.spec.layout import Layout

# What a request may lose of its own speed, alone on the machine, for ranks that need not compute or send for it.
_LOSS = 0.05


def local_threshold_tokens(setting: Setting, layout: Layout, longest_tokens: int) -> int:
    """The longest request, at most `longest_tokens`, that loses no more than _LOSS by staying on one rank.

    Measured by a decode step of that request alone, where spreading helps most: S tokens on one rank are as much
    attention as KVP * S over all of them. Beside other requests, each on its own rank, it loses nothing. Windows count
    for nothing.
    """
    alone, spread = setting.as_scheduled(even=False), setting.as_scheduled(even=True)
    layouts = Layouts.of([layout], hop_b=False)

    def loses_little(tokens: int) -> bool:
        alone_s = decode_seconds(alone, layouts, 1.0, float(layout.kvp * tokens))
        spread_s = decode_seconds(spread, layouts, 1.0, float(tokens))
        return bool(alone_s[0] <= (1 + _LOSS) * spread_s[0])

    low, high = 0, longest_tokens
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if loses_little(middle) else (low, middle - 1)
    return low
