"""Positions of tokens by axis, against transformers' for whole prompts, and cut anywhere."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from longhelix.compute.kernels.angles import rotation, rotation_by_axes
from longhelix.compute.models.image_positions import positions, shift
from longhelix.scheduler.request import ImageSpan

pytestmark = pytest.mark.unit


class Model:
    """What transformers' rule needs of a model."""

    config = Qwen3VLConfig()
    get_rope_index = Qwen3VLModel.get_rope_index
    get_vision_position_ids = Qwen3VLModel.get_vision_position_ids


@given(
    gaps=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    grids=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=5, max_size=5),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_positions_are_those_of_transformers(gaps, grids, cuts):
    """An image after each gap, and text behind the last."""
    kinds, images = [], []
    for gap, (rows, columns) in zip(gaps, grids, strict=False):
        kinds += [0] * gap
        images.append(ImageSpan(len(kinds), rows, columns, b""))
        kinds += [1] * (rows * columns)
    kinds += [0] * 3
    kinds_1S = torch.tensor([kinds])
    grids_I3 = torch.tensor([[1, 2 * image.rows, 2 * image.columns] for image in images])
    expected_31S, deltas = Model().get_rope_index(kinds_1S, kinds_1S, grids_I3)
    expected_3S = expected_31S[:, 0].numpy()
    assert shift(images) == deltas.item()
    assert np.array_equal(positions(images, 0, len(kinds)), expected_3S)
    bounds = sorted({0, len(kinds), *(cut for cut in cuts if cut < len(kinds))})
    for start, stop in pairwise(bounds):
        assert np.array_equal(positions(images, start, stop), expected_3S[:, start:stop])
    behind = positions(images, len(kinds), len(kinds) + 2)
    assert behind.tolist() == [[len(kinds) + shift(images), len(kinds) + shift(images) + 1]] * 3


def test_rows_with_one_position_on_all_axes_turn_as_others_do():
    """To the bit, so that text before an image is the same with it and without."""
    frequencies_R = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    positions_T = torch.tensor([0, 5, 16_000_001])
    expected = rotation(positions_T, frequencies_R, 1.5)
    into = torch.zeros(3, 4), torch.zeros(3, 4)
    rotation_by_axes(positions_T.expand(3, -1), torch.tensor([0, 1, 2, 0]), frequencies_R, 1.5, into)
    assert all(map(torch.equal, into, expected))
    by_axis_3T = positions_T.expand(3, -1) + torch.tensor([[0], [3], [7]])
    rotation_by_axes(by_axis_3T, torch.tensor([0, 1, 2, 0]), frequencies_R, 1.0, into)
    for pair, axis in enumerate([0, 1, 2, 0]):
        alone = rotation(by_axis_3T[axis].contiguous(), frequencies_R[pair : pair + 1], 1.0)
        assert torch.equal(into[0][:, pair], alone[0][:, 0])
