"""How a rank runs a step, for everything that can be asked for and found; and what options ask for."""

import itertools
from types import SimpleNamespace

import pytest

from longhelix.compute.runner import rank
from longhelix.compute.runner.config import ExecutionConfig
from longhelix.compute.runner.execution import Execution, RankCapabilities
from longhelix.compute.runner.token_ranges import ONE_RANGE
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import _layers_run
from longhelix.engine.settings.kernels import check_kernels
from longhelix.errors import UserError
from longhelix.scheduler.config import CacheConfig
from longhelix.spec.attention import GroupedQueryAttention, Scores
from longhelix.spec.layout import HeadShape, Layout
from longhelix.spec.presets import load_model
from longhelix.spec.rope import RopeSpec

pytestmark = pytest.mark.unit

# device, native kernels: compile, replay: what layers run as.
LAYERS = {
    ("cpu", False): {(0, 0): "op by op", (0, 1): "op by op", (1, 0): "compiled", (1, 1): "compiled"},
    ("cpu", True): {(0, 0): "op by op", (0, 1): "tapes", (1, 0): "compiled", (1, 1): "compiled"},
    ("cuda", False): {(0, 0): "op by op", (0, 1): "graphs", (1, 0): "compiled", (1, 1): "compiled in graphs"},
    ("cuda", True): {(0, 0): "op by op", (0, 1): "graphs", (1, 0): "compiled", (1, 1): "compiled in graphs"},
}
FLAGS = {
    "op by op": (False, False, False),
    "tapes": (False, True, False),
    "graphs": (False, False, True),
    "compiled": (True, False, False),
    "compiled in graphs": (True, False, True),
}
OVERLAPS = {"alone": False, "shared memory": False, "gloo": True, "NCCL": True}
BOTH = (False, True)


@pytest.mark.parametrize("transport", OVERLAPS)
@pytest.mark.parametrize(("device", "native"), LAYERS)
def test_every_combination(device, native, transport):
    overlaps, rank_order = OVERLAPS[transport], transport in ("alone", "shared memory")
    for compile, replay, whole, packed in itertools.product(BOTH, repeat=4):
        capabilities = RankCapabilities(device, native, overlaps, rank_order, packed)
        made = Execution.resolve(compile, replay, whole, capabilities)
        assert (made.compiled, made.tapes, made.graphs) == FLAGS[LAYERS[device, native][compile, replay]]
        assert made.capabilities == capabilities
        assert made.parts == (transport in ("gloo", "NCCL") and not compile and not whole)
        assert made.sees_waits == (transport in ("gloo", "NCCL") and device == "cpu" and not compile)
        assert made.compiles == (device == "cuda" or compile)


def test_what_changes_collectives_follows_from_nothing_that_ranks_decide_alone():
    """Whether a rank has native kernels, or could pack its weights, is its own; the transport is that of all."""
    for compile, replay, whole, overlaps in itertools.product(BOTH, repeat=4):
        ranks = [
            Execution.resolve(compile, replay, whole, RankCapabilities("cpu", native, overlaps, not overlaps, packed))
            for native, packed in itertools.product(BOTH, repeat=2)
        ]
        assert len({rank.parts for rank in ranks}) == 1


@pytest.mark.parametrize(
    ("execution", "device", "trace", "expected"),
    [
        ("recorded", "cpu", False, (False, True)),
        ("recorded", "cpu", True, (False, True)),
        ("recorded", "cuda", False, (False, True)),
        ("recorded", "cuda", True, (False, False)),
        ("compiled", "cpu", False, (True, False)),
        ("compiled", "cpu", True, (True, False)),
        ("compiled", "cuda", False, (True, True)),
        ("compiled", "cuda", True, (True, True)),
        ("eager", "cpu", False, (False, False)),
        ("eager", "cuda", True, (False, False)),
    ],
)
def test_the_option_means_compile_and_replay(execution, device, trace, expected):
    options = EngineOptions(execution=execution, trace="t.json" if trace else None)
    assert _layers_run(options, device) == expected


@pytest.mark.parametrize(("score_scale", "expected"), [(None, 64**-0.5), (0.0078125, 0.0078125)])
def test_flashinfer_scales_scores_as_the_model_says(monkeypatch, score_scale, expected):
    attention = GroupedQueryAttention(
        heads=HeadShape(4, 2), head_size=64, rotated_size=64, rope=RopeSpec(), scores=Scores(scale=score_scale)
    )
    config = SimpleNamespace(
        execution=SimpleNamespace(attention="flashinfer"),
        spec=SimpleNamespace(attentions=(attention,)),
        layout=Layout(),
        formats=SimpleNamespace(dtype="bfloat16"),
    )
    monkeypatch.setattr(rank.flashinfer, "check", lambda *of_a_format: None)
    monkeypatch.setattr(rank, "PageLists", lambda format, num_heads, scale, dtype: scale)
    assert rank.new_page_lists(config, 0, SimpleNamespace(formats=("a format",))) == expected


@pytest.mark.parametrize(
    ("model", "words"),
    [("deepseek-r1", "does not support latent attention"), ("gpt-oss-120b", "whose rows see only some tokens")],
)
def test_flashinfer_refuses_what_it_does_not_compute(model, words):
    with pytest.raises(UserError, match=words):
        check_kernels(load_model(model), EngineOptions(attention="flashinfer"), "cuda", replay=True)


def test_flashinfer_attends_to_whole_batches(monkeypatch):
    """Where our own attention would attend in parts."""
    capabilities = RankCapabilities("cuda", native=True, overlaps=True, sums_in_rank_order=False, packed=False)
    monkeypatch.setattr(rank, "rank_capabilities", lambda *of_a_rank: capabilities)
    monkeypatch.setattr(rank, "new_page_lists", lambda *of_a_pool: None)
    monkeypatch.setattr(rank, "ModelRunner", lambda *, execution, **more: execution)

    def parts(attention):
        scheduler = SimpleNamespace(cache=CacheConfig())
        execution = ExecutionConfig(
            compile=False, replay=True, token_ranges=ONE_RANGE, attention=attention, hop_b=None, trace=False
        )
        config = SimpleNamespace(spec=None, scheduler=scheduler, execution=execution)
        return rank.new_runner(config, SimpleNamespace(rank=0), model=None, pool=None).parts

    assert (parts("own"), parts("flashinfer")) == (True, False)
