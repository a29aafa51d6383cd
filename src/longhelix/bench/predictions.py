"""Predicted beside measured: what a calibrated system says of runs, most of which its constants were not fitted to."""

from collections.abc import Sequence

from longhelix.bench.calibration import Extent, run_of
from longhelix.bench.section import Column, Section
from longhelix.bench.world import Row
from longhelix.layout import Layout
from longhelix.perf.fit import run_seconds
from longhelix.perf.setting import Setting
from longhelix.runner.config import EngineConfig
from longhelix.spec import HardwareSpec

EXTENT = Extent((2048, 4096, 8192, 16384, 32768), 21, (512, 1024, 2048, 4096, 8192), 2, 15, 25)
LAYOUTS = (Layout(), Layout(kvp=2), Layout(tpa=2), Layout(kvp=2, tpa=2), Layout(kvp=4))
COLUMNS = (
    Column("work", "work"),
    Column("tokens", "tokens", ",d"),
    Column("layout", "kvp x tpa"),
    Column("weight_dtype", "weights"),
    Column("kv_dtype", "KV"),
    Column("use", "use"),
    Column("seconds", "measured, ms", ",.2f", 1e3),
    Column("spread", "spread, %", ".0f", 100),
    Column("predicted_s", "predicted, ms", ",.2f", 1e3),
    Column("error", "error, %", "+.1f", 100),
)
NOTE = (
    "decode: one step of one request that holds so many tokens, the model on all ranks and sampling, without scheduler "
    "and sockets. prefill: a prompt of so many tokens in chunks of 512. predicted: by the constants above. use: they "
    "are fitted to the points of use fit, and to nothing of test (other lengths and layouts) or extra (other dtypes)."
)


def predicted(system: HardwareSpec, config: EngineConfig, runs: Sequence[Row], fitted: Extent) -> list[Row]:
    """The runs in the dtypes of `config`, with what the system predicts of each."""
    setting = Setting(config.spec, system, config.weight_dtype, config.kv_dtype)
    own = [run for run in runs if (run["weight_dtype"], run["kv_dtype"]) == (config.weight_dtype, config.kv_dtype)]
    return [
        run | {"predicted_s": seconds, "error": seconds / run["seconds"] - 1, "use": _use(run, fitted)}
        for run, seconds in zip(own, run_seconds(setting, [run_of(run) for run in own]).tolist(), strict=True)
    ]


def _use(run: Row, fitted: Extent) -> str:
    if fitted.fits(run):
        return "fit"
    return "test" if run["weight_dtype"] == run["kv_dtype"] == "bfloat16" else "extra"


def mean_errors(rows: Sequence[Row]) -> dict[str, float]:
    """For each use of points, the mean of their errors' sizes, as a share of what was measured."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["use"], []).append(abs(row["error"]))
    return {use: sum(errors) / len(errors) for use, errors in found.items()}


PRODUCT_COLUMNS = (
    Column("weight_dtype", "weights"),
    Column("rows", "rows", "d"),
    Column("flops_per_s", "GFLOP/s", ",.0f", 1e-9),
)
PRODUCT_NOTE = "The engine's own products with a square weight of 2,048, all threads, dtypes in turn."


def sections(system: HardwareSpec, products: Sequence[Row], rows: Sequence[Row]) -> list[Section]:
    """The constants, rates of products by dtype and size, and the predictions that the constants make."""
    means = ", ".join(f"{mean:.1%} of {use} points" for use, mean in mean_errors(rows).items())
    constants = [
        {"constant": name, "value": value, "source": system.sources[name]} for name, value in system.constants.items()
    ]
    columns = (Column("constant", "constant"), Column("value", "value", ".4g"), Column("source", "source"))
    return [
        Section("constants", "The system local", "Seconds, bytes and operations, each a second.", columns, constants),
        Section("products", "Products", PRODUCT_NOTE, PRODUCT_COLUMNS, products),
        Section("predictions", "Predictions", f"{NOTE} Mean error: {means}.", COLUMNS, rows),
    ]
