"""Sequence-parallel pass for torch.compile.

The pass works on any module that uses functional collectives. This package imports nothing else from longhelix.
"""

from longhelix.passes.agreement import RanksDifferError
from longhelix.passes.counts import Report, report
from longhelix.passes.scales import Calibration
from longhelix.passes.sequence_parallel import SequenceParallel

__all__ = ["Calibration", "RanksDifferError", "Report", "SequenceParallel", "report"]
