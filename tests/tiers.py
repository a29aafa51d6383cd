"""Which cases of a test run in CI, where there is time for one of a kind, and which in `make test-all` alone."""

from collections.abc import Iterable
from typing import Any

import pytest


def few(cases: Iterable[Any], count: int = 1) -> list[Any]:
    """Cases for `parametrize`, of which the first `count` run in CI. One that is a tuple has a value for each name."""
    return [case if place < count else _slow(case) for place, case in enumerate(cases)]


def _slow(case: Any) -> Any:
    if isinstance(case, type(pytest.param())):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    return pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.slow)
