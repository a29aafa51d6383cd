"""Entries of parts of a vocabulary are those of the whole one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from longhelix.compute.kernels import candidates as candidates_module
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner import scoring
from longhelix.compute.runner.scoring import Scoring
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit

VOCAB, CPU = 23, torch.device("cpu")


class Ranks:
    """The ranks of a layout one after the other, the first one last: it finds what the others have gathered."""

    def __init__(self, ranks):
        self.layout, self.gathered = Layout(tpa=ranks), [[] for _ in range(ranks)]

    def run(self, logits_TV, targets, count):
        return [self.run_rank(rank, logits_TV, targets, count) for rank in reversed(range(self.layout.tpa))][-1]

    def run_rank(self, rank, logits_TV, targets, count):
        ranks = tuple(range(self.layout.tpa))

        def gather(words_X):
            self.gathered[rank].append(words_X)
            piece = len(self.gathered[rank]) - 1
            return [of_rank[piece] for of_rank in self.gathered] if rank == 0 else []

        group = SimpleNamespace(index=rank, ranks=ranks, size=len(ranks), gather=gather)
        mesh = Mesh(self.layout, rank, group, group, group)
        own = self.layout.vocabulary(VOCAB, rank)
        part_Tv = logits_TV[:, own.start : own.stop].contiguous()
        found = Scoring(mesh, VOCAB, CPU)(5, part_Tv, np.array(targets), count, torch.Tensor.clone, group)
        assert (found is None) == (rank > 0)
        return found


def drawn(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits_TV = 4 * torch.randn(rows, VOCAB, generator=generator)
    return logits_TV, torch.randint(VOCAB, (rows,), generator=generator).tolist()


@pytest.fixture(params=["fast", "reference"])
def form(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setattr(candidates_module, "_is_native", lambda logits_Sv: False)


@pytest.mark.usefixtures("form")
@pytest.mark.parametrize("count", [0, 1, 5, VOCAB, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 30])
def test_they_are_the_log_softmax_of_the_best_and_of_the_target(ranks, count):
    """Parts are uneven, smaller than what is asked for, and of more ranks than tokens some are empty."""
    logits_TV, targets = drawn(7)
    found = Ranks(ranks).run(logits_TV, targets, count)
    assert (found.sequence_id, found.error, len(found.logprobs)) == (5, "", 7)
    for entry, expected_V, target in zip(found.logprobs, logits_TV.double().log_softmax(-1), targets, strict=True):
        best = expected_V.argsort(descending=True).tolist()[:count]
        assert list(entry)[: len(best)] == best
        assert set(entry) == {*best, target}
        assert entry == pytest.approx({id: float(expected_V[id]) for id in entry}, abs=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 5, 8, 13])
def test_rows_go_in_pieces(monkeypatch, rows):
    monkeypatch.setattr(scoring, "_ROWS", 4)
    logits_TV, targets = drawn(rows)
    ranks = Ranks(3)
    found = ranks.run(logits_TV, targets, 2)
    assert [len(each) for each in ranks.gathered] == [-(-rows // 4)] * 3
    monkeypatch.undo()
    assert found == Ranks(3).run(logits_TV, targets, 2)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_an_error_in_one_piece_leaves_no_rank_in_a_later_one_alone(monkeypatch, broken):
    monkeypatch.setattr(scoring, "_ROWS", 4)
    logits_TV, targets = drawn(12)
    logits_TV[1, 20] = broken
    ranks = Ranks(2)
    found = ranks.run(logits_TV, targets, 2)
    assert [len(each) for each in ranks.gathered] == [3, 3]
    assert found.logprobs == ()
    assert found.error == f"ValueError: no token has a probability, because the largest logit is {float(broken)}"
