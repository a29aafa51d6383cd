"""Sequence parallelism for graphs of torch.compile, for any module with functional collectives. Needs torch alone."""

from longhelix.passes.agreement import RanksDifferError
from longhelix.passes.counts import Report, report
from longhelix.passes.scales import Calibration
from longhelix.passes.sequence_parallel import SequenceParallel

__all__ = ["Calibration", "RanksDifferError", "Report", "SequenceParallel", "report"]
