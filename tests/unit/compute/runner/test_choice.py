"""Tokens chosen from candidates, of the whole vocabulary or of its parts, are those of whole rows that are sorted."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import sorted_rows
from longhelix.compute.kernels import native
from longhelix.compute.kernels.candidates import Weighing, candidates, penalise
from longhelix.compute.kernels.draw import UNDECIDED
from longhelix.compute.runner import choice, sampler
from longhelix.compute.runner.seen_tokens import SeenTokens
from longhelix.scheduler.request import SamplingParams

pytestmark = pytest.mark.unit

TEMPERATURES, TOP_K, TOP_P = [0.3, 0.7, 1.0, 1.5, 5.0], [0, 0, 1, 5, 40, 64, 100], [1.0, 1.0, 0.05, 0.5, 0.9, 0.99]
MIN_P, PENALTIES = [0.0, 0.0, 0.01, 0.1, 1.0], [1.0, 1.0, 0.7, 1.3]


class Rows:
    """Logits of requests, and what their tokens are chosen by."""

    def __init__(self, seed: int, size: int, rows: int, greedy: bool = False) -> None:
        chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.logits_SV = torch.randn(rows, size, generator=generator) * chance.choice([0.1, 1.0, 3.0, 10.0])
        if chance.random() < 0.3:  # many equal ones
            self.logits_SV = (self.logits_SV * 4).round() / 4
        if chance.random() < 0.2:  # some are equally likely, and far from 0
            self.logits_SV[:, chance.sample(range(size), min(size, 3))] = chance.choice([20.0, 300.0, 1e9])
        if chance.random() < 0.1:
            broken = [float("nan"), float("inf"), -float("inf"), -1e30]
            self.logits_SV[chance.randrange(rows), chance.randrange(size)] = chance.choice(broken)
        self.params = [
            SamplingParams(
                temperature=0.0 if greedy else chance.choice([0.0, *TEMPERATURES, 10 ** chance.uniform(-30, 30)]),
                top_k=chance.choice(TOP_K),
                top_p=chance.choice(TOP_P),
                min_p=chance.choice(MIN_P),
                repetition_penalty=chance.choice(PENALTIES),
            )
            for _ in range(rows)
        ]
        self.keys = [(chance.randrange(2**63), chance.randrange(10**7)) for _ in range(rows)]
        self.seen_ids = [np.array(chance.choices(range(size), k=chance.choice([1, 10, 100]))) for _ in range(rows)]

    def expected(self, dtype: torch.dtype = torch.float64) -> list[int | None]:
        """By sorting; None where that is an error."""
        tokens = []
        for logits_V, params, key, ids in zip(self.logits_SV, self.params, self.keys, self.seen_ids, strict=True):
            seen_V = torch.zeros(len(logits_V), dtype=torch.bool)
            seen_V[ids] = True
            try:
                tokens.append(sorted_rows.sample(logits_V, params, *key, seen_V, dtype))
            except ValueError:
                tokens.append(None)
        return tokens

    def weighing(self, part: range) -> Weighing:
        found = []
        for params, ids in zip(self.params, self.seen_ids, strict=True):
            seen = SeenTokens(part)
            seen.add(ids[1:])
            seen.add_one(int(ids[0]))
            found.append(None if params.repetition_penalty == 1 else seen.words_W)
        penalties_S = torch.tensor([each.repetition_penalty for each in self.params], dtype=torch.float32)
        return Weighing(
            found, penalties_S, torch.tensor([each.temperature for each in self.params], dtype=torch.float32)
        )

    def chosen(self, parts: list[range], count: int) -> list[int]:
        """From candidates of parts of the vocabulary."""
        shards = []
        for part in parts:
            logits_Sv = self.logits_SV[:, part.start : part.stop].contiguous()
            values_SK, ids_SK, sums_S = candidates(logits_Sv, self.weighing(part), count)
            ids_SK = torch.where(ids_SK < 0, ids_SK, ids_SK + part.start)
            shards.append(choice.VocabularyShard(values_SK.numpy(), ids_SK.numpy(), sums_S.numpy()))
        merged = choice.merge(shards, np.array([each.temperature for each in self.params], np.float32))
        return choice.choose(merged, self.logits_SV.shape[1], self.params, self.keys).tolist()

    def drawn(self) -> list[int]:
        """From whole rows that are not sorted."""
        penalised_SV = self.logits_SV.clone()
        penalise(penalised_SV, self.weighing(range(self.logits_SV.shape[1])))
        return sampler.sample_rows(penalised_SV, self.params, self.keys)


def assert_decided(found: list[int], expected: list[int | None]) -> int:
    """How many were decided: they are as expected."""
    decided = [(token, right) for token, right in zip(found, expected, strict=True) if token != UNDECIDED]
    assert all(token == right for token, right in decided)
    return len(decided)


@pytest.mark.parametrize("seed", range(60))
def test_tokens_of_candidates_and_of_draws_are_those_of_sorted_rows(seed):
    chance = random.Random(seed)
    size, rows = chance.choice([1, 3, 40, 64, 65, 300, 1000, 20_000]), chance.choice([1, 3, 8])
    given = Rows(seed, size, rows)
    expected = given.expected()
    edges = sorted(chance.choices(range(size + 1), k=2))
    for parts in ([range(size)], [range(edges[0]), range(edges[0], edges[1]), range(edges[1], size)]):
        for count in (1, 7, 64):
            assert_decided(given.chosen(parts, count), expected)
    assert_decided(given.drawn(), expected)


def test_rows_are_as_they_were_with_sums_in_float32_but_where_these_let_in_another_token():
    differ = rows = 0
    for seed in range(40):
        given = Rows(seed, 2_000, 8)
        before, now = given.expected(torch.float32), given.expected()
        differ += sum(old != new for old, new in zip(before, now, strict=True))
        rows += len(now)
    assert rows == 320
    assert differ == 0


@pytest.mark.parametrize("temperature", [3e-9, 1.6647630020293556e-09, 1e-20, 1e-30])
def test_equally_likely_tokens_are_drawn_at_any_temperature(temperature):
    rows = Rows(0, 300, 40)
    rows.logits_SV = torch.zeros(40, 300)
    rows.logits_SV[:, [10, 100, 200]] = 19.298755645751953
    rows.params = [SamplingParams(temperature=temperature, top_p=top_p) for top_p in (1.0, 0.5) * 20]
    rows.keys = [(1, position) for position in range(40)]
    expected = rows.expected()
    assert set(expected) == {10, 100, 200}
    assert_decided(rows.chosen([range(300)], 64), expected)
    assert_decided(rows.drawn(), expected)


@pytest.mark.parametrize("parts", [[range(1000)], [range(0), range(999), range(999, 1000)]])
def test_one_candidate_of_each_part_decides_every_greedy_row(parts):
    for seed in range(20):
        given = Rows(seed, 1000, 8, greedy=True)
        expected = given.expected()
        assert assert_decided(given.chosen(parts, 1), expected) == sum(token is not None for token in expected)


def test_nearly_all_peaked_rows_are_decided_by_candidates_and_nearly_all_flat_ones_by_draws():
    generator = torch.Generator().manual_seed(1)
    given = Rows(0, 20_000, 8)
    given.params = [SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=penalty) for penalty in (1, 1.2) * 4]
    decided = drawn = 0
    for turn in range(20):
        given.logits_SV = torch.randn(8, 20_000, generator=generator)
        given.logits_SV[:, ::700] += 12 * torch.rand(8, 29, generator=generator)
        given.keys = [(turn, position) for position in range(8)]
        expected = given.expected()
        decided += assert_decided(given.chosen([range(20_000)], 64), expected)
        given.logits_SV /= 5
        drawn += assert_decided(given.drawn(), given.expected())
    assert decided >= 155
    if native.module is not None:
        assert drawn >= 155


@pytest.mark.parametrize("is_native", [False, True])
def test_rows_of_fewer_tokens_than_candidates_are_decided(monkeypatch, is_native):
    """As guides leave them; whole parts of the vocabulary may have none."""
    if not is_native:
        monkeypatch.setattr(native, "module", None)
    decided = rows = 0
    for seed in range(40):
        chance, given = random.Random(seed), Rows(seed, 1000, 8)
        allowed = chance.sample(range(1000), chance.choice([1, 2, 10, 63]))
        logits_SV = given.logits_SV.nan_to_num(0.0, 0.0, 0.0)
        given.logits_SV = torch.full_like(logits_SV, -torch.inf)
        given.logits_SV[:, allowed] = logits_SV[:, allowed]
        given.params = [
            SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=1.3)
            for temperature, top_k, top_p in itertools.product([0.7, 5.0], [0, 100], [1.0, 0.93])
        ]
        given.params[0] = replace(given.params[0], min_p=0.013)
        expected = given.expected()
        for parts in [range(1000)], [range(0), range(min(allowed)), range(min(allowed), 1000)]:
            decided += assert_decided(given.chosen(parts, 64), expected)
            rows += 8
    assert decided > 0.97 * rows


def test_what_candidates_cannot_know_they_do_not_decide():
    flat = Rows(0, 20_000, 1)
    flat.logits_SV = torch.zeros(1, 20_000)
    flat.seen_ids = [np.array([0])]
    for params in (
        SamplingParams(temperature=1.0),  # the draw is beyond them
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=65),
        SamplingParams(temperature=1.0, min_p=0.5),
    ):
        flat.params, flat.keys = [params], [(5, 1)]
        assert flat.chosen([range(20_000)], 64) == [UNDECIDED]
        assert flat.drawn() in (flat.expected(), [UNDECIDED])


def test_logits_that_are_equal_once_scaled_come_by_their_ids():
    """0.3 and the next float above it are equally far from 1000, in float32."""
    row = Rows(0, 200, 1)
    row.logits_SV = -100_000.0 - torch.arange(200.0)[None]
    row.logits_SV[0, [150, 20, 199]] = torch.tensor([np.nextafter(np.float32(0.3), np.float32(1)), 0.3, 1000.0])
    row.params = [SamplingParams(temperature=300.0)]
    tokens = set()
    for position in range(200):
        row.keys = [(1, position)]
        (expected,) = row.expected()
        assert assert_decided(row.chosen([range(200)], 64), [expected]) == 1
        assert_decided(row.drawn(), [expected])
        tokens.add(expected)
    assert tokens == {20, 150, 199}
