"""Experts as grouped products in Triton: in Triton's interpreter, and on a CUDA device where there is one."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.library import opcheck

pytest.importorskip("triton", reason="Triton is not installed; it comes with torch for CUDA")

from test_experts import COLUMNS, NORM_EPS, norm_of, some_taken
from test_native_attention import bits, seeded
from test_native_linear import DTYPES, name
from test_triton import CUDA, ROUNDING, on_cuda_alone

from launches import Launches
from longhelix.compute.kernels import PLAIN, Experts, Weight, native, reference, route, run_experts
from longhelix.compute.kernels.experts import SWIGLU, addresses
from longhelix.compute.kernels.triton import expert_rows, experts
from longhelix.compute.kernels.triton.expert_rows import most_places_and_tiles, sort_rows
from longhelix.compute.models.batch import RowSharding
from longhelix.compute.models.experts import ExpertFFN
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.spec import Activation, LayerSpec, MoE, Routing
from longhelix.spec.model import CheckpointFormat
from tensors import weights_of
from tiers import few
from triton_interpreter import interpret

pytestmark = pytest.mark.unit

WIDEST = {3: 64, 4: 32, 5: 0, 6: 96, 9: 144}  # columns of the experts that are here, of ten
NUM_EXPERTS = 10


@pytest.fixture(scope="module", params=["cpu", CUDA])
def device(request):
    """Where the kernels run: on the CPU in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu":
            interpret(patch)
        yield torch.device(request.param)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed))


def make(
    columns: dict[int, int], hidden: int, dtype: torch.dtype, device: torch.device, seed: int = 0, sides: int = 2
) -> Experts:
    """Experts of these numbers with so many columns, in rows, that the kernels of GPUs find."""

    def weights(sizes: list[tuple[int, int]], seed: int) -> tuple[Weight, ...]:
        made = [normal(*size, seed=seed + at) / max(size[1], 1) ** 0.5 for at, size in enumerate(sizes)]
        return tuple(Weight(w.to(dtype).to(device), name(dtype), *w.shape, PLAIN) for w in made)

    gate_up = weights([(sides * width, hidden) for width in columns.values()], seed)
    down = weights([(hidden, width) for width in columns.values()], seed + 100)
    rows_e = torch.zeros(len(columns), dtype=torch.int64, device=device)
    found = addresses(tuple(columns), gate_up, down, NUM_EXPERTS)
    return Experts(tuple(columns), gate_up, down, rows_e, found)


def run(
    x_TH: Tensor,
    held: Experts,
    taken: tuple[Tensor, Tensor],
    residual: Tensor | None = None,
    activation: Activation = SWIGLU,
) -> Tensor:
    device = held.rows_e.device
    norm = norm_of(x_TH.shape[1], x_TH.dtype).to(device)
    taken = [part.to(device) for part in taken]
    residual = None if residual is None else residual.to(device)
    around = {"norm": norm, "norm_eps": NORM_EPS, "residual": residual, "activation": activation}
    out_TH = run_experts(x_TH.to(device), held, *taken, **around)
    assert out_TH.dtype == x_TH.dtype
    return out_TH.cpu()


def in_float64(
    x_TH: Tensor,
    held: Experts,
    taken: tuple[Tensor, Tensor],
    residual: Tensor | None,
    activation: Activation = SWIGLU,
) -> Tensor:
    """The same by definition, row by row."""
    x_TH, norm = x_TH.double(), norm_of(x_TH.shape[1], x_TH.dtype).double()
    normed_TH = x_TH * torch.rsqrt(x_TH.square().mean(1, keepdim=True) + NORM_EPS) * norm
    out_TH = torch.zeros_like(x_TH) if residual is None else residual.double().clone()
    for row, (weights_Y, experts_Y) in enumerate(zip(*taken, strict=True)):
        for weight, number in zip(weights_Y.double(), experts_Y.tolist(), strict=True):
            if number not in held.ids:
                continue
            at = held.ids.index(number)
            product = held.gate_up[at].values.cpu().double() @ normed_TH[row]
            inner = reference.activate(product.unsqueeze(0), activation)[0]
            out_TH[row] += weight * (held.down[at].values.cpu().double() @ inner)
    return out_TH


