"""Pipeline stages give what one stage gives: 3D layouts of models of five layers, which no number of stages divides."""

import copy
import itertools
import json

import pytest
from test_equality import assert_equal, make_case

from longhelix import LLM, Layout, SamplingParams
from oracle import FAMILIES, NEW_TOKENS, WITH_EXPERTS, make_oracle, save_tokenizer_files
from tiers import few

pytestmark = pytest.mark.dist

LAYERS = 5
# PP, KVP, TPA
LAYOUTS = [
    (pp, kvp, tpa)
    for pp, (kvp, tpa) in itertools.product((2, 3, 4, 5), ((1, 1), (2, 1), (1, 2), (3, 1)))
    if pp * kvp * tpa <= 6
]
CHUNKS = (1, 16, 4096)
PLACEMENTS = ("striped", "growing", "local", "auto")
MODELS = {"llama": FAMILIES["llama"]} | {name: WITH_EXPERTS[name] for name in ("qwen3_moe", "deepseek_v3")}
CASES = [
    (model, layout, CHUNKS[number % 3], PLACEMENTS[number % 4])
    for number, (model, layout) in enumerate(itertools.product(MODELS, LAYOUTS))
]


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    made = {}

    def oracle(model):
        if model not in made:
            config = copy.deepcopy(MODELS[model])
            config.num_hidden_layers = LAYERS
            if hasattr(config, "layer_types"):
                config.layer_types = ["full_attention"] * LAYERS
            made[model] = make_oracle(config, tmp_path_factory.mktemp(f"deep-{model}"))
            save_tokenizer_files(made[model].path)
        return made[model]

    return oracle


def run(worlds, oracle, pp, kvp, tpa, chunk_tokens, placement, **more):
    case = make_case(oracle, kvp, tpa, chunk_tokens, placement, pp=pp, **more)
    return worlds(pp * kvp * tpa).run(case)


