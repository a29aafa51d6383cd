"""Totals over all steps that an engine has run."""

from dataclasses import dataclass, field

from longhelix.engine.exchanges import ExchangeLog
from longhelix.scheduler.step import StepResult


@dataclass
class Counters:
    """Totals over all finished steps."""

    steps: int = 0
    rows: int = 0
    exchanged_bytes: int = 0  # bytes that all ranks together have sent in exchanges
    network_bytes: int = 0  # bytes that ranks have sent to ranks of other hosts
    exchanges: ExchangeLog = field(default_factory=lambda: ExchangeLog(1))

    def add(self, result: StepResult) -> None:
        self.steps += 1
        self.rows += result.num_tokens
        self.exchanged_bytes += result.measured.exchanged_bytes
        self.network_bytes += result.measured.network_bytes
        if result.num_tokens:
            self.exchanges.add(result.measured)