def test_counts_of_many_programs_add_up(device):
    """800 pairs are those of 7 programs, and an expert has some of all."""
    rows_e, index_E = torch.zeros(2, dtype=torch.int64, device=device), torch.tensor([1, -1, 0], dtype=torch.int32)
    experts_TY = torch.arange(400)[:, None] * torch.tensor([0, 1]) % 2 + torch.tensor([2, 0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_rows, "_BLOCKS", 2)
        found = sort_rows(experts_TY.to(device), index_E.to(device), rows_e, 16)
    pairs = torch.cat([torch.arange(0, 800, 2), torch.arange(1, 800, 4)])
    assert rows_e.tolist() == [400, 200]
    assert torch.equal(found.pair_X[:600].cpu().long(), pairs)
    assert found.num_tiles.tolist() == [25 + 13]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(0, 90),
    per_row=st.integers(1, 5),
    held=st.lists(st.integers(0, 69), unique=True, min_size=1, max_size=50),
    tile_rows=st.sampled_from([16, 64]),
    skewed=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_rows_are_sorted_by_expert_in_the_order_of_pairs(rows, per_row, held, tile_rows, skewed, seed, device):
    """Numbers up to 69 are experts, of which some are here; from 70 on they are none."""
    if not rows:
        return
    liked = torch.rand(rows, 75, generator=seeded(seed)) + (torch.arange(75) < 5) * skewed
    experts_TY = liked.topk(per_row, dim=1).indices
    index_E = torch.full((70,), -1, dtype=torch.int32)
    index_E[torch.tensor(held)] = torch.arange(len(held), dtype=torch.int32)
    rows_e = torch.arange(len(held)).to(device)
    found = sort_rows(experts_TY.to(device), index_E.to(device), rows_e, tile_rows)
    place_X, pair_X, tiles_X3, (num_tiles,) = (part.cpu() for part in found)
    by_expert = [(experts_TY.flatten() == number).nonzero().flatten() for number in held]
    counts = [len(pairs) for pairs in by_expert]
    assert (rows_e.cpu() - torch.arange(len(held))).tolist() == counts
    expected_X = torch.cat(by_expert)
    assert torch.equal(pair_X[: len(expected_X)].long(), expected_X)
    expected_place_X = torch.full((rows * per_row,), -1)
    expected_place_X[expected_X] = torch.arange(len(expected_X))
    assert torch.equal(place_X.long(), expected_place_X)
    starts = [sum(counts[:at]) for at in range(len(held))]
    tiles = [
        [at, starts[at] + first, min(tile_rows, counts[at] - first)]
        for at in range(len(held))
        for first in range(0, counts[at], tile_rows)
    ]
    assert tiles_X3[:num_tiles].tolist() == tiles
    assert (len(pair_X), len(tiles_X3)) == most_places_and_tiles(rows, per_row, len(held), tile_rows)


@pytest.mark.parametrize("dtype", few(DTYPES), ids=str)
@pytest.mark.parametrize(
    ("columns", "hidden", "rows", "per_row"),
    few(
        [
            ({2: 40, 7: 24}, 72, 20, 4),  # rows of weights that begin anywhere, in float16 and bfloat16
            ({0: 33}, 40, 9, 1),
            (WIDEST, 96, 1, 6),
            (WIDEST, 96, 37, 4),  # past a tile's edge
            (WIDEST, 96, 130, 3),  # tiles of many rows
            ({2: 7, 7: 9}, 50, 5, 4),
            (dict.fromkeys(range(10), 32), 32, 140, 9),
        ],
        2,
    ),
    ids=str,
)
def test_experts_equal_their_definition(columns, hidden, rows, per_row, dtype, device):
    held, residual = make(columns, hidden, dtype, device), normal(rows, hidden, seed=7).to(dtype)
    x_TH, taken = normal(rows, hidden, seed=6).to(dtype), some_taken(rows, NUM_EXPERTS, per_row, 8)
    # Roundings of the norm, the activations and the sum; of products in float32 a few more.
    tolerance = 4 * ROUNDING[dtype] + 2**-18
    for added in (None, residual):
        expected_TH = in_float64(x_TH, held, taken, added)
        error_TH = (run(x_TH, held, taken, added).double() - expected_TH).abs()
        assert (error_TH <= tolerance * expected_TH.abs().amax(1, keepdim=True).clamp(min=1)).all()
    counts_E = torch.bincount(taken[1].flatten(), minlength=NUM_EXPERTS)
    assert held.rows_e.tolist() == [2 * counts_E[number] for number in columns]


@pytest.mark.parametrize("dtype", few(DTYPES), ids=str)
def test_experts_equal_the_reference(dtype, device):
    held = make(COLUMNS, 96, dtype, device)
    counted = Experts(held.ids, held.gate_up, held.down, held.rows_e.clone())  # without addresses
    x_TH, taken = normal(70, 96, seed=6).to(dtype), some_taken(70, NUM_EXPERTS, 4, 8)
    expected_TH = run(x_TH, counted, taken).float()
    error_TH = (run(x_TH, held, taken).float() - expected_TH).abs()
    assert (error_TH <= 5 * ROUNDING[dtype] * expected_TH.abs().amax(1, keepdim=True) + 1e-6).all()
    assert torch.equal(held.rows_e, counted.rows_e)


def test_hidden_channels_take_turns_where_memory_is_short(device, monkeypatch):
    held, x_TH = make(COLUMNS, 272, torch.bfloat16, device), normal(20, 272, seed=6).bfloat16()
    taken = some_taken(20, NUM_EXPERTS, 4, 8)
    whole = run(x_TH, held, taken, x_TH)
    made = []
    new_empty = Tensor.new_empty

    def recorded(tensor, *size, **options):
        result = new_empty(tensor, *size, **options)
        made.append(result.nbytes if result.dtype == torch.float32 else 0)
        return result

    monkeypatch.setattr(experts, "_PARTS_BYTES", 80 * 130 * 4)
    monkeypatch.setattr(Tensor, "new_empty", recorded)
    assert torch.equal(bits(run(x_TH, held, taken, x_TH)), bits(whole))
    assert max(made) == 80 * 128 * 4


def test_a_rows_bits_depend_on_no_other_rows_experts(device):
    held, x_TH = make(COLUMNS, 96, torch.bfloat16, device), normal(40, 96, seed=6).bfloat16()
    weights_TY, experts_TY = some_taken(40, NUM_EXPERTS, 4, 8)
    others_TY = some_taken(40, NUM_EXPERTS, 4, 9)[1]
    others_TY[5], others_TY[39] = experts_TY[5], experts_TY[39]
    first, second = (run(x_TH, held, (weights_TY, chosen)) for chosen in (experts_TY, others_TY))
    for row in (5, 39):
        assert torch.equal(bits(first[row]), bits(second[row]))
    assert not torch.equal(first, second)


def test_a_rows_experts_are_summed_in_its_own_order(device):
    """Three terms of which two cancel: what is left of the third depends on the order."""
    held = make({0: 16, 1: 16, 2: 16}, 32, torch.float32, device)
    for weights in (held.gate_up, held.down):
        for weight in weights[1:]:
            weight.values.copy_(weights[0].values)
    x_TH = normal(2, 32, seed=6).sign()[:1].expand(2, 32)
    weights_TY = torch.tensor([[2.0**26, 1.0, -(2.0**26)], [2.0**26, -(2.0**26), 1.0]])
    out_TH = run(x_TH, held, (weights_TY, torch.tensor([[0, 1, 2], [0, 1, 2]])))
    one_TH = run(x_TH[:1], held, (torch.ones(1, 3), torch.tensor([[0, 8, 9]])))
    assert torch.equal(out_TH[1], one_TH[0])
    assert not torch.equal(out_TH[0], one_TH[0])


def test_no_rows_no_experts_no_columns_and_experts_that_nobody_has(device):
    x_TH, taken = normal(5, 32, seed=6), some_taken(5, NUM_EXPERTS, 2, 13)
    held = make(COLUMNS, 32, torch.float32, device)
    assert run(x_TH[:0], held, (taken[0][:0], taken[1][:0])).shape == (0, 32)
    for columns in ({}, dict.fromkeys(range(NUM_EXPERTS), 0)):
        empty = make(columns, 32, torch.float32, device)
        assert torch.equal(run(x_TH, empty, taken), torch.zeros(5, 32))
        assert torch.equal(run(x_TH, empty, taken, x_TH), x_TH)
        assert empty.rows_e.sum() == (20 if columns else 0)
    for number in (NUM_EXPERTS, -1, -(10**10), 10**10):
        nobody = taken[0], torch.full_like(taken[1], number)
        assert torch.equal(run(x_TH, held, nobody, x_TH), x_TH)
    assert held.rows_e.sum() == 0


def test_what_experts_would_read_as_something_else_is_refused(device):
    x_TH, residual = normal(5, 32, seed=6), normal(5, 32, seed=7)
    held, (weights_TY, experts_TY) = make(COLUMNS, 32, torch.float32, device), some_taken(5, NUM_EXPERTS, 2, 13)
    for rows, taken, added, words in (
        (x_TH, (weights_TY.double(), experts_TY), None, "weights have the dtype torch.float64"),
        (x_TH, (weights_TY, experts_TY.int()), None, "expert ids torch.int32"),
        (x_TH, (weights_TY[:3], experts_TY[:3]), None, "for 5 rows, expert weights have the shape"),
        (x_TH, (weights_TY, experts_TY), residual[:3], "has a residual of shape"),
        (normal(5, 16, seed=6), (weights_TY, experts_TY), None, "rows have 16 inputs, but the weight takes 32"),
    ):
        with pytest.raises(ValueError, match=words):
            run(rows, held, taken, added)
    taken, norm = (weights_TY.to(device), experts_TY.to(device)), norm_of(32, torch.bfloat16).to(device)
    with pytest.raises(ValueError, match="have a norm of"):
        run_experts(x_TH.to(device), held, *taken, norm=norm)
    narrow = residual.bfloat16()
    taken = weights_TY, experts_TY
    assert torch.equal(run(x_TH, held, taken, narrow), run(x_TH, held, taken, narrow.float()))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "relu_squared", "clamped_swiglu"])
