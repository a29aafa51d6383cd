"""One rank of test_ten_million: the engine over ten million tokens, and beside it the same in float64.

The model has one layer, so its keys depend on tokens and positions alone: while the prompt's bulk is taken in, its
attention is left out, all 5 * 10^13 pairs of it. Everything else is the engine: scheduler, embedding, products,
rotation, write, exchange, and full attention for the rows that end the prompt and for those decoded after it.

The model retrieves: row r of these has a token whose query finds, by its rotation, the one key at position FOUND[r]
that outweighs ten million others together; its value names the next row's token.
"""

import json
import math
import operator
import random
import sys
from array import array
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import toy
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1]))
from longhelix.compute.kernels import KVLayer, native
from longhelix.compute.models import attention, overlap
from longhelix.engine.workers.started_rank import StartedRank
from longhelix.scheduler.kv.placement import make_placement
from longhelix.scheduler.loop import Loop
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.spec import RopeSpec
from longhelix.spec.layout import HeadShape
from packed_pool import LARGEST, stored
from scheduler_settings import scheduler_config
from tensors import Tensors
from toy_model import attention_of, toy_model

TOKENS = 10_000_000
CHUNK_TOKENS = 62_500
GROWTH_LIMIT_TOKENS = 4_999_968
KVP = 2
HEADS, HEAD_SIZE, HIDDEN, FFN = 3, 16, 48, 32
VOCAB = HIDDEN  # embeddings are unit vectors, so a column of the projection is a token's queries, key and value
FIRST = TOKENS + 6  # the position of row 0, the prompt's last; row 10 begins a KV block
CHECKED = 2  # rows of the prompt's last chunk that are compared
FOUND = (
    3, 5_000_000, 9_999_999, 0, GROWTH_LIMIT_TOKENS - 1, GROWTH_LIMIT_TOKENS, KVP * GROWTH_LIMIT_TOKENS - 1, 2_500_001,
    7_654_321, TOKENS - 16, FIRST, FIRST + 11,
)  # fmt: skip
ROWS = len(FOUND)  # row r has token r at position FIRST + r
NEEDLE = ROWS + 1  # the token at FOUND[r] is NEEDLE + r, but for the last two, which rows put there themselves
PLAIN = NEEDLE + ROWS - 2  # tokens from here on fill the rest
QUERY_NORM = 6.5
SCORE = 19.0  # of a row with its needle; the other keys together are worth nearly 18
UNIT, PAIR_UNIT = 2.0**-24, 2.0**-8  # what one rounding to float32, or to bfloat16, may change, relatively
SPEC = toy_model(
    architecture="llama",
    num_layers=1,
    hidden_size=HIDDEN,
    num_query_heads=HEADS,
    num_kv_heads=1,
    head_size=HEAD_SIZE,
    ffn_size=FFN,
    vocab_size=VOCAB,
    max_positions=2 * TOKENS,
    rms_norm_eps=1e-9,
    rope=RopeSpec(theta=500_000.0),
    dtype="float32",
)
FREQUENCIES_R = attention_of(SPEC).rope.theta ** (-np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)


