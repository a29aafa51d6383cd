"""The package's own asserts, which `make test-optimized` leaves out."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def fails_an_assert(match: str | None = None) -> Iterator[None]:
    """What is inside fails one."""
    if not __debug__:
        pytest.skip("the package runs without its asserts here, of which this asks one")
    with pytest.raises(AssertionError, match=match):
        yield
