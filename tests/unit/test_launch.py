"""What the engine makes of its ranks' answers."""

import pytest

from longhelix.engine.launch import _check_same_collectives
from longhelix.errors import EngineError
from longhelix.request import StepResult

pytestmark = pytest.mark.unit


def results(*fingerprints):
    return {rank: StepResult(7, (), 1, 0, fingerprint=number) for rank, number in enumerate(fingerprints)}


def test_ranks_that_ran_other_collectives_are_named():
    _check_same_collectives(results(5, 5, 5))
    with pytest.raises(EngineError, match=r"in step 7 ranks \[1, 3\] ran other collectives than rank 0"):
        _check_same_collectives(results(5, 6, 5, 0))
