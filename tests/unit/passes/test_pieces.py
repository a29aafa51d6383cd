"""Over gloo large messages go in pieces: the same numbers, bytes and collectives."""

import pytest
from lockstep import Lockstep, group_of
from modules import Chain, Experts, rows
from test_sequence_parallel import same_numbers

from longhelix.passes.pieces import _pieces

LAYERS = 3


@pytest.mark.parametrize(("size", "dynamic", "quantize"), [(2, False, "fp8"), (3, True, "int8"), (3, False, None)])
def test_the_same_collectives(size, dynamic, quantize):
    with group_of(size):
        alone = Chain(0, 1, LAYERS)
        modules = [Chain(rank, size, LAYERS) for rank in range(size)]
        options = {"min_tokens": 1, "quantize": quantize, "in_rank_order": True}
        in_pieces, whole = (Lockstep(modules, dynamic, in_pieces=given, **options) for given in (True, False))
        for tokens in (1, 3, 13, 100):
            x = rows(tokens)
            outcome, one = in_pieces(x), whole(x)
            same_numbers(outcome, [alone(x)], quantize)
            (mine,), (other,) = outcome.changed.returned[0], one.changed.returned[0]
            assert (mine == other).all()
            assert outcome.changed.sent_bytes == one.changed.sent_bytes
            assert outcome.changed.collectives == one.changed.collectives
            assert outcome.report == one.report
            targets = {node.target for node in outcome.graph.nodes if "all_" in str(node.target)}
            assert {str(target) for target in targets} == {
                f"longhelix_passes.{name}.default" for name in ("all_gather", "all_to_all")
            }


def test_experts():
    with group_of(2):
        alone = Experts(0, 1)
        modules = [Experts(rank, 2) for rank in range(2)]
        options = {"min_tokens": 1, "in_rank_order": True, "in_pieces": True, "own_chunks": True}
        x = rows(13)
        same_numbers(Lockstep(modules, alike=False, **options)(x), [alone(x)])


def test_pieces_have_all_rows():
    """None of a small message, as many as rows of one with long rows, and at most sixteen."""
    for tokens, size, count in (
        (0, 8, 1),
        (1, 1 << 20, 1),
        (3, 1 << 20, 3),
        (1000, 1024, 3),
        (5001, 8192, 16),
        (7, 9, 1),
    ):
        x_LX = rows(1).new_empty(tokens, size // 4, device="meta")
        found = _pieces(x_LX)
        assert len(found) == count
        assert [row for piece in found for row in range(tokens)[piece]] == list(range(tokens))
