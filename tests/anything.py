"""Values of any type, as users may give them: what hypothesis draws where input is fuzzed."""

import math

import numpy as np
import torch
from hypothesis import strategies as st


class Odd:
    """An object on which everything fails."""

    def __repr__(self):
        raise RuntimeError

    __index__ = __float__ = __len__ = __iter__ = __eq__ = __repr__
    __hash__ = None


class Text(str):
    """A string that is none of Python's own."""


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3),
    st.sampled_from(
        [10**20, -(10**20), 2**31, 2**63, 2**64, 10**5000, True, 1e-300, 5e-324, 1e300, math.inf, math.nan]
    ),
    st.floats(),
    st.text(max_size=5),
    st.text(st.characters(categories=["Cs"]), min_size=1, max_size=2),
    st.binary(max_size=5),
    st.fractions(),
    st.complex_numbers(),
    st.sampled_from(
        [
            np.int64(3),
            np.uint8(200),
            np.float32(0.5),
            np.bool_(True),
            np.str_("x"),
            Text("float32"),
            np.array([1, 2]),
            torch.tensor(4),
            torch.ones(2, dtype=torch.bfloat16),
            torch.ones(2, requires_grad=True),
            torch.ones(2, device="meta"),
        ]
    ),
    st.builds(Odd),
    st.just(range(10**12)),
    st.just(range(10**20)),
)
VALUES = st.one_of(ANYTHING, st.lists(ANYTHING, max_size=3), st.lists(ANYTHING, max_size=3).map(tuple),
                   st.dictionaries(st.text(max_size=2), ANYTHING, max_size=2))  # fmt: skip
