"""Create Medha's table of strategies. Speed-ups come from the model, and other properties from the paper's text."""

from longhelix.figures.claims import Table
from longhelix.figures.tied import TiedDeployment
from longhelix.perf.setting import Setting

_CHUNK = 4096
_CONTEXT = 4e6


def strategies(setting: Setting) -> Table:
    """Return a table of strategies and the speed-ups of prefill and decode at 4M tokens with more GPUs."""
    one = TiedDeployment(setting)
    ring_s = TiedDeployment(setting, stages=4).striped_s(_CONTEXT)
    ring_one_s = one.striped_s(_CONTEXT)
    rows: tuple[tuple[str | float, ...], ...] = (
        (
            "TP inside a server, 2 to 8 GPUs",
            *_gains(TiedDeployment(setting, tp=2), TiedDeployment(setting, tp=8)),
            "yes",
            "after each chunk",
        ),
        ("TP across servers, 8 to 32 GPUs", *_gains(one, TiedDeployment(setting, tp=32)), "yes", "after each chunk"),
        (
            "PP with micro-batches, 1 to 4 servers",
            1.0,
            one.decode_s(_CONTEXT) / _stages(setting),
            "yes",
            "after each chunk",
        ),
        ("striped attention, 1 to 4 servers", ring_one_s / ring_s, "none", "no", "never"),
        ("SPP, 1 to 4 servers", *_gains(one, TiedDeployment(setting, stages=4)), "yes", "after each chunk"),
        ("KVP, 1 to 4 servers", *_gains(one, TiedDeployment(setting, kvp=4)), "yes", "after each chunk"),
        (
            "SPP 4 x KVP 4, 1 to 16 servers",
            *_gains(one, TiedDeployment(setting, stages=4, kvp=4)),
            "yes",
            "after each chunk",
        ),
    )
    return Table(
        name="strategies",
        title="Table 1: speed-up of each strategy with more GPUs (8B, 4M tokens)",
        columns=("strategy", "prefill (x)", "decode (x)", "can batch several requests", "can be preempted"),
        rows=rows,
        note="The speed-ups come from the model, with chunks of 4096. The last two columns come from the paper's text "
        "(sections 2.3 to 4.5). PP with only one chunk in flight does not shorten the prefill of a request. Ring "
        "attention does not apply to decode. TP across servers speeds up attention in the prefill of a long prompt. It "
        "does not speed up attention in decode, because it replicates KV heads.",
    )


def _gains(few: TiedDeployment, many: TiedDeployment) -> tuple[float, float]:
    """Return the speed-ups of prefill and decode."""
    prefill = few.prefill_s(_CONTEXT, _CHUNK) / many.prefill_s(_CONTEXT, _CHUNK)
    return prefill, few.decode_s(_CONTEXT) / many.decode_s(_CONTEXT)


def _stages(setting: Setting) -> float:
    return TiedDeployment(setting, stages=4).decode_s(_CONTEXT)
