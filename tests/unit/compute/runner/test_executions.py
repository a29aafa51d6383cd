"""The runner on one rank in each of its executions: the same tokens, and what it says of itself."""

import itertools
import os
import shutil
from array import array
from collections import Counter

import pytest
import torch

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import KVFormat, native
from longhelix.compute.kernels.tape import Tape
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.parameters import declare
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner import compiled_layers
from longhelix.compute.runner.execution import Execution
from longhelix.compute.runner.graphed_layers import GraphedLayers
from longhelix.compute.runner.rank import rank_capabilities
from longhelix.compute.runner.runner import ModelRunner
from longhelix.compute.runner.tracer import Tracer
from longhelix.errors import UserError
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.spans import UNTRACED
from longhelix.spec import MoE, Routing
from longhelix.spec.layout import Layout
from scheduler_settings import scheduler_config
from tensors import Tensors
from toy_model import toy_model

pytestmark = pytest.mark.unit

needs_native = pytest.mark.skipif(native.module is None, reason="tapes hold native calls, which are not built here")
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler, and here is none"
)
CPU = torch.device("cpu")
LAYERS, VOCAB = 2, 64
SIZES = {
    "num_layers": LAYERS,
    "hidden_size": 32,
    "num_query_heads": 2,
    "num_kv_heads": 1,
    "head_size": 16,
    "ffn_size": 48,
    "vocab_size": VOCAB,
    "max_positions": 2**20,
}
SPEC = toy_model(**SIZES)
EXPERTS = toy_model("qwen2_moe", **SIZES, moe=MoE(6, 2, 32, shared_size=32, routing=Routing(shared_gate=True)))
PHASES = ["QKV", "attention", "merge and output projection", "FFN"]
NEW_TOKENS = 6


def make_runner(compile, replay, spans=UNTRACED, graphs=False, spec=SPEC, device=CPU):
    """`graphs`: in those of a GPU, which on a CPU are the same calls over the same memory."""
    weights = Weights(Tensors.of(spec), declare(spec, Layout(), 0), torch.float32, "float32", device)
    mesh = Mesh.build(Layout(), 0, spans=spans)
    model = Decoder(spec, mesh, weights, UNTRACED if compile else spans)
    pool = KVPool([{"kv": KVFormat.choose("float32", 16, 1, 16, 16, device)}] * LAYERS, 16, device)
    execution = Execution.resolve(
        compile, replay, whole_batches=False, capabilities=rank_capabilities(mesh, model, pool)
    )
    runner = ModelRunner(spec, mesh, model, pool, execution, spans=spans)
    if graphs and device is CPU:
        runner.layers = GraphedLayers(runner.layers, mesh, 2**20, capture=run_again)
    return runner


def run_again(call):
    result = call().clone()
    return result, lambda: result.copy_(call())


def tokens_of(runner):
    """Of two requests, one of which decodes beside the other's chunks; and how many steps had rows."""
    scheduler = Scheduler(scheduler_config(kvp=1, num_blocks=16, max_model_len=128, chunk_tokens=8))
    tokens = {0: [], 1: []}
    for id, length in enumerate((5, 20)):
        prompt = array("i", [(7 * id + 3 * index) % VOCAB for index in range(length)])
        scheduler.add(Request(id, prompt, SamplingParams(max_new_tokens=NEW_TOKENS), frozenset(), 0, 0.0))
    steps = 0
    while (step := scheduler.schedule(0.0)) is not None:
        result = runner.execute(step)
        steps += result.num_tokens > 0
        for sampled in result.sampled:
            tokens[sampled.sequence_id].append(sampled.token_id)
        scheduler.complete(result)
    return tokens, steps


@pytest.fixture(scope="module")
def expected():
    return tokens_of(make_runner(compile=False, replay=False))[0]