def test_experts_have_any_activation(function, gated, device):
    activation = Activation(function, gated)
    held = make(COLUMNS, 32, torch.float32, device, sides=activation.projections)
    x_TH, taken = normal(20, 32, seed=6), some_taken(20, NUM_EXPERTS, 4, 8)
    wanted_TH = in_float64(x_TH, held, taken, None, activation)
    torch.testing.assert_close(run(x_TH, held, taken, None, activation).double(), wanted_TH, rtol=1e-5, atol=1e-5)


def test_a_row_without_a_number_reaches_no_other(device):
    held, x_TH = make(COLUMNS, 32, torch.bfloat16, device), normal(20, 32, seed=6).bfloat16()
    taken = some_taken(20, NUM_EXPERTS, 4, 8)
    clean = run(x_TH, held, taken)
    x_TH[3] = math.nan
    broken = run(x_TH, held, taken)
    assert broken[3].isnan().all()
    others = torch.arange(20) != 3
    assert torch.equal(bits(broken[others]), bits(clean[others]))


@pytest.mark.parametrize("rows", few([0, 5]))
def test_torch_accepts_the_op_and_its_fake(rows, device):
    held, x_TH = make(COLUMNS, 32, torch.float32, device), normal(rows, 32, seed=17).to(device)
    taken = [part.to(device) for part in some_taken(rows, NUM_EXPERTS, 2, 18)]
    for residual in (None, x_TH.clone()):
        around = norm_of(32, x_TH.dtype).to(device), NORM_EPS, residual, x_TH.dtype, None, held.rows_e
        arguments = x_TH, [], [], list(held.addresses), *taken, "silu", True, *around, held.ids
        weights = list(COLUMNS.values()), 0, 32, "float32", "plain", False
        results = opcheck(torch.ops.longhelix.run_experts.default, (*arguments, *weights))
        assert set(results.values()) == {"SUCCESS"}