def show(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(
    ("model", "layout", "chunk_tokens", "placement"),
    [
        # In CI some layouts of each family.
        case if number % 8 == 0 else pytest.param(*case, marks=pytest.mark.slow)
        for number, case in enumerate(CASES)
    ],
    ids=show,
)
def test_logits_and_tokens_equal_transformers(worlds, deep, model, layout, chunk_tokens, placement):
    assert_equal(deep(model), run(worlds, deep(model), *layout, chunk_tokens, placement))


@pytest.mark.slow
@pytest.mark.parametrize(("chunk_tokens", "placement"), list(itertools.product(CHUNKS, PLACEMENTS)))
@pytest.mark.parametrize("layout", LAYOUTS, ids=show)
@pytest.mark.parametrize("model", MODELS)
def test_all_chunks_and_placements(worlds, deep, model, layout, chunk_tokens, placement):
    assert_equal(deep(model), run(worlds, deep(model), *layout, chunk_tokens, placement))


@pytest.mark.parametrize("stage_layers", [(1, 4), (4, 1)], ids=show)
@pytest.mark.slow
def test_stages_of_other_sizes(worlds, deep, stage_layers):
    assert_equal(deep("llama"), run(worlds, deep("llama"), 2, 2, 1, 16, "striped", stage_layers=stage_layers))


@pytest.mark.parametrize("pp", [2, 3])
@pytest.mark.slow
def test_the_tied_layout_has_stages(worlds, deep, pp):
    assert_equal(deep("llama"), run(worlds, deep("llama"), pp, 2, 1, 7, "striped", tied=True))


@pytest.mark.parametrize("chunk_tokens", few([16, 1, 4096]))
@pytest.mark.parametrize("model", MODELS)
def test_equal_steps_have_equal_bits(worlds, deep, model, chunk_tokens):
    """One request: the same steps, whatever the number of stages."""
    oracle = deep(model)
    found = {}
    for pp in (1, 2, 4):
        case = make_case(oracle, 1, 1, chunk_tokens, "striped", pp=pp) | {"prompts": oracle.prompts[-1:]}
        ranks = worlds(pp).run(case)
        found[pp] = ranks[-1]["logits_0"]
        assert all(rank["rows"].tolist() == ranks[0]["rows"].tolist() for rank in ranks)
    assert found[1].tobytes() == found[2].tobytes() == found[4].tobytes()


def test_hop_b_in_each_stage(worlds, deep):
    """Over gloo, where exchanges travel while ranks attend."""
    oracle = deep("llama")
    ranks = run(worlds, oracle, 2, 2, 1, 64, "striped", hop_b=3, backend="gloo", execution="eager")
    assert max(int(rank["parts"]) for rank in ranks) > 1
    assert_equal(oracle, ranks)


def test_stages_keep_only_what_is_theirs(worlds, deep):
    """Rows of experts are counted by layer: each stage has those of its own layers."""
    oracle = deep("qwen3_moe")
    ranks = run(worlds, oracle, 3, 1, 2, 16, "striped", stage_layers=(2, 2, 1))
    assert [len(rank["expert_rows"]) for rank in ranks] == [2, 2, 2, 2, 1, 1]
    assert_equal(oracle, ranks)


@pytest.fixture
def slow_stage(tmp_path, monkeypatch):
    """The last stage begins a step's layers once the first has done as many later steps as are asked for, from a first
    step to a last one. Gives a function that says which."""
    program = """
import os, time
from pathlib import Path
from longhelix.compute.runner.runner import ModelRunner
hand_over, layers = ModelRunner._hand_over, {}
done = Path(os.environ["DONE"])
ahead, first, last = (int(os.environ[name]) for name in ("AHEAD", "FIRST", "LAST"))

def note(runner, handover, step, hidden_TH):
    hand_over(runner, handover, step, hidden_TH)
    if runner._is_first:
        (done / str(step.id)).touch()

def wait(runner, step, forward=ModelRunner.forward):
    until_s = time.monotonic() + 20
    while runner._is_last and step.id >= first and not (done / str(min(step.id + ahead, last))).exists():
        if time.monotonic() > until_s:
            raise RuntimeError(f"nothing has overtaken step {step.id}")
        time.sleep(0.001)
    return forward(runner, step)

ModelRunner._hand_over, ModelRunner.forward = note, wait
"""
    (tmp_path / "sitecustomize.py").write_text(program)
    (tmp_path / "done").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DONE", str(tmp_path / "done"))

    def asked(ahead, first, last):
        monkeypatch.setenv("FIRST", str(first))
        monkeypatch.setenv("AHEAD", str(ahead))
        monkeypatch.setenv("LAST", str(last))

    return asked


def test_the_next_chunk_is_in_the_first_stage_while_one_is_in_the_second(deep, slow_stage):
    """A stage that waits for it would otherwise wait forever: 11 chunks, each overtaken by the next two."""
    oracle = deep("llama")
    slow_stage(ahead=2, first=1, last=11)
    with LLM(str(oracle.path), Layout(pp=2), dtype="float32", chunk_tokens=4, block_tokens=4) as llm:
        (result,) = llm.generate([oracle.prompts[3]], SamplingParams(max_new_tokens=1))
    assert result.token_ids == oracle.tokens[3][:1]


@pytest.mark.slow
def test_a_decode_fills_the_bubble_of_another(deep, slow_stage):
    """Two requests decode, each in a microbatch of its own, once both have their first tokens: while one's row is in
    the second stage, the other's is in the first."""
    oracle = deep("llama")
    slow_stage(ahead=1, first=2, last=31)
    prompts = [oracle.prompts[1], oracle.prompts[2]]
    with LLM(str(oracle.path), Layout(pp=2), dtype="float32", chunk_tokens=64, block_tokens=4) as llm:
        results = llm.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    assert [result.token_ids for result in results] == [list(oracle.tokens[1]), list(oracle.tokens[2])]


def test_a_trace_shows_each_step_in_each_stage(deep, tmp_path):
    oracle, path = deep("llama"), tmp_path / "trace.json"
    with LLM(str(oracle.path), Layout(kvp=2, pp=2), dtype="float32", chunk_tokens=16, trace=path) as llm:
        llm.generate(oracle.prompts, SamplingParams(max_new_tokens=4, ignore_eos=True))
        assert llm._core.counters.steps > 8
    events = json.loads(path.read_text())
    steps = {
        (event["pid"], event["name"]): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["cat"] == "step"
    }
    names = {name for _, name in steps}
    assert steps.keys() == set(itertools.product(range(4), names))
    for rank, name in itertools.product((0, 1), names):
        assert steps[rank, name][0] < steps[rank + 2, name][1]
    waits = {(event["pid"], event["name"]) for event in events if event["name"].startswith("wait for")}
    assert waits == {(0, "wait for tokens"), (1, "wait for tokens"), (2, "wait for hidden states"),
                     (3, "wait for hidden states")}  # fmt: skip


@pytest.fixture
def warmed_up(tmp_path, monkeypatch):
    """Ranks run all warm-up steps, as where a compiler is at work."""
    program = """
from dataclasses import replace
from longhelix.compute.runner import execution
resolve = execution.Execution.resolve.__func__
execution.Execution.resolve = classmethod(lambda cls, **asked: replace(resolve(cls, **asked), compiles=True))
"""
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("warmed_up")
@pytest.mark.parametrize("layout", few([Layout(kvp=2, pp=2), Layout(pp=2), Layout(pp=4)]), ids=["2x2", "2", "4"])
@pytest.mark.slow
def test_warm_up_leaves_nothing_on_its_way(deep, layout):
    """Its tokens would be taken for those of the first requests."""
    oracle, warmed = deep("llama"), []
    settings = {"dtype": "float32", "block_tokens": 4, "max_model_len": 64, "chunk_tokens": 16, "max_running": 4}
    with LLM(str(oracle.path), layout, on_warm_up=warmed.append, **settings) as llm:
        results = llm.generate(oracle.prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    assert warmed[-1] == 1
    assert [result.token_ids for result in results] == [list(tokens) for tokens in oracle.tokens]


@pytest.mark.slow
def test_compiled_layers_in_stages(deep):
    oracle = deep("llama")
    settings = {"dtype": "float32", "max_model_len": 64, "chunk_tokens": 16, "max_running": 2}
    with LLM(str(oracle.path), Layout(pp=2), execution="compiled", **settings) as llm:
        results = llm.generate(oracle.prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    assert [result.token_ids for result in results] == [list(tokens) for tokens in oracle.tokens]


@pytest.mark.slow
def test_answers_of_one_token_and_pauses_leave_nothing_behind(deep):
    """The first stage needs no token of theirs."""
    oracle = deep("llama")
    with LLM(str(oracle.path), Layout(pp=2), dtype="float32", block_tokens=4) as llm:
        for _ in range(12):
            (result,) = llm.generate([oracle.prompts[2]], SamplingParams(max_new_tokens=1))
            assert result.token_ids == oracle.tokens[2][:1]
        (result,) = llm.generate([oracle.prompts[3]], SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    assert result.token_ids == list(oracle.tokens[3])
