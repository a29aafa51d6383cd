"""The native cosines and sines against the reference; tests/unit/compute/models/test_rope.py has exact ones."""

import pytest
import torch

from longhelix.compute.kernels import native
from longhelix.compute.kernels.angles import reference, rotation

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(native.module is None, reason="the native kernels were not built"),
]


@pytest.mark.parametrize("pairs", [1, 7, 32, 64])
@pytest.mark.parametrize("rows", [0, 1, 33, 1000])
def test_they_are_those_of_the_reference(rows, pairs):
    generator = torch.Generator().manual_seed(rows + pairs)
    positions_T = torch.randint(0, 2**31, (rows,), generator=generator) >> torch.randint(0, 30, (rows,))
    own_TR = torch.rand(rows, pairs, generator=generator, dtype=torch.float64)
    own_TR[:, 0] = 1.0
    for frequencies in (own_TR, torch.ones(pairs, dtype=torch.float64) if not rows else own_TR[0]):
        for factor in (1.0, 1.25):
            found = rotation(positions_T, frequencies, factor)
            for own, expected in zip(found, reference(positions_T, frequencies, factor), strict=True):
                assert own.dtype == torch.float32
                # Both are right to far more digits than the float32 that they are rounded to.
                torch.testing.assert_close(own, expected.float(), rtol=2.0**-23, atol=1e-15)


def test_they_are_written_where_they_are_wanted():
    into = torch.full((3, 4), 7.0), torch.full((3, 4), 7.0)
    found = rotation(torch.arange(3), torch.ones(4, dtype=torch.float64), 1.0, into)
    assert found is into
    assert torch.equal(into[0], torch.arange(3).double().cos().float()[:, None].expand(3, 4))
