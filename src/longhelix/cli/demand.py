"""Options for the lengths and the rate of requests."""

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

_DRAWN = 4096  # number of requests to sample from a mix


@Parameter(name="*", group="Requests")
@dataclass(frozen=True, kw_only=True)
class DemandOptions:
    """Options for the lengths of requests: one of --context, --isl with --osl, --mix and --trace."""

    context: Annotated[Size | None, Parameter(show_default=False)] = None
    "Tokens of KV per request, such as 128k or 1M, for a plan with steady decodes and no arrivals."
    isl: Annotated[Size | None, Parameter(show_default=False)] = None
    "Number of tokens per prompt (input sequence length). Give --osl as well."
    osl: Annotated[Size | None, Parameter(show_default=False)] = None
    "Number of tokens per answer (output sequence length). Give --isl as well."
    mix: Annotated[str | None, Parameter(show_default=False)] = None
    """Mix of request kinds, each WEIGHT:PROMPT:ANSWER with lengths in tokens or WEIGHT:chat, such as
    95%:chat,5%:1M:100-500."""
    trace: Annotated[Path | None, Parameter(show_default=False)] = None
    "Trace file, as for `longhelix simulate`. It gives the lengths, and the rate unless --rate is set."
    rate: Annotated[float | None, Parameter(show_default=False)] = None
    "Requests per second to serve. The plan adds replicas to reach it. [default: what one replica serves]"
    prefix_hit: float = 0.0
    "Fraction of each prompt, from 0 to below 1, that is found in the prefix cache."

    def load(self) -> tuple[int, Demand | None]:
        """Create the demand that the options describe.

        Returns:
            The number of tokens of the longest request, and the demand. The demand is None for steady requests
            (--context).

        Raises:
            UserError: no option or several options give the lengths, or a value is out of range.
        """
        ways = (self.context, self.isl if self.osl is None else self.osl, self.mix, self.trace)
        if sum(way is not None for way in ways) != 1:
            raise UserError(
                "the lengths of requests must be given in exactly one way: set one of --context, --isl with --osl, "
                "--mix and --trace"
            )
        if self.context is not None:
            if self.rate is not None or self.prefix_hit:
                raise UserError(
                    "--rate and --prefix-hit do not apply to --context: set --isl and --osl instead of --context"
                )
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
            raise UserError("--isl and --osl belong together, but only one is set: set both")
        return Demand.of([(self.isl, self.osl)], self.rate, self.prefix_hit)