def rotated(x, positions):
    """x (..., C) turned by float64 angles at integer positions (...)."""
    pairs = x[..., : HEAD_SIZE // 2] + 1j * x[..., HEAD_SIZE // 2 :]
    turned = pairs * np.exp(1j * np.asarray(positions, np.float64)[..., None] * FREQUENCIES_R)
    return np.concatenate((turned.real, turned.imag), axis=-1)


def make_tensors():
    """Random ones, and the queries, keys and values that find each other."""
    normal = np.random.default_rng(1).standard_normal
    queries, keys, values = (normal((VOCAB, heads, HEAD_SIZE)) for heads in (HEADS, 1, 1))
    queries *= QUERY_NORM / norm(queries)
    answers = np.zeros((HIDDEN, HEAD_SIZE))
    for row, position in enumerate(FOUND):
        query, needle = queries[row, row % HEADS], needle_token(row)
        facing = rotated(query, FIRST + row - position)
        keys[needle] = facing * SCORE * math.sqrt(HEAD_SIZE) / QUERY_NORM**2
        values[needle] = 4 * np.eye(HEAD_SIZE)[row]
        answers[row + 1, row] = 1.0
    projections = {"q_proj": queries, "k_proj": keys, "v_proj": values}
    output = np.tile(answers, HEADS) + normal((HIDDEN, HEADS * HEAD_SIZE)) / 16
    at = "model.layers.0."
    tensors = {at + f"self_attn.{name}.weight": table.reshape(VOCAB, -1).T for name, table in projections.items()} | {
        at + "self_attn.o_proj.weight": output,
        at + "input_layernorm.weight": np.full(HIDDEN, HIDDEN**-0.5),  # a unit vector stays one
        "model.embed_tokens.weight": np.eye(VOCAB),
        "lm_head.weight": 2 * np.eye(VOCAB) + normal((VOCAB, HIDDEN)) / 16,
    }
    return Tensors.of(SPEC, {name: torch.from_numpy(tensor).float() for name, tensor in tensors.items()})


def needle_token(row):
    return {ROWS - 2: 0, ROWS - 1: ROWS - 1}.get(row, NEEDLE + row)


def make_prompt():
    tokens = np.random.default_rng(2).integers(PLAIN, VOCAB, FIRST + 1)
    tokens[list(FOUND[:-2])] = [needle_token(row) for row in range(ROWS - 2)]
    tokens[FIRST] = 0
    return tokens


# ----------------------------------------------------------------------------------------------------------------------
# The engine.
# ----------------------------------------------------------------------------------------------------------------------


class Watch:
    """What the rows that matter had for queries, limits and states, step by step.

    A decode step may run from a tape: without Python, into the tensors of the step that was recorded.
    """

    def __init__(self):
        self._attend, self._exchange = attention.partial_attention, overlap.exchange
        attention.partial_attention, overlap.exchange = self.attend, self.exchange
        self.last = {}
        self.steps = []

    def attend(self, q_TqC, layer, blocks_X, extents_B2, row_starts_B, limits_T, *rest, **options):
        if len(q_TqC) == CHUNK_TOKENS:
            self.last = {}
            return torch.zeros_like(q_TqC), q_TqC.new_zeros(q_TqC.shape[:2])
        out_TqC, lse_Tq = self._attend(q_TqC, layer, blocks_X, extents_B2, row_starts_B, limits_T, *rest, **options)
        self.last = {"q": q_TqC, "limits": limits_T, "out": out_TqC, "lse": lse_Tq}
        return out_TqC, lse_Tq

    def exchange(self, *arguments):
        merged_TnC = self._exchange(*arguments)
        if self.last:
            self.last["merged"] = merged_TnC
        return merged_TnC

    def keep(self):
        if self.last:
            self.steps.append({name: tensor.clone() for name, tensor in self.last.items()})

    def rows(self, name):
        """The last ones of all steps that were kept, float64."""
        return np.concatenate([step[name].double().numpy() for step in self.steps])[1 - CHECKED - ROWS :]


@dataclass
class Run:
    """What the engine did: new tokens and their logprobs (first rank), and its pool."""

    watch: Watch
    tokens: list[int]
    logprobs: list[dict[int, float]]
    layer: KVLayer
    owners: np.ndarray  # of every block of the request, in position order
    block_ids: np.ndarray


class Recorded(toy.AtOnce):
    """Keeps owner and id of every block of the request."""

    def __init__(self, runner):
        super().__init__(runner)
        self.blocks = []

    def submit(self, step):
        self.blocks += [block for chunk in step.chunks for block in chunk.new_blocks]
        self.blocks += [block for _, block in step.changes.grown]
        super().submit(step)


def run_engine(mesh, tensors, prompt, kv_dtype, placement):
    num_blocks = FIRST // toy.BLOCK_TOKENS // KVP + 50
    watch = Watch()  # before the layers, which keep the function that attends
    runner = toy.make_runner(SPEC, mesh, tensors, kv_dtype, num_blocks)
    scheduler = Scheduler(
        scheduler_config(
            kvp=KVP,
            num_blocks=num_blocks,
            max_model_len=2 * TOKENS,
            chunk_tokens=CHUNK_TOKENS,
            placement=placement,
            growth_limit_tokens=GROWTH_LIMIT_TOKENS,
        )
    )
    for allocator in scheduler.pool.allocators:
        ids = list(range(num_blocks))
        random.Random(3).shuffle(ids)  # so that no block lies where it would by chance
        allocator._free[0].ids = array("q", ids)
    at_once = Recorded(runner)
    loop, tokens, logprobs = Loop(scheduler, at_once, lambda: 0.0), [], []
    sampling = SamplingParams(max_new_tokens=ROWS, logprobs=VOCAB)
    loop.add(Request(0, array("i", prompt.tolist()), sampling, frozenset(), 0, 0.0))
    while (stepped := loop.step()) is not None:
        if stepped[0].num_tokens:  # the last step only tells of the end
            watch.keep()
        for event in stepped[1]:
            tokens.append(event.sampled.token_id)
            logprobs.append(dict(event.sampled.logprobs))
    owners, ids = np.array([(block.owner, block.id) for block in at_once.blocks]).T
    return Run(watch, tokens, logprobs, runner.pool.layers[0]["kv"], owners, ids)


# ----------------------------------------------------------------------------------------------------------------------
# The same in float64.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class State:
    """A softmax of X queries over some keys: sums of weights, of weights times V columns, and of these squared."""

    base_X1: Tensor
    total_X1: Tensor
    sums_XV: Tensor
    squares_XV: Tensor

    @classmethod
    def of(cls, scores_XS, *columns):
        values_SV = torch.from_numpy(np.concatenate(columns, axis=1))
        base_X1 = scores_XS.amax(1, keepdim=True).clamp(min=-1e9)  # a number even where no key is seen
        weights_XS = (scores_XS - base_X1).exp_()
        total_X1, sums_XV = weights_XS.sum(1, keepdim=True), weights_XS @ values_SV
        return cls(base_X1, total_X1, sums_XV, weights_XS.square_() @ values_SV.square_())

    def __add__(self, other):
        base_X1 = torch.maximum(self.base_X1, other.base_X1)
        mine, more = ((part.base_X1 - base_X1).exp() for part in (self, other))
        return State(
            base_X1,
            self.total_X1 * mine + other.total_X1 * more,
            self.sums_XV * mine + other.sums_XV * more,
            self.squares_XV * mine**2 + other.squares_XV * more**2,
        )

    def over_all_ranks(self):
        own = torch.cat((self.base_X1, self.total_X1, self.sums_XV, self.squares_XV), dim=1)
        parts = [torch.empty_like(own) for _ in range(KVP)]
        dist.all_gather(parts, own)
        columns = self.sums_XV.shape[1]
        return reduce(operator.add, (State(*part.split((1, 1, columns, columns), dim=1)) for part in parts))

    @property
    def lse(self):
        return (self.base_X1 + self.total_X1.log()).squeeze(1).numpy()

    def mean(self, kind):
        """The weighted mean of the first or second sixteen columns."""
        return (self.sums_XV / self.total_X1)[:, kind * HEAD_SIZE : (kind + 1) * HEAD_SIZE].numpy()


@dataclass
class Exact:
    """`stored`: over keys and values as the pool has them, and queries as the kernels take them. `true`: over those
    before any rounding. `most`: with every score, and the size of every value, as large as roundings could make it.

    Columns of values: themselves and their sizes; of `most`, these alone.
    """

    stored: State
    true: State
    most: State

    def __add__(self, other):
        return Exact(self.stored + other.stored, self.true + other.true, self.most + other.most)

    def over_all_ranks(self):
        return Exact(*(state.over_all_ranks() for state in (self.stored, self.true, self.most)))

    def tolerances_of_stored(self, size_X1):
        """Of outputs and LSEs: what float32 may add, and the rounding of weights to bfloat16. `size_X1`: |q| |k|."""
        # A score: products of sixteen channels, and scales. Sums over tokens: a thousand additions in a row at most.
        weight_X1 = np.expm1(26 * UNIT * size_X1 / math.sqrt(HEAD_SIZE)) + 1000 * UNIT
        # Roundings of many weights cancel: at most eight standard deviations of their sum.
        squares_XC = (self.stored.squares_XV[:, :HEAD_SIZE].sqrt() / self.stored.total_X1).numpy()
        rounding_XC = PAIR_UNIT * np.minimum(self.stored.mean(1), 8 / math.sqrt(3) * squares_XC)
        return 2 * weight_X1 * self.stored.mean(1) + rounding_XC, weight_X1[:, 0] + 8 * UNIT * self.stored.lse

    def tolerances_of_true(self, size_X1):
        """Those, and what quantisation may do: each weight grows or shrinks by no more than in `most`, relatively."""
        out_XC, lse_X = self.tolerances_of_stored(size_X1)
        more_X = self.most.lse - self.true.lse
        moved_XC = np.exp(2 * more_X)[:, None] * self.most.mean(0) - self.true.mean(1)
        return out_XC + moved_XC, lse_X + more_X


FIGURES = {}  # the largest differences, as they are and in units of their tolerance


def compare(name, found, expected, tolerance):
    """Every number within its own tolerance, which a NaN is not."""
    difference = np.abs(found - expected)
    worst = float(difference.max()), float((difference / tolerance).max())
    FIGURES[name] = tuple(map(max, worst, FIGURES.get(name, worst)))
    assert worst[1] <= 1, f"{name}: {worst[0]:.3g}, {worst[1]:.3g} times the tolerance"


def norm(x):
    return np.linalg.norm(x, axis=-1, keepdims=True)


def half_step(x_SC, kv_dtype):
    """How far from a number the stored one may lie."""
    if kv_dtype in LARGEST:  # of the scale, which is rounded up to the next bfloat16
        return np.abs(x_SC).max(-1, keepdims=True) / LARGEST[kv_dtype] * (1 + 2 * PAIR_UNIT) / 2 + 0 * x_SC
    return np.abs(x_SC) * PAIR_UNIT


def own_tokens(run, rank, length):
    """A chunk of this rank's tokens at a time: positions, and keys and values as stored."""
    for blocks in np.array_split(np.flatnonzero(run.owners == rank), 1200):
        positions = (blocks[:, None] * toy.BLOCK_TOKENS + np.arange(toy.BLOCK_TOKENS)).ravel()
        written = int((positions < length).sum())
        pool = run.layer.values[:, torch.from_numpy(run.block_ids[blocks])]
        sides = stored(KVLayer(run.layer.format, pool, None)).decoded()
        yield positions[:written], *(side.reshape(-1, HEAD_SIZE)[:written] for side in sides)


def check_places(run, rank, at_T, placement):
    """Owners, and what each row may see here, against the placement's closed form; neither is a round number."""
    placed = make_placement(placement, KVP, toy.BLOCK_TOKENS, GROWTH_LIMIT_TOKENS, int(run.owners[0]))
    assert run.owners.tolist() == [placed.owner(first) for first in range(0, at_T[-1] + 1, toy.BLOCK_TOKENS)]
    limits = [placed.local_length(rank, position + 1) for position in at_T]
    assert run.watch.rows("limits").tolist() == limits
    assert any(limit % toy.BLOCK_TOKENS for limit in limits)


def as_multiplied(q_TqC, kv_dtype):
    """Queries as the kernels take them, in float64: integers of 15 bits for the largest channel where the pool's are
    multiplied as they are, else bfloat16."""
    if kv_dtype not in ("int8", "int4") or native.module.instruction_set() != "avx512":
        return torch.from_numpy(q_TqC).bfloat16().double().numpy()
    most_Tq1 = np.abs(q_TqC).max(-1, keepdims=True)
    return np.rint(q_TqC * (np.float32(127 * 128) / most_Tq1)) * (most_Tq1.astype(np.float64) / (127 * 128))


def attend(run, rank, tables, tokens, at_T, kv_dtype):
    """Exact attention of the rows at `at_T` over this rank's tokens, and |q| |k| at most; checks all that is stored."""
    queries, keys, values = tables
    q_TqC = rotated(queries[tokens[at_T]].reshape(-1, HEADS, HEAD_SIZE), at_T[:, None])
    compare("queries", run.watch.rows("q"), q_TqC, 8 * UNIT * norm(q_TqC))
    rounded_TqC = torch.from_numpy(as_multiplied(run.watch.rows("q"), kv_dtype))
    q_XC, rounded_XC = (x.view(-1, HEAD_SIZE) / math.sqrt(HEAD_SIZE) for x in (torch.from_numpy(q_TqC), rounded_TqC))
    at_X1 = at_T.repeat(HEADS)[:, None]
    parts = []
    for positions_S, stored_k_SC, stored_v_SC in own_tokens(run, rank, len(tokens)):
        k_SC, v_SC = rotated(keys[tokens[positions_S]], positions_S), values[tokens[positions_S]]
        k_step_SC, v_step_SC = half_step(k_SC, kv_dtype), half_step(v_SC, kv_dtype)
        compare("keys", stored_k_SC, k_SC, k_step_SC + 16 * UNIT * norm(k_SC))
        compare("values", stored_v_SC, v_SC, v_step_SC + 16 * UNIT * norm(v_SC))
        unseen_XS = torch.zeros(1, 1)
        if positions_S[-1] > at_T[0]:
            unseen_XS = torch.from_numpy(np.where(positions_S > at_X1, -np.inf, 0.0))
        stored_XS = rounded_XC @ torch.from_numpy(stored_k_SC).T + unseen_XS
        true_XS = q_XC @ torch.from_numpy(k_SC).T + unseen_XS
        moved_XS = q_XC.abs() @ torch.from_numpy(k_step_SC + PAIR_UNIT * (np.abs(k_SC) + k_step_SC)).T
        parts.append(
            Exact(
                State.of(stored_XS, stored_v_SC, np.abs(stored_v_SC)),
                State.of(true_XS, v_SC, np.abs(v_SC)),
                State.of(true_XS + moved_XS, np.abs(v_SC) + v_step_SC),
            )
        )
    return reduce(operator.add, parts), norm(q_TqC).reshape(-1, 1) * norm(keys).max()


def check(run, mesh, tensors, prompt, kv_dtype, placement):
    rank, tokens = mesh.rank, np.concatenate((prompt, np.arange(1, ROWS)))
    at_T = np.arange(FIRST + 1 - CHECKED, len(tokens))
    check_places(run, rank, at_T, placement)
    names = (f"model.layers.0.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj"))
    tables = [tensors[name].T.double().numpy() for name in names]
    exact, size_X1 = attend(run, rank, tables, tokens, at_T, kv_dtype)
    out_TqC, lse_Tq, merged_TnC = (run.watch.rows(name) for name in ("out", "lse", "merged"))
    of_stored, of_true = exact.tolerances_of_stored(size_X1), exact.tolerances_of_true(size_X1)
    compare("partial out", out_TqC.reshape(-1, HEAD_SIZE), exact.stored.mean(0), of_stored[0])
    compare("partial lse", lse_Tq.ravel(), exact.stored.lse, of_stored[1])
    compare("partial lse, unquantised", lse_Tq.ravel(), exact.true.lse, of_true[1])

    exact = exact.over_all_ranks()
    of_stored, of_true = exact.tolerances_of_stored(size_X1), exact.tolerances_of_true(size_X1)
    heads = mesh.layout.merged_query_heads(HeadShape(HEADS, 1), rank)

    def own(out_XC):
        return out_XC.reshape(-1, HEADS, HEAD_SIZE)[:, heads.start : heads.stop]

    compare("out", merged_TnC, own(exact.stored.mean(0)), own(of_stored[0]))
    compare("out, unquantised", merged_TnC, own(exact.true.mean(0)), own(of_true[0]))
    if rank == 0:
        found_TV = np.array([[found[token] for token in range(VOCAB)] for found in run.logprobs])
        stored_TV, true_TV = (
            rest_of_model(tensors, tokens[at_T], state.mean(0).reshape(len(at_T), -1))[-ROWS:]
            for state in (exact.stored, exact.true)
        )
        # A row that missed its needle would be off by several units.
        compare("logprobs", found_TV, stored_TV, 1e-3)
        compare("logprobs, unquantised", found_TV, true_TV, 0.1)