def test_a_compiled_layer_holds_the_op_and_counts_its_rows(device, monkeypatch):
    monkeypatch.setattr(native, "module", None)
    torch._dynamo.reset()
    held, moe, norm = make(COLUMNS, 32, torch.float32, device), MoE(NUM_EXPERTS, 2, 8), norm_of(32, torch.float32)
    x_TH, logits_TE = normal(6, 32, seed=20).to(device), normal(6, NUM_EXPERTS, seed=21).to(device)

    def call(logits_TE: Tensor, held: Experts) -> Tensor:
        return run_experts(x_TH, held, *route(logits_TE, None, moe), norm=norm.to(device), norm_eps=NORM_EPS) + 1

    counted = replace(held, rows_e=held.rows_e.clone())
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits_TE, counted), call(logits_TE, held))
    assert torch.equal(counted.rows_e, held.rows_e)
    assert held.rows_e.sum() > 0


def layer(moe: MoE, held: list[int], hidden: int, device: torch.device) -> ExpertFFN:
    """An FFN with experts of 32 columns, of which a rank has `held`, in rows and with addresses."""
    fields = {"layers": (LayerSpec((), (moe,)),), "rms_norm_eps": NORM_EPS, "checkpoint": CheckpointFormat("bfloat16")}
    spec = type("Spec", (), fields)()
    layout = type("Held", (), {"experts": lambda self, count, rank: held})()
    weights = {"ffn_norm": norm_of(hidden, torch.bfloat16)}
    weights["router"] = normal(moe.num_experts, hidden, seed=1)
    if moe.routing.sigmoid:
        weights["routing_bias"] = normal(moe.num_experts, seed=2) / 10
    stems = [f"experts.{number}." for number in held] + ["shared."] * (moe.shared_size > 0)
    for at, stem in enumerate(stems):
        weights[stem + "gate_up"] = normal(64, hidden, seed=10 + at) / 8
        weights[stem + "down"] = normal(hidden, 32, seed=50 + at) / 8
    group = RankGroup((0,), 0, None)
    weights = {f"layers.0.{name}": weight for name, weight in weights.items()}
    given = weights_of(weights, "bfloat16", torch.bfloat16, device)
    return ExpertFFN(spec, 0, Mesh(layout, 0, group, group, group), given)