@pytest.mark.parametrize(
    ("compile", "replay", "graphs"),
    [
        pytest.param(False, True, False, marks=needs_native, id="tapes"),
        pytest.param(False, False, True, id="graphs"),
        pytest.param(True, False, False, marks=[needs_compiler, pytest.mark.slow], id="compiled"),
        pytest.param(True, False, True, marks=needs_compiler, id="compiled in graphs"),
    ],
)
def test_every_execution_chooses_the_same_tokens(expected, compile, replay, graphs):
    torch.compiler.reset()
    runner = make_runner(compile, replay, graphs=graphs)
    tokens, steps = tokens_of(runner)
    assert tokens == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == 2
    # Tapes run their layers out of sight, and so does the compiler; what stands for a graph's replay is Python.
    seen, op_by_op = runner.progress().layers, LAYERS * steps
    assert seen == 0 if compile else seen < op_by_op if replay else seen > op_by_op
    assert runner.execution.capabilities.packed == (native.module is not None)
    assert (runner.execution.capabilities.overlaps, runner.execution.capabilities.sums_in_rank_order) == (False, True)


@pytest.mark.parametrize(
    "device",
    [
        CPU,
        pytest.param(
            torch.device("cuda"),
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device that torch can use is here"),
            ],
        ),
    ],
    ids=str,
)
def test_graphs_hold_experts_of_which_padding_takes_none(device):
    graphed = make_runner(compile=False, replay=device is not CPU, graphs=True, spec=EXPERTS, device=device)
    eager = make_runner(compile=False, replay=False, spec=EXPERTS, device=device)
    assert isinstance(graphed.layers, GraphedLayers)
    tokens, _ = tokens_of(graphed)
    assert tokens == tokens_of(eager)[0]
    assert 12 in [bucket.rows for bucket in graphed.layers._graphs]  # of a chunk of 8 rows and one or two decodes
    assert graphed.model.expert_rows() == eager.model.expert_rows()
    rows = 5 + 20 + 2 * (NEW_TOKENS - 1)
    assert [sum(of_layer) for of_layer in eager.model.expert_rows()] == [2 * rows] * LAYERS


def split_events(tracer):
    """The events of what computes and exchanges, and of the host, in their order."""
    events = sorted(tracer.take(), key=lambda event: event.start_us)
    kernels = [event for event in events if event.kind in ("compute", "exchange")]
    return kernels, [event for event in events if event.kind == "host"]


@needs_native
def test_a_traced_run_uses_its_tapes_and_shows_what_is_on_them(expected, monkeypatch):
    runs = Counter()
    run = Tape.run

    def counted(tape):
        runs["tapes"] += 1
        run(tape)

    monkeypatch.setattr(Tape, "run", counted)
    untraced_tokens, steps = tokens_of(make_runner(compile=False, replay=True))
    taped = runs.pop("tapes")
    assert taped > NEW_TOKENS / 2
    tracer = Tracer(CPU)
    runner = make_runner(compile=False, replay=True, spans=tracer)
    assert tokens_of(runner) == (untraced_tokens, steps)
    assert runs["tapes"] == taped
    assert untraced_tokens == expected
    events, host = split_events(tracer)
    assert [event.name for event in events] == ["embedding", *PHASES * LAYERS, "head", "candidates"] * steps
    for before, after in itertools.pairwise(events):
        assert before.start_us <= before.end_us <= after.start_us
    assert [event.details for event in events[1:5]] == [
        {"layer": 0}, {"layer": 0, "part": 0}, {"layer": 0}, {"layer": 0},
    ]  # fmt: skip
    # A step without rows ends the last request.
    counts = {"admit": steps + 1, "batch": steps, "inputs": taped, "sampling": steps}
    assert Counter(event.name for event in host) == counts
    assert all(event.details == {} for event in events if event.name in ("embedding", "head", "candidates"))
    assert tracer.take() == []


@needs_compiler
def test_compiled_layers_are_one_event(expected):
    torch.compiler.reset()
    tracer = Tracer(CPU)
    tokens, steps = tokens_of(make_runner(compile=True, replay=False, spans=tracer))
    assert tokens == expected
    assert [event.name for event in split_events(tracer)[0]] == ["embedding", "layers", "head", "candidates"] * steps


def test_the_compiler_is_looked_for_at_the_start(monkeypatch):
    monkeypatch.setattr(compiled_layers.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        make_runner(compile=True, replay=False)
