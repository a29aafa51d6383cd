"""Compares the predictions for a calibrated system with measurements.

Most of these measurements were not used to fit constants.
"""

from collections.abc import Sequence

from longhelix.compute.runner.config import EngineConfig
from longhelix.measure.bench.section import Column, Section
from longhelix.measure.calibrate.measurements import CalibrationScope, Measurements, measured_request
from longhelix.measure.world import Row
from longhelix.perf.fit import request_seconds
from longhelix.perf.setting import Dtypes, Setting
from longhelix.spec import HardwareSpec
from longhelix.spec.layout import Layout

SCOPE = CalibrationScope(
    contexts=(2048, 4096, 8192, 16384, 32768),
    decode_repeats=21,
    prompts=(512, 1024, 2048, 4096, 8192),
    prefill_repeats=2,
    machine_repeats=15,
    collective_repeats=25,
)
LAYOUTS = (Layout(), Layout(kvp=2), Layout(tpa=2), Layout(kvp=2, tpa=2), Layout(kvp=4))
COLUMNS = (
    Column("work", "work"),
    Column("tokens", "tokens", ",d"),
    Column("layout", "kvp x tpa"),
    Column("weight_dtype", "weights"),
    Column("kv_dtype", "KV"),
    Column("use", "used for"),
    Column("seconds", "measured, ms", ",.2f", 1e3),
    Column("spread", "spread, %", ".0f", 100),
    Column("predicted_s", "predicted, ms", ",.2f", 1e3),
    Column("error", "error, %", "+.1f", 100),
)
NOTE = (
    "decode: one step of one request with this number of tokens. It includes the model on all ranks and sampling, but "
    "not the scheduler and sockets. prefill: a prompt of this number of tokens in chunks of 512. predicted: time that "
    "the performance model predicts with the constants above. used for: the constants are fitted only to the points "
    "with `fit`. Points with `test` have other lengths or layouts, and points with `extra` have other dtypes."
)


def predicted(
    system: HardwareSpec, config: EngineConfig, requests: Sequence[Row], fitted: CalibrationScope
) -> list[Row]:
    """Return rows for the requests in the dtypes of `config`, with the predicted time, its error, and the use."""
    setting = Setting(config.spec, system, Dtypes(config.formats.product_dtype, config.formats.kv_dtype, packed=True))
    dtypes = config.formats.weight_dtype, config.formats.kv_dtype
    own = [row for row in requests if (row["weight_dtype"], row["kv_dtype"]) == dtypes]
    predictions_s = request_seconds(setting, [measured_request(row) for row in own]).tolist()
    return [
        row | {"predicted_s": seconds, "error": seconds / row["seconds"] - 1, "use": _use(row, fitted)}
        for row, seconds in zip(own, predictions_s, strict=True)
    ]


def _use(row: Row, fitted: CalibrationScope) -> str:
    if fitted.includes(row):
        return "fit"
    return "test" if row["weight_dtype"] == row["kv_dtype"] == "bfloat16" else "extra"


def mean_errors(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean absolute error for each use of points, as a fraction of the measured time."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["use"], []).append(abs(row["error"]))
    return {use: sum(errors) / len(errors) for use, errors in found.items()}


PRODUCT_COLUMNS = (
    Column("weight_dtype", "weights"),
    Column("rows", "rows", "d"),
    Column("flops_per_s", "GFLOP/s", ",.0f", 1e-9),
)
PRODUCT_NOTE = (
    "The engine's matrix products with a weight of 2,048 x 2,048 on all threads. The dtypes are measured in turn."
)


def sections(
    system: HardwareSpec, measured: Measurements, configs: Sequence[EngineConfig], fitted: CalibrationScope
) -> list[Section]:
    """Create the tables of constants, products and predictions.

    Args:
        system: the calibrated system.
        measured: measurements of the system.
        configs: configurations with the dtypes of the predicted requests.
        fitted: scope of the requests to which the constants are fitted.
    """
    rows = [row for config in configs for row in predicted(system, config, measured.requests, fitted)]
    means = ", ".join(f"{mean:.1%} for `{use}` points" for use, mean in mean_errors(rows).items())
    constants = [
        {"constant": name, "value": value, "source": system.sources[name]} for name, value in system.constants.items()
    ]
    columns = (Column("constant", "constant"), Column("value", "value", ".4g"), Column("source", "source"))
    return [
        Section(
            name="constants",
            title="Constants of the system local",
            note="Times are in seconds, and rates are per second.",
            columns=columns,
            rows=constants,
        ),
        Section(
            name="products",
            title="Matrix products",
            note=PRODUCT_NOTE,
            columns=PRODUCT_COLUMNS,
            rows=measured.products,
        ),
        Section(
            name="predictions",
            title="Predicted and measured times",
            note=f"{NOTE} Mean absolute error: {means}.",
            columns=COLUMNS,
            rows=rows,
        ),
    ]