MOES = [
    MoE(12, 3, 32),
    MoE(12, 3, 32, shared_size=32, routing=Routing(sigmoid=True, num_groups=4, groups_per_token=2, scale=2.5)),
]


@pytest.mark.parametrize("rows", few([1, 40]))
@pytest.mark.parametrize("moe", MOES, ids=["softmax", "sigmoid in groups"])
def test_nothing_of_a_layer_with_experts_waits_for_the_device(moe, rows, device, monkeypatch):
    """Whatever the rows and the experts, the same few launches; nothing is read back."""
    monkeypatch.setattr(native, "module", None)  # which packs weights
    x_TH = normal(rows, 64, seed=3).bfloat16().to(device)
    launches, batch = set(), SimpleNamespace(padding_T=None, sharding=RowSharding())
    for held in ([0, 1, 2, 3], [7], [*range(12)]):
        ffn = layer(moe, held, 64, device)
        if device.type == "cpu":  # where weights have no addresses by themselves
            (own,) = ffn.experts
            found = addresses(own.ids, own.gate_up, own.down, moe.num_experts + 1)
            listed, ffn.experts = ffn.experts, (replace(own, addresses=found),)
        with monkeypatch.context() as patch, Launches(patch) as counted:
            out_TH = ffn(x_TH, batch)
        assert not counted.waits
        assert counted.operators["sort"] == (2 if moe.routing.sigmoid else 1)  # what routing runs is seen
        launches.add((tuple(sorted(counted.kernels.items())), tuple(sorted(counted.operators.items()))))
        if device.type == "cpu":
            kernels = ["_count", "_down", "_gate_up", "_norm", "_place", "_sum_parts"]
            assert counted.kernels == dict.fromkeys(kernels, 1)
            ffn.experts = listed
            assert (out_TH - ffn(x_TH, batch)).abs().max() <= 2**-6 * out_TH.abs().max()
    assert len(launches) == 1


