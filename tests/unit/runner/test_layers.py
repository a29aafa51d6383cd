"""What is kept of layers that ran: as long as it is used."""

import pytest
import torch

from longhelix.kernels import native
from longhelix.layout import Layout
from longhelix.models.batch import Batch
from longhelix.parallel.mesh import Mesh
from longhelix.runner import graphed_layers, taped_layers
from longhelix.runner.graphed_layers import GraphedLayers
from longhelix.runner.taped_layers import TapedLayers

pytestmark = pytest.mark.unit


def decode(rows):
    """A decode step of `rows` sequences that have a token each."""
    ints = torch.zeros(rows, dtype=torch.int64)
    return Batch(
        token_ids_T=ints,
        holders=None,
        cos_tR=torch.ones(rows, 2),
        sin_tR=torch.zeros(rows, 2),
        slots_t=ints,
        limits_t=ints + 1,
        row_starts_b=torch.arange(rows + 1),
        blocks_X=torch.zeros(1, dtype=torch.int64),
        extents_b2=torch.zeros(rows, 2, dtype=torch.int64),
        max_rows=1,
        num_sequences=rows,
        most_tokens=1,
    )


def graphed(layers):
    return GraphedLayers(layers, Mesh.build(Layout(), 0), capture=lambda call: (call(), lambda: None))


@pytest.mark.parametrize("kind", ["tapes", "graphs"])
def test_what_was_used_last_stays(monkeypatch, kind):
    if kind == "tapes" and native.module is None:
        pytest.skip("no native kernels")
    monkeypatch.setattr(taped_layers, "_MOST_TAPES", 2)
    monkeypatch.setattr(graphed_layers, "_MOST_GRAPHS", 2)
    made = []

    def layers(hidden_TH, batch):
        made.append(len(hidden_TH))
        return hidden_TH.view(-1, 4)

    run = TapedLayers(layers) if kind == "tapes" else graphed(layers)
    for rows in (1, 2, 1, 4, 1, 4, 2):
        run(torch.ones(rows, 4), decode(rows))
    assert made == [1, 2, 4, 2]
