"""Options that say which requests arrive, and when."""

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
    """Which requests arrive when, and how soon they want their tokens."""

    trace: Path | None = None
    """A .csv or .jsonl file of requests with arrival_s, prompt_tokens, output_tokens, and optionally prefix_id,
    prefix_tokens, client, priority, ttft_slo_s, tbt_slo_s, session, think_s. It can also have the columns of Azure,
    BurstGPT, Vidur, Mooncake or Bailian."""
    synthetic: Flag = False
    "Draw requests in place of a trace."
    requests: Size = 1000
    "How many are drawn."
    rate: float = 1.0
    "How many arrive in a second, on average."
    arrivals: Literal["poisson", "gamma"] = "poisson"
    "By which process."
    burstiness: Annotated[float | None, Parameter(show_default=False)] = None
    "With gamma arrivals: the standard deviation of the gaps over their mean; above 1 requests come in bursts."
    mix: str = "chat"
    "Kinds of requests, WEIGHT:PROMPT:ANSWER with lengths in tokens, or WEIGHT:chat: 95%:chat,5%:1M-2M:100-500."
    seed: int = 0
    "The same seed draws the same requests."
    ttft_slo: Annotated[Seconds | None, Parameter(show_default=False)] = None
    "The most time to a request's first token, such as 10s, where the trace does not say."
    tbt_slo: Annotated[Seconds | None, Parameter(show_default=False)] = None
    "The most time from token to token, such as 50ms, which 99% of a request's tokens are to keep."

    def load(self) -> Workload:
        """Raises UserError for a trace that cannot be read, and for numbers that no workload can have."""
        service = ServiceLevel(ttft_slo_s=self.ttft_slo, tbt_slo_s=self.tbt_slo)
        if self.synthetic == (self.trace is not None):
            raise UserError("set either --trace FILE or --synthetic")
        if self.trace is not None:
            return read_trace(self.trace, service)
        if self.burstiness is not None and self.arrivals != "gamma":
            raise UserError("--burstiness is of gamma arrivals: set --arrivals gamma, or leave it out")
        burstiness = 1.0 if self.burstiness is None else self.burstiness
        return Synthetic(
            self.requests, self.rate, parse_mix(self.mix), service, self.arrivals, burstiness, self.seed
        )  # fmt: skip


def read_trace(path: Path, service: ServiceLevel) -> list[Arrival]:
    """The requests of a file. Raises UserError for one that cannot be read."""
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise UserError(f"{path} ends in {path.suffix or 'no suffix'}: give a .csv or .jsonl file, unpacked")
    try:
        return read(io.StringIO(read_text(path), newline=""), service)
    except csv.Error as error:
        raise UserError(f"{path} is not CSV: {error}", "invalid_trace") from error
