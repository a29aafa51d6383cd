"""What `plan` recommends, priced again by `estimate`: the same model, layout, batch, chunk size and drafts."""

import json
from dataclasses import asdict

import numpy as np
import pytest

from longhelix.cli.main import main
from longhelix.perf.setting import Drafts, Dtypes, Setting
from longhelix.plan.choice import Chooser
from longhelix.plan.question import Question
from longhelix.plan.space import OVERLAPPED, STRATEGIES, space
from longhelix.spec.presets import load_model, load_system
from toy_model import moe_of

pytestmark = pytest.mark.unit

SAME = (
    "layout", "batch", "chunk_tokens", "ttl_s", "ttl_p95_s", "ttft_s", "tokens_per_s_per_user", "tokens_per_s_per_gpu",
    "memory_bytes_per_gpu", "headroom_bytes", "draft_tokens", "accepted_tokens",
)  # fmt: skip
# Of a model on a system: what both verbs are asked, and what `plan` alone.
ANSWERS = {
    "several replicas": ("--model llama-3-8b --system h100 --context 2k", "--max-gpus 8 --ttl 20ms --users 400"),
    "dense with drafts": (
        "--model llama-3-8b --system h100 --context 128k --draft-tokens 3 --accepted-tokens 2.5",
        "--max-gpus 8 --ttl 20ms --ttft 60s",
    ),
    "experts in fewer bits": (
        "--model qwen3-235b-a22b --system h200 --context 256k --weight-dtype bfloat16 --expert-dtype fp8",
        "--max-gpus 16 --ttl 50ms",
    ),
    "latents with drafts": (
        "--model deepseek-r1 --system gb200 --context 1M --draft-tokens 1 --accepted-tokens 1.85",
        "--max-gpus 16 --ttl 100ms",
    ),
    "latents without a target": ("--model deepseek-r1 --system gb300 --context 64k --kv-dtype fp8", "--max-gpus 8"),
    "an indexer": ("--model deepseek-v3.2 --system gb200 --context 1M", "--max-gpus 8 --ttl 50ms"),
}
# How many GPUs layouts have, the dtype of experts, and drafts.
SPACES = {
    "llama-3-8b": (16, None, Drafts()),
    "qwen3-30b-a3b": (16, "fp8", Drafts()),
    "deepseek-r1": (16, None, Drafts(1, 1.85)),
}


def printed(capfd, *arguments):
    status = main([*arguments, "--json"])
    out, err = capfd.readouterr()
    assert status == 0, err
    return json.loads(out)


def layout_options(choice):
    """As `estimate` takes a choice's layout."""
    layout, options = choice["layout"], ["--batch", str(choice["batch"]), "--chunk", str(choice["chunk_tokens"])]
    for name in ("dp", "kvp", "tpa", "tpf", "ep", "pp"):
        options += [f"--{name}", str(layout[name])]
    if layout["ffn_replicas"] > 1:
        options.append("--tied")
    overlaps = choice["strategy"] in OVERLAPPED
    return [*options, "--placement", layout["placement"], "--hop-b" if overlaps else "--no-hop-b"]


def assert_same(found, choice):
    for name in SAME:
        expected = choice[name]
        assert found[name] == (pytest.approx(expected, rel=1e-12) if isinstance(expected, float) else expected), name
    assert found["fits"]
    assert found["batch"] * choice["replicas"] == choice["users"]
    assert found["gpus"] * choice["replicas"] == choice["gpus"]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.filterwarnings("ignore:a context of")
def test_an_answer_is_estimated_as_it_was_planned(capfd, name):
    both, asked = (words.split() for words in ANSWERS[name])
    planned = printed(capfd, "plan", *both, *asked)
    found = printed(capfd, "estimate", *both, *layout_options(planned["best"]))
    assert_same(found, planned["best"])
    assert (planned["best"]["replicas"] > 1) == (name == "several replicas")
    for same in ("system", "weight_dtype", "expert_dtype", "kv_dtype", "attention_dtype"):
        assert found[same] == planned[same]


@pytest.mark.parametrize("name", SPACES)
def test_layouts_of_every_strategy_are_estimated_as_they_were_planned(capfd, name):
    gpus, experts, drafts = SPACES[name]
    setting = Setting(load_model(name), load_system("gb200"), Dtypes("fp8", "fp8", experts=experts), drafts=drafts)
    searched = space(setting.model, gpus, 4)
    chooser, layouts = Chooser(Question(setting, 100_000, gpus), searched), searched.layouts
    options = ["--model", name, "--system", "gb200", "--context", "100k", "--weight-dtype", "fp8", "--kv-dtype", "fp8"]
    options += [] if experts is None else ["--expert-dtype", experts]
    options += ["--draft-tokens", str(drafts.tokens), "--accepted-tokens", str(drafts.accepted)]
    seen = set()
    for index, strategy in enumerate(STRATEGIES):
        of_all = np.flatnonzero((searched.strategy == index) & (layouts.world_size == gpus))
        for layout in {of_all[0], of_all[len(of_all) // 2]} if len(of_all) else ():
            choice = chooser.at(int(layout), 24.0)
            if choice is not None:
                found = printed(capfd, "estimate", *options, *layout_options(asdict(choice)))
                assert_same(found, asdict(choice))
                seen.add(strategy.name)
    assert {strategy.name for strategy in STRATEGIES} - seen == (set() if moe_of(setting.model) else {"dp_ep"})
