"""Medha's table of strategies: what each one parallelises, by the model, and what it allows, by the paper's text."""

from longhelix.figures.claims import Table
from longhelix.figures.tied import TiedDeployment
from longhelix.perf.setting import Setting

_CHUNK = 4096
_CONTEXT = 4e6


def strategies(setting: Setting) -> Table:
    """Speed-ups from one unit of GPUs to four, of a prefill and of a decode of 4M tokens."""
    one = TiedDeployment(setting)
    ring_s = TiedDeployment(setting, stages=4).striped_s(_CONTEXT)
    ring_one_s = one.striped_s(_CONTEXT)
    rows: tuple[tuple[str | float, ...], ...] = (
        (
            "TP inside a server, 2 to 8 GPUs",
            *_gains(TiedDeployment(setting, tp=2), TiedDeployment(setting, tp=8)),
            "yes",
            "chunk",
        ),
        ("TP across servers, 8 to 32 GPUs", *_gains(one, TiedDeployment(setting, tp=32)), "yes", "chunk"),
        ("PP with micro-batches, 1 to 4 servers", 1.0, one.decode_s(_CONTEXT) / _stages(setting), "yes", "chunk"),
        ("striped attention, 1 to 4 servers", ring_one_s / ring_s, "none", "no", "never"),
        ("SPP, 1 to 4 servers", *_gains(one, TiedDeployment(setting, stages=4)), "yes", "chunk"),
        ("KVP, 1 to 4 servers", *_gains(one, TiedDeployment(setting, kvp=4)), "yes", "chunk"),
        ("SPP 4 x KVP 4, 1 to 16 servers", *_gains(one, TiedDeployment(setting, stages=4, kvp=4)), "yes", "chunk"),
    )
    return Table(
        "strategies",
        "Table 1: what each strategy parallelises (speed-up with so many more GPUs, 8B, 4M tokens)",
        ("strategy", "prefill (x)", "decode (x)", "batches with others", "preempted at the end of a"),
        rows,
        "Speed-ups are the model's, with chunks of 4096; the last two columns are the paper's text (sections 2.3 to "
        "4.5). PP without chunks in flight together does not shorten one request's prefill; ring attention has no form "
        "for decode. TP across servers divides a long prompt's attention, but not a decode's: it duplicates KV heads.",
    )


def _gains(few: TiedDeployment, many: TiedDeployment) -> tuple[float, float]:
    """Prefill's and decode's."""
    prefill = few.prefill_s(_CONTEXT, _CHUNK) / many.prefill_s(_CONTEXT, _CHUNK)
    return prefill, few.decode_s(_CONTEXT) / many.decode_s(_CONTEXT)


def _stages(setting: Setting) -> float:
    return TiedDeployment(setting, stages=4).decode_s(_CONTEXT)