def rest_of_model(tensors, tokens_T, out_TX):
    """Logprobs in float64, from the tokens and what the attention of the one layer says."""
    at = "model.layers.0."

    def product(x_TX, name):
        return x_TX @ tensors[f"{name}.weight"].double().T

    def normed(x_TX, name):
        size_T1 = (x_TX.square().mean(1, keepdim=True) + SPEC.rms_norm_eps).sqrt()
        return x_TX / size_T1 * tensors[f"{name}.weight"].double()

    hidden_TH = torch.eye(VOCAB).double()[tokens_T] + product(torch.from_numpy(out_TX), at + "self_attn.o_proj")
    inner_TH = normed(hidden_TH, at + "post_attention_layernorm")
    gate_Tf, up_Tf = product(inner_TH, at + "mlp.gate_proj"), product(inner_TH, at + "mlp.up_proj")
    hidden_TH = hidden_TH + product(gate_Tf * gate_Tf.sigmoid() * up_Tf, at + "mlp.down_proj")
    return product(normed(hidden_TH, "model.norm"), "lm_head").log_softmax(1).numpy()


def main():
    started = StartedRank.from_command_line()
    size, kv_dtype, placement = started.arguments
    mesh = toy.join(started, int(size))
    tensors, prompt = make_tensors(), make_prompt()
    run = run_engine(mesh, tensors, prompt, kv_dtype, placement)
    assert run.tokens == [*range(1, ROWS + 1)], run.tokens
    check(run, mesh, tensors, prompt, kv_dtype, placement)
    print(json.dumps(FIGURES))
    dist.destroy_process_group()
    return 0
