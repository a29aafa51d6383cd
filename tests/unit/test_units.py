"""Numbers with units, as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.cli.values import parse_size
from longhelix.units import count, digits, duration, size

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0"), (999, "999"), (9000, "9,000"), (10_000, "10K"), (256_000, "256K"), (131_072, "131,072"),
     (1_000_000, "1M"), (1_500_000, "1.5M"), (1_501_000, "1,501K"), (12_000_000, "12M")],
)  # fmt: skip
def test_counts(number, words):
    assert count(number) == words


@given(st.integers(0, 10**12))
def test_a_count_is_read_back_as_the_same_number(number):
    assert parse_size(count(number).replace(",", "")) == number


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 KB"), (35_640, "35.6 KB"), (999_600, "1 MB"),
     (302_277_888, "302 MB"), (1.3e12, "1.3 TB")],
)  # fmt: skip
def test_sizes(value, words):
    assert size(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "0 us"), (2.5e-5, "25 us"), (0.0094, "9.4 ms"), (0.9996, "1 s"), (52.71, "52.7 s"), (12_345, "12,345 s")],
)
def test_durations(seconds, words):
    assert duration(seconds) == words


@given(st.floats(1e-3, 1e9))
def test_three_digits_are_within_half_a_percent(number):
    assert float(digits(number).replace(",", "")) == pytest.approx(number, rel=5e-3)