def test_the_count_sees_the_reference_wait(device, monkeypatch):
    """What is counted above is not counted in vain."""
    held = make(COLUMNS, 32, torch.float32, device)
    listed = Experts(held.ids, held.gate_up, held.down, held.rows_e)
    with monkeypatch.context() as patch, Launches(patch) as counted:
        run(normal(5, 32, seed=6), listed, some_taken(5, NUM_EXPERTS, 2, 8))
    assert (counted.waits["bincount"], counted.waits["tolist"]) == (1, 1)
    assert not counted.kernels


@pytest.mark.parametrize(
    ("rows", "per_row", "held", "num_experts", "hidden", "columns", "gate_up", "down"),
    [
        (1, 8, 256, 256, 4096, 256, 8 * 16, 8 * 256),  # 8 experts of 16 columns at a time
        (1, 8, 32, 256, 7168, 2048, 8 * 128, 8 * 448),  # of which only one may be here
        (1, 2, 8, 8, 4096, 14336, 2 * 448, 2 * 128),
        (64, 8, 32, 256, 7168, 2048, 62 * 64, 62 * 224),  # 32 experts of more than a tile at most
        (512, 8, 32, 256, 7168, 2048, 286 * 64, 286 * 224),
        (8192, 8, 32, 256, 1024, 2048, 543 * 16, 543 * 8),
    ],
)
def test_programs_are_of_columns_so_that_few_rows_are_many(
    rows, per_row, held, num_experts, hidden, columns, gate_up, down, device, monkeypatch
):
    grids = {}

    class Recorder:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *values, **named: grids.setdefault(self.name, math.prod(grid))

    for module, names in ((expert_rows, ("_count", "_place")), (experts, ("_norm", "_gate_up", "_down", "_sum_parts"))):
        for kernel in names:
            monkeypatch.setattr(module, kernel, Recorder(kernel))
    x_TH = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
    found = torch.empty(num_experts, dtype=torch.int32), torch.empty(held, 3, dtype=torch.int64)
    taken = torch.empty(rows, per_row), torch.empty(rows, per_row, dtype=torch.int64)
    rows_e = torch.empty(held, dtype=torch.int64)
    experts.run_experts(x_TH, *found, [columns] * held, *taken, rows_e, SWIGLU, x_TH[0], 1e-6, None)
    assert (grids["_gate_up"], grids["_down"]) == (gate_up, down)


# What only a device can show


@on_cuda_alone
def test_a_graph_replays_with_other_rows_and_experts(device):
    held = make(COLUMNS, 128, torch.bfloat16, device)
    norm = norm_of(128, torch.bfloat16).to(device)
    inputs = [
        (normal(40, 128, seed=seed).bfloat16().to(device), *(part.to(device) for part in some_taken(40, 10, 4, seed)))
        for seed in range(3)
    ]
    own = [part.clone() for part in inputs[0]]

    def call() -> Tensor:
        return run_experts(own[0], held, *own[1:], norm=norm, norm_eps=NORM_EPS, residual=own[0])

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TH = call()
    for step in inputs:
        for mine, value in zip(own, step, strict=True):
            mine.copy_(value)
        held.rows_e.zero_()
        graph.replay()
        assert held.rows_e.tolist() == [int((step[2] == number).sum()) for number in held.ids]
        again = run_experts(step[0], held, *step[1:], norm=norm, norm_eps=NORM_EPS, residual=step[0])
        assert torch.equal(bits(out_TH.cpu()), bits(again.cpu()))
