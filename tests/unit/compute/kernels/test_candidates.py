"""The native candidates of rows against the reference, which is tested by what torch sorts."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from longhelix.compute.kernels import native
from longhelix.compute.kernels.candidates import Candidates, Weighing, candidates, penalise, reference, take_largest
from longhelix.compute.kernels.draw import UNDECIDED
from longhelix.compute.runner.seen_tokens import SeenTokens

pytestmark = pytest.mark.unit

needs_native = pytest.mark.skipif(native.module is None, reason="the native kernels were not built")


def make_rows(seed: int, rows: int, size: int):
    """Logits, of which some are equal and some are -inf, and how they are weighed."""
    chance, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    logits_Sv = 4 * torch.randn(rows, size + 3, generator=generator)[:, :size]
    if seed % 3 == 0:
        logits_Sv = (2 * logits_Sv).round() / 2
    if seed % 5 == 0 and size > 4:
        logits_Sv[:, chance.integers(0, size, size // 4)] = -torch.inf
    seen = []
    for row in range(rows):
        marked = SeenTokens(range(size))
        marked.add(chance.integers(0, max(size, 1), [0, 3, size][row % 3] * (size > 0)))
        seen.append(None if row % 4 == 3 else marked.words_W)
    penalties_S = torch.from_numpy(chance.choice([0.5, 1.1, 3.0], rows).astype(np.float32))
    temperatures_S = torch.from_numpy(chance.choice([0.0, 0.1, 0.8, 5.0], rows).astype(np.float32))
    return logits_Sv, Weighing(seen, penalties_S, temperatures_S)


def assert_same(found, expected):
    assert torch.equal(found.values_SK, expected.values_SK)
    assert torch.equal(found.ids_SK.masked_fill(found.values_SK == -torch.inf, -1),
                       expected.ids_SK.masked_fill(expected.values_SK == -torch.inf, -1))  # fmt: skip
    assert torch.allclose(found.sums_S, expected.sums_S, rtol=2e-6, atol=0)


@needs_native
@pytest.mark.parametrize("size", [0, 1, 15, 16, 255, 256, 257, 300, 511, 512, 513, 5000, 70_000])
@pytest.mark.parametrize("count", [1, 2, 64, 300])
def test_native_candidates_are_those_of_the_reference(size, count):
    for seed in range(6):
        rows = make_rows(seed, 5, size)
        assert_same(candidates(*rows, count), reference(*rows, count))


@pytest.mark.parametrize("find", [candidates, reference])
@pytest.mark.parametrize("count", [1, 64, 300])
def test_candidates_are_the_first_that_a_stable_sort_gives(find, count):
    for seed in range(6):
        logits_Sv, weighing = make_rows(seed, 5, 257)
        found = find(logits_Sv, weighing, count)
        penalise(logits_Sv, weighing)
        sorted_Sv, ids_Sv = logits_Sv.sort(dim=1, descending=True, stable=True)
        kept = min(count, 257)
        assert torch.equal(found.values_SK[:, :kept], sorted_Sv[:, :kept])
        numbers_SK = found.values_SK[:, :kept] > -torch.inf
        assert torch.equal(found.ids_SK[:, :kept][numbers_SK], ids_Sv[:, :kept][numbers_SK])
        assert (found.ids_SK[:, kept:] == -1).all()
        weights_Sv = ((sorted_Sv - sorted_Sv[:, :1]).double() / weighing.temperatures_S[:, None]).exp()
        expected_S = torch.where(weighing.temperatures_S == 0, 0.0, weights_Sv.sum(dim=1))
        assert torch.allclose(found.sums_S, expected_S, rtol=2e-6, atol=0)


@pytest.mark.parametrize("find", [candidates, reference])
def test_a_row_with_a_nan_says_so_and_the_others_do_not(find):
    logits_Sv = torch.zeros(3, 1000)
    logits_Sv[1, 999] = torch.nan
    logits_Sv[1, 3] = torch.inf
    found = find(logits_Sv, Weighing([None] * 3, torch.ones(3), torch.ones(3)), 2)
    assert found.values_SK[:, 0].isnan().tolist() == [False, True, False]
    assert found.ids_SK[[0, 2]].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("find", [candidates, reference])
def test_a_part_of_which_a_guide_allows_nothing_weighs_nothing(find):
    logits_Sv = torch.full((2, 1000), -torch.inf)
    logits_Sv[1, 7] = 3.0
    found = find(logits_Sv, Weighing([None] * 2, torch.ones(2), torch.full((2,), 0.7)), 4)
    assert found.sums_S.tolist() == [0.0, pytest.approx(1.0, rel=2e-6)]
    assert found.values_SK.tolist() == [[-torch.inf] * 4, [3.0] + [-torch.inf] * 3]


@pytest.mark.parametrize("is_native", [False, True])
def test_penalties_are_of_the_logits_that_are_marked(is_native, monkeypatch):
    if not is_native:
        monkeypatch.setattr(native, "module", None)
    seen = SeenTokens(range(10, 20))
    seen.add(np.array([9, 12, 20]))
    seen.add_one(19)
    seen.add_one(10_000)
    row = [1.0] * 5 + [-1.0] * 5
    logits_2v = torch.tensor([row, row])
    penalise(logits_2v, Weighing([seen.words_W, None], torch.tensor([2.0, 2.0]), torch.ones(2)))
    assert logits_2v.tolist() == [[1.0, 1.0, 0.5, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -2.0], row]


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_native)])
@pytest.mark.parametrize("bounds", [[0, 400], [0, 150, 150, 400], [0, 0, 399, 400]])
def test_the_largest_of_all_parts_is_taken(monkeypatch, is_native, bounds):
    """Of equal ones that of the lowest id; of rows whose largest logit is no number nothing is."""
    if not is_native:
        monkeypatch.setattr(native, "module", None)
    logits_SV = (2 * torch.randn(9, 400, generator=torch.Generator().manual_seed(1))).round()
    logits_SV[1, 150:] += 20
    logits_SV[2] = -torch.inf
    logits_SV[3, 200] = torch.nan
    logits_SV[4, 200] = torch.inf
    logits_SV[5, 3:] = -torch.inf
    logits_SV[6, 0] = torch.nan
    weighing = Weighing([None] * 9, torch.ones(9), torch.zeros(9))
    parts = [logits_SV[:, begin:end].contiguous() for begin, end in pairwise(bounds)]
    memories = []
    for part_Sv in parts:
        found = Candidates.new(9, 1, part_Sv.device)
        assert candidates(part_Sv, weighing, 1, into=found) is found
        memories.append(found.memory())
    tokens_S = torch.empty(9, dtype=torch.int64)
    take_largest(memories, bounds[:-1], tokens_S)
    first_S = (logits_SV == logits_SV.amax(dim=1, keepdim=True)).int().argmax(dim=1)  # of equal ones the first
    first_S[[2, 3, 4, 6]] = UNDECIDED
    assert tokens_S.tolist() == first_S.tolist()
