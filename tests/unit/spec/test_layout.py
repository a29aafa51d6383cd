import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.errors import UserError
from longhelix.spec.layout import HeadShape, Layout, split, widest_ep

pytestmark = pytest.mark.unit

GRIDS = [(kvp, n // kvp) for n in range(1, 17) for kvp in range(1, n + 1) if n % kvp == 0]
HEADS = [HeadShape(*shape) for shape in ((9, 3), (14, 2), (7, 1), (5, 5), (15, 3), (12, 4), (1, 1), (64, 8))]
SIZES = (1, 7, 16, 1536)
sizes = st.integers(0, 100_000)


def id_of(value):
    return f"{value.num_query_heads}/{value.num_kv_heads}" if isinstance(value, HeadShape) else None


def flat(ranges) -> list[int]:
    return [item for items in ranges for item in items]


def ffn_layouts(num_ranks: int) -> list[Layout]:
    divisors = [degree for degree in range(1, num_ranks + 1) if num_ranks % degree == 0]
    return [Layout(kvp=num_ranks, tpf=num_ranks // ep, ep=ep) for ep in divisors]


@given(total=sizes, count=st.integers(1, 300))
def test_split_is_consecutive_complete_and_even_to_one(total, count):
    pieces = split(total, count)
    lengths = [len(piece) for piece in pieces]
    assert flat(pieces) == list(range(total))
    assert len(pieces) == count
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


def test_what_a_rank_owns_costs_the_same_however_many_ranks_there_are(monkeypatch):
    cut = []

    def counted(total, pieces):
        cut.append(pieces)
        return split(total, pieces)

    monkeypatch.setattr("longhelix.spec.layout.split", counted)
    heads = HeadShape(16, 4)
    for layout in (Layout(kvp=10_000), Layout(kvp=5000, tpa=2, tpf=50, ep=200), Layout(kvp=1000, tpa=8)):
        for rank in (0, layout.num_ranks - 1):
            for owned in (layout.kv_heads, layout.query_heads, layout.output_heads):
                assert len(owned(heads, rank)) <= 16
            for owned in (layout.ffn_columns, layout.expert_columns, layout.experts, layout.vocabulary):
                assert len(owned(5000, rank)) <= 5000
    assert set(cut) <= {heads.num_kv_heads}


def test_the_designs_example_gives_uneven_heads():
    layout, heads = Layout(kvp=2, tpa=2), HeadShape(9, 3)
    assert [len(layout.query_heads(heads, rank)) for rank in range(2)] == [6, 3]
    assert [len(layout.kv_heads(heads, rank)) for rank in range(2)] == [2, 1]
    by_tpa = [layout.merged_query_heads(heads, rank) for rank in (0, 2, 1, 3)]
    assert by_tpa == [range(3), range(3, 6), range(6, 8), range(8, 9)]
    assert [len(heads) for heads in by_tpa] == [3, 3, 2, 1]


@pytest.mark.parametrize("heads", HEADS, ids=id_of)
def test_each_merged_query_head_has_one_rank(heads):
    for kvp, tpa in GRIDS:
        if tpa > heads.num_query_heads:
            continue
        layout = Layout(kvp=kvp, tpa=tpa)
        for stage in layout.stage_groups():
            owned = flat(layout.merged_query_heads(heads, rank) for rank in stage)
            assert sorted(owned) == list(range(heads.num_query_heads)), layout


@pytest.mark.parametrize("heads", HEADS, ids=id_of)
def test_merged_heads_lie_in_the_ranks_own_attention_and_follow_kvp_order(heads):
    for kvp, tpa in GRIDS:
        if tpa > heads.num_query_heads:
            continue
        layout = Layout(kvp=kvp, tpa=tpa)
        for group in layout.kvp_groups():
            merged = flat(layout.merged_query_heads(heads, rank) for rank in group)
            assert all(merged == list(layout.query_heads(heads, rank)) for rank in group), layout


@pytest.mark.parametrize("heads", HEADS, ids=id_of)
def test_query_heads_are_complete_over_tpa_and_none_is_without_work(heads):
    for kvp, tpa in GRIDS:
        if tpa > heads.num_query_heads:
            continue
        layout = Layout(kvp=kvp, tpa=tpa)
        for group in layout.tpa_groups():
            assert flat(layout.query_heads(heads, rank) for rank in group) == list(range(heads.num_query_heads))
            assert all(layout.query_heads(heads, rank) for rank in group), layout


@pytest.mark.parametrize("heads", HEADS, ids=id_of)
def test_kv_heads_are_owned_once_over_tpa_or_duplicated_one_to_a_rank(heads):
    seen = set()
    for kvp, tpa in GRIDS:
        if tpa > heads.num_query_heads:
            continue
        layout = Layout(kvp=kvp, tpa=tpa)
        duplicates = layout.duplicates_kv(heads)
        assert duplicates == (tpa > heads.num_kv_heads)
        seen.add(duplicates)
        for group in layout.tpa_groups():
            owned = flat(layout.kv_heads(heads, rank) for rank in group)
            if duplicates:
                assert all(len(layout.kv_heads(heads, rank)) == 1 for rank in group)
                assert set(owned) == set(range(heads.num_kv_heads))
            else:
                assert owned == list(range(heads.num_kv_heads))
            first = [rank for rank in group if layout.keeps_kv_first(heads, rank)]
            assert flat(layout.kv_heads(heads, rank) for rank in first) == list(range(heads.num_kv_heads))
    assert (True in seen) == (heads.num_query_heads > heads.num_kv_heads)


@pytest.mark.parametrize("heads", HEADS, ids=id_of)
def test_a_rank_has_the_kv_head_of_each_of_its_query_heads_at_one_group_size(heads):
    for kvp, tpa in GRIDS:
        if tpa > heads.num_query_heads:
            continue
        layout = Layout(kvp=kvp, tpa=tpa)
        for rank in range(layout.world_size):
            query_heads, kv_heads = layout.query_heads(heads, rank), layout.kv_heads(heads, rank)
            assert {head // heads.group_size for head in query_heads} == set(kv_heads), (layout, rank)
            if layout.duplicates_kv(heads):
                assert len(kv_heads) == 1
            else:
                local_group = len(query_heads) // len(kv_heads)
                assert local_group == heads.group_size
                assert all(
                    head // heads.group_size == kv_heads[index // local_group] for index, head in enumerate(query_heads)
                )


@pytest.mark.parametrize("heads", HEADS, ids=id_of)
def test_heads_are_the_same_on_every_kvp_rank_and_stage(heads):
    for kvp, tpa in GRIDS:
        if tpa > heads.num_query_heads:
            continue
        layout = Layout(kvp=kvp, tpa=tpa, pp=2)
        for group in layout.kvp_groups():
            assert len({layout.query_heads(heads, rank) for rank in group}) == 1
            assert len({layout.kv_heads(heads, rank) for rank in group}) == 1
        for rank in range(layout.num_ranks):
            other = rank + layout.num_ranks
            assert layout.merged_query_heads(heads, rank) == layout.merged_query_heads(heads, other)


@pytest.mark.parametrize("size", SIZES)
def test_ffn_columns_and_experts_are_owned_once(size):
    for num_ranks in range(1, 17):
        for layout in ffn_layouts(num_ranks):
            for expert_rank in range(layout.ep):
                group = [rank for rank in range(num_ranks) if layout.ep_rank(rank) == expert_rank]
                assert len(group) == layout.tpf
                assert flat(layout.expert_columns(size, rank) for rank in group) == list(range(size))
                assert len({layout.experts(size, rank) for rank in group}) == 1
            leaders = layout.expert_group_leaders()
            assert flat(layout.experts(size, rank) for rank in leaders) == list(range(size))
            for group in layout.ffn_groups():
                assert flat(layout.ffn_columns(size, rank) for rank in group) == list(range(size))
            for column_rank in range(layout.tpf):
                column = [rank for rank in range(num_ranks) if layout.tpf_rank(rank) == column_rank]
                assert flat(layout.experts(size, rank) for rank in column) == list(range(size))


@pytest.mark.parametrize(("num_ranks", "num_experts", "ep"), [(1, 8, 1), (4, 8, 4), (6, 8, 2), (3, 8, 1), (6, 9, 3)])
def test_the_widest_ep_divides_ranks_and_experts(num_ranks, num_experts, ep):
    assert widest_ep(num_ranks, num_experts) == ep


@pytest.mark.parametrize("size", SIZES)
def test_the_vocabulary_is_owned_once_in_each_stage_and_in_each_tied_instance(size):
    for kvp, tpa in GRIDS:
        layout = Layout(kvp=kvp, tpa=tpa, pp=2)
        for stage in layout.stage_groups():
            assert flat(layout.vocabulary(size, rank) for rank in stage) == list(range(size))
        tied = Layout(kvp=kvp, tpa=tpa, pp=2, ffn_replicas=kvp)
        for instance in tied.tpa_groups():
            assert flat(tied.vocabulary(size, rank) for rank in instance) == list(range(size))


def test_every_copy_of_a_tied_ffn_is_whole():
    for kvp, tpa in GRIDS:
        layout = Layout(kvp=kvp, tpa=tpa, ffn_replicas=kvp)
        assert (layout.tpf, layout.ep) == (tpa, 1)
        for group in layout.tpa_groups():
            assert flat(layout.ffn_columns(100, rank) for rank in group) == list(range(100))


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_groups_partition_the_world(pp):
    for kvp, tpa in GRIDS:
        layout = Layout(kvp=kvp, tpa=tpa, pp=pp)
        world = list(range(layout.world_size))
        for groups, size in (
            (layout.stage_groups(), kvp * tpa),
            (layout.kvp_groups(), kvp),
            (layout.tpa_groups(), tpa),
        ):
            assert sorted(flat(groups)) == world
            assert {len(group) for group in groups} == {size}


def test_coordinates_invert_the_rank():
    for kvp, tpa in GRIDS:
        layout = Layout(kvp=kvp, tpa=tpa, pp=2)
        for rank in range(layout.world_size):
            stage, kvp_rank, tpa_rank = layout.stage(rank), layout.kvp_rank(rank), layout.tpa_rank(rank)
            assert (stage * kvp + kvp_rank) * tpa + tpa_rank == rank
            assert stage < 2
            assert kvp_rank < kvp
            assert tpa_rank < tpa
            assert layout.kvp_groups()[stage * tpa + tpa_rank][kvp_rank] == rank
            assert layout.tpa_groups()[stage * kvp + kvp_rank][tpa_rank] == rank


def test_ffn_coordinates_invert_the_rank():
    for num_ranks in range(1, 17):
        for layout in ffn_layouts(num_ranks):
            ranks = [layout.ep_rank(rank) * layout.tpf + layout.tpf_rank(rank) for rank in range(num_ranks)]
            assert ranks == list(range(num_ranks))


def test_tpf_defaults_to_what_is_left():
    assert Layout(kvp=4, tpa=2).tpf == 8
    assert Layout(kvp=4, tpa=2, ep=4).tpf == 2
    assert Layout(kvp=4, tpa=2, ffn_replicas=4).tpf == 2


def test_a_layout_is_frozen_and_compares_by_value():
    layout = Layout(kvp=2, tpa=2)
    assert layout == Layout(2, 2, 4)
    assert hash(layout) == hash(Layout(2, 2, 4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.kvp = 4


@pytest.mark.parametrize("degree", ["kvp", "tpa", "tpf", "ep", "pp", "ffn_replicas"])
@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2"])
def test_a_degree_below_one_or_not_whole_is_refused(degree, value):
    with pytest.raises(UserError, match=rf"{degree} is .*: set it to an integer from 1 to") as caught:
        Layout(**{degree: value})
    assert caught.value.code == "invalid_layout"


def test_more_tpa_than_query_heads_is_refused_with_the_most_that_works():
    heads = HeadShape(9, 3)
    Layout(tpa=9).check(heads, 1)
    with pytest.raises(UserError, match="set tpa to 9 or less") as caught:
        Layout(tpa=10).check(heads, 1)
    assert caught.value.code == "invalid_layout"


def test_products_that_differ_are_refused_with_the_tpf_that_works():
    with pytest.raises(UserError, match=r"kvp \* tpa = 2 \* 4 = 8 ranks.* set tpf to 4 or leave it out") as caught:
        Layout(kvp=2, tpa=4, tpf=3, ep=2)
    assert caught.value.code == "invalid_layout"
    assert Layout(kvp=2, tpa=4, tpf=4, ep=2) == Layout(kvp=2, tpa=4, ep=2)


@pytest.mark.parametrize("ep", [4, 5, 12])
def test_an_ep_that_does_not_divide_the_ranks_is_refused_with_what_would(ep):
    with pytest.raises(UserError, match=rf"6 ranks are not divisible by .* {ep}: set ep to a divisor of 6") as caught:
        Layout(kvp=2, tpa=3, ep=ep)
    assert caught.value.code == "invalid_layout"


def test_ffn_replicas_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(UserError, match=r"6 ranks are not divisible by .* 4") as caught:
        Layout(kvp=2, tpa=3, ffn_replicas=4)
    assert caught.value.code == "invalid_layout"


@given(kvp=st.integers(1, 16), tpa=st.integers(1, 16), num_kv_heads=st.integers(1, 16), group_size=st.integers(1, 16))
def test_local_sizes_sum_to_the_global_ones(kvp, tpa, num_kv_heads, group_size):
    heads = HeadShape(num_kv_heads * group_size, num_kv_heads)
    tpa = min(tpa, heads.num_query_heads)
    layout = Layout(kvp=kvp, tpa=tpa)
    ranks = range(layout.num_ranks)
    assert sum(len(layout.merged_query_heads(heads, rank)) for rank in ranks) == heads.num_query_heads
    assert sum(len(layout.query_heads(heads, rank)) for rank in ranks) == kvp * heads.num_query_heads
    assert sum(len(layout.kv_heads(heads, rank)) for rank in ranks) == kvp * max(tpa, num_kv_heads)
    assert sum(len(layout.vocabulary(49_152, rank)) for rank in ranks) == 49_152
    assert sum(len(layout.ffn_columns(1536, rank)) for rank in ranks) == 1536


@given(num_layers=st.integers(1, 200), pp=st.integers(1, 20), num_ranks=st.integers(1, 4))
def test_every_layer_is_in_one_stage_in_order_and_stages_are_even(num_layers, pp, num_ranks):
    pp = min(pp, num_layers)
    layout = Layout(kvp=num_ranks, pp=pp)
    for place in range(num_ranks):
        stages = [layout.layers(num_layers, rank) for rank in range(place, layout.world_size, num_ranks)]
        assert stages == list(split(num_layers, pp))
        assert min(map(len, stages)) >= 1


def test_stages_have_as_many_layers_as_they_are_told():
    layout = Layout(kvp=2, pp=3, stage_layers=[4, 1, 2])
    layout.check(HeadShape(4, 2), 7)
    first, middle, last = range(4), range(4, 5), range(5, 7)
    assert [layout.layers(7, rank) for rank in range(6)] == [first, first, middle, middle, last, last]
    assert layout == Layout(kvp=2, pp=3, stage_layers=(4, 1, 2)) != Layout(kvp=2, pp=3)
    assert hash(layout) == hash(Layout(kvp=2, pp=3, stage_layers=(4, 1, 2)))


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"pp": 2, "stage_layers": (3,)}, "stage_layers has 1 stages, but pp is 2"),
        ({"stage_layers": 7}, "stage_layers is 7: set it to a tuple of numbers of layers"),
        ({"stage_layers": (3, 3)}, "stage_layers has 2 stages, but pp is 1"),
        ({"pp": 2, "stage_layers": (7, 0)}, "a stage's number of layers is 0: set it to an integer from 1"),
        ({"pp": 2, "stage_layers": (3, 2)}, r"stage_layers is \[3, 2\], 5 layers in total, but the model has 7.* \+2"),
        ({"pp": 8}, "pp is 8, but the model has 7 layers: set pp to 7 or less"),
    ],
)
def test_stages_that_do_not_fit_are_refused(layout, words):
    with pytest.raises(UserError, match=words):
        Layout(**layout).check(HeadShape(4, 2), 7)
