"""Over gloo large messages go in pieces: the same numbers and bytes, and as many collectives as a formula says."""

import pytest
from lockstep import Lockstep, group_of
from modules import Chain, Experts, H, rows
from test_sequence_parallel import same_numbers

LAYERS = 3


def num_pieces(least, size, row_bytes, piece_bytes):
    share = -(-least // size)
    return max(1, min(share * row_bytes // piece_bytes, share, 16))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("quantize", [None, "int8", "fp8"])
def test_the_same_numbers_and_bytes(size, dynamic, quantize):
    """Pieces of two rows and of one, one more than all rows, and as many as there may be."""
    piece_bytes, least = 2 * H * 4, 13
    with group_of(size):
        alone = Chain(0, 1, LAYERS)
        options = {"min_tokens": 1, "tokens": (13, None) if dynamic else None, "quantize": quantize}
        modules = [Chain(rank, size, LAYERS) for rank in range(size)]
        pieces = Lockstep(modules, dynamic, in_rank_order=True, piece_bytes=piece_bytes, **options)
        whole = Lockstep(modules, dynamic, in_rank_order=True, **options)
        for tokens in (13, 14, 29, 100) if dynamic else (1, 3, 13, 100):
            x = rows(tokens)
            outcome, one = pieces(x), whole(x)
            same_numbers(outcome, [alone(x)], quantize)
            assert all(
                (mine == other).all()
                for mine, other in zip(outcome.changed.returned[0], one.changed.returned[0], strict=True)
            )
            assert outcome.changed.sent_bytes == one.changed.sent_bytes
            wide, narrow, scales = (
                num_pieces(least if dynamic else tokens, size, bytes_, piece_bytes) for bytes_ in (H * 4, H, 4)
            )
            sums = LAYERS + 1
            quantised = LAYERS if quantize else 0  # and not what is returned
            assert outcome.changed.collectives == {
                "all_to_all": sums * wide,
                "all_gather": quantised * (narrow + scales) + (sums - quantised) * wide,
            }


def test_no_pieces_without_rows_for_all():
    """A graph for any number of tokens may have fewer rows than pieces."""
    with group_of(2):
        ranks = Lockstep(
            [Chain(rank, 2, LAYERS) for rank in range(2)], True, min_tokens=1, in_rank_order=True, piece_bytes=1
        )
        assert ranks(rows(100)).changed.collectives["all_to_all"] == LAYERS + 1


def test_experts():
    with group_of(2):
        alone = Experts(0, 1)
        ranks = Lockstep(
            [Experts(rank, 2) for rank in range(2)],
            alike=False,
            min_tokens=1,
            in_rank_order=True,
            own_chunks=True,
            piece_bytes=2 * H * 4,
        )
        x = rows(13)
        outcome = ranks(x)
        same_numbers(outcome, [alone(x)])
        assert outcome.changed.collectives["all_to_all"] % 3 == 0
