"""Options for the requests of a simulation: a trace, or a synthetic workload."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from longhelix.cli.text_file import read_text
from longhelix.cli.values import Flag, Seconds, Size
from longhelix.errors import UserError
from longhelix.scheduler.request import ServiceLevel
from longhelix.simulate.arrival import Arrival, Workload
from longhelix.simulate.synthetic import Synthetic, parse_mix
from longhelix.simulate.trace import read_csv, read_jsonl

_READERS = {".csv": read_csv, ".jsonl": read_jsonl}


@Parameter(name="*", group="Workload")
@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Options that define requests with arrival times and service levels."""

    trace: Path | None = None
    """Trace to simulate: a .csv or .jsonl file with arrival_s, prompt_tokens, output_tokens, and optionally prefix_id,
    prefix_tokens, client, priority, ttft_slo_s, tbt_slo_s, session and think_s. The columns of Azure, BurstGPT, Vidur,
    Mooncake and Bailian traces work as well."""
    synthetic: Flag = False
    "Generate random requests instead of reading a trace."
    requests: Size = 1000
    "Number of requests to generate."
    rate: float = 1.0
    "Average number of arrivals per second."
    arrivals: Literal["poisson", "gamma"] = "poisson"
    "Random process of the arrivals. Use gamma with --burstiness for bursty traffic."
    burstiness: Annotated[float | None, Parameter(show_default=False)] = None
    """Standard deviation of the gaps between gamma arrivals, divided by their mean. Above 1, requests come in bursts.
    [default: 1]"""
    mix: str = "chat"
    """Mix of request kinds, each WEIGHT:PROMPT:ANSWER with lengths in tokens or WEIGHT:chat, such as
    95%:chat,5%:1M-2M:100-500."""
    seed: int = 0
    "Random seed. The same seed generates the same requests."
    ttft_slo: Annotated[Seconds | None, Parameter(show_default=False)] = None
    "Maximum time to first token, such as 10s, for requests without a value in the trace. [default: no target]"
    tbt_slo: Annotated[Seconds | None, Parameter(show_default=False)] = None
    """Maximum time between two tokens, such as 50ms, for 99% of the tokens of a request without a value in the trace.
    [default: no target]"""

    def load(self) -> Workload:
        """Read the trace or create the synthetic workload.

        Raises:
            UserError: the trace cannot be read, or an option is out of range.
        """
        service = ServiceLevel(ttft_slo_s=self.ttft_slo, tbt_slo_s=self.tbt_slo)
        if self.synthetic == (self.trace is not None):
            raise UserError(
                "a workload is either a trace or synthetic: set exactly one of --trace FILE and --synthetic"
            )
        if self.trace is not None:
            return read_trace(self.trace, service)
        if self.burstiness is not None and self.arrivals != "gamma":
            raise UserError(
                "--burstiness applies only to gamma arrivals: set --arrivals gamma, or leave out --burstiness"
            )
        burstiness = 1.0 if self.burstiness is None else self.burstiness
        return Synthetic(
            num_requests=self.requests,
            rate_per_s=self.rate,
            mix=parse_mix(self.mix),
            service=service,
            process=self.arrivals,
            burstiness=burstiness,
            seed=self.seed,
        )


def read_trace(path: Path, service: ServiceLevel) -> list[Arrival]:
    """Read the requests of a trace file. Raises UserError if the file cannot be read."""
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise UserError(
            f"the trace {path} has {f'the suffix {path.suffix}' if path.suffix else 'no suffix'}: give an uncompressed "
            ".csv or .jsonl file"
        )
    try:
        return read(io.StringIO(read_text(path), newline=""), service)
    except csv.Error as error:
        raise UserError(f"the trace {path} is not valid CSV: {error}", "invalid_trace") from error
