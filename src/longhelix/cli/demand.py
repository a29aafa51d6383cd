"""Options that say how long requests are, and how many come."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from longhelix.cli.values import Size
from longhelix.cli.workload import read_trace
from longhelix.errors import UserError
from longhelix.plan.demand import Demand
from longhelix.scheduler.request import ANY_SERVICE
from longhelix.simulate.synthetic import Synthetic, parse_mix

_DRAWN = 4096  # requests of a mix


@Parameter(name="*", group="Requests")
@dataclass(frozen=True, kw_only=True)
class DemandOptions:
    """How long requests are: one of --context, --isl with --osl, --mix and --trace."""

    context: Annotated[Size | None, Parameter(show_default=False)] = None
    "Tokens of each request's KV, such as 128k or 1M: of requests that are there for ever."
    isl: Annotated[Size | None, Parameter(show_default=False)] = None
    "Tokens of a prompt."
    osl: Annotated[Size | None, Parameter(show_default=False)] = None
    "Tokens of an answer."
    mix: Annotated[str | None, Parameter(show_default=False)] = None
    "Kinds of requests, WEIGHT:PROMPT:ANSWER with lengths in tokens, or WEIGHT:chat: 95%:chat,5%:1M:100-500."
    trace: Annotated[Path | None, Parameter(show_default=False)] = None
    "A file of requests, as `simulate` reads it: their lengths, and their rate where --rate is not set."
    rate: Annotated[float | None, Parameter(show_default=False)] = None
    "Requests a second, which as many replicas as it takes serve. [default: as many as one layout serves]"
    prefix_hit: float = 0.0
    "The share of every prompt whose KV is there before it comes."

    def load(self) -> tuple[int, Demand | None]:
        """Tokens of the longest request, and the demand; None for requests that are there for ever.

        Raises UserError for lengths that are told in several ways or in none, and for what is out of range.
        """
        told = (self.context, self.isl if self.osl is None else self.osl, self.mix, self.trace)
        if sum(way is not None for way in told) != 1:
            raise UserError("requests have lengths: set one of --context, --isl with --osl, --mix and --trace")
        if self.context is not None:
            if self.rate is not None or self.prefix_hit:
                raise UserError("--rate and --prefix-hit are of requests that end: set --isl and --osl, not --context")
            return self.context, None
        demand = self._demand()
        return demand.longest, demand

    def _demand(self) -> Demand:
        if self.trace is not None:
            arrivals = list(read_trace(self.trace, ANY_SERVICE))
            lengths = [(each.prompt_tokens, each.output_tokens) for each in arrivals]
            took_s = arrivals[-1].arrival_s - arrivals[0].arrival_s
            rate = self.rate if self.rate is not None or not took_s else (len(arrivals) - 1) / took_s
            return Demand.of(lengths, rate, self.prefix_hit)
        if self.mix is not None:
            drawn = Synthetic(_DRAWN, 1.0, parse_mix(self.mix), ANY_SERVICE)
            return Demand.of([(each.prompt_tokens, each.output_tokens) for each in drawn], self.rate, self.prefix_hit)
        if self.isl is None or self.osl is None:
            raise UserError("a request has a prompt and an answer: set both --isl and --osl")
        return Demand.of([(self.isl, self.osl)], self.rate, self.prefix_hit)
