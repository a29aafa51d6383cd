"""One rank of test_passes: it runs the named cases, compiled, over gloo. A failed assert ends it with a traceback."""

import os
import shutil
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.exc import InductorError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import Gemma2Config, Gemma2Model, LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

from longhelix.compute.runner.rank import meet
from longhelix.engine.workers.started_rank import StartedRank
from longhelix.passes import Calibration, RanksDifferError, SequenceParallel, agreement

sys.path.append(str(Path(__file__).parents[1] / "unit" / "passes"))

from modules import Chain, Experts, Mixer, rows, summed

PLAN = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
OTHERS = {
    "llama": (LlamaModel, LlamaConfig, {"LastAllReduceRMSNorm": 1, "MiddleAllReduceRMSNorm": 5}),
    "qwen3": (Qwen3Model, Qwen3Config, {"LastAllReduceRMSNorm": 1, "MiddleAllReduceRMSNorm": 5}),
    # One norm of each sum, and one after the sum is added.
    "gemma2": (Gemma2Model, Gemma2Config, {"FirstAllReduceRMSNorm": 6}),
}


worlds = count()


def compiled(module, sp, dynamic=False):
    torch._dynamo.reset()
    options = {} if sp is None else {"post_grad_custom_pre_pass": sp}
    return torch.compile(module, fullgraph=True, dynamic=dynamic, options=options)


def near(one, other, tolerance=1e-5):
    assert one.shape == other.shape
    assert (one - other).abs().max() <= tolerance * other.abs().max(), (one - other).abs().max()


def found(report):
    return {name: count for name, count in report["patterns"].items() if count}


def modules(rank, size):
    """Modules of the tests in one process: eager, compiled, and compiled with the pass."""
    for module, dynamic, quantize in ((Chain, True, None), (Chain, False, "int8"), (Experts, False, None)):
        own = module(rank, size)
        chunks = module is Experts
        sp = SequenceParallel(min_tokens=1, quantize=quantize, in_rank_order=True, own_chunks=chunks)
        changed = compiled(own, sp, dynamic)
        for tokens in (13, 14, 200) if dynamic else (1, 13):
            x = rows(tokens)
            eager, alone = own(x), module(0, 1)(x)
            near(eager, alone)
            near(changed(x), alone, 0.03 if quantize else 1e-5)
        assert sum(found(sp.report()).values()) >= 4, sp.report()
        assert "all_reduce" not in sp.report()["collectives"]["after"], sp.report()
        near(compiled(own, None, dynamic)(x), alone)


def large(rank, size):
    """Messages sent in pieces of unequal size give the same result as torch's own collectives."""
    group = dist.group.WORLD
    for length, columns, dtype in ((1, 3, torch.float32), (1001, 700, torch.float32), (3, 1 << 20, torch.int8)):
        x = torch.randint(-99, 99, (size * length, columns), generator=torch.Generator().manual_seed(rank)).to(dtype)
        own, ours = x[:length], torch.ops.longhelix_passes
        assert torch.equal(ours.all_gather(own, size, group.group_name), functional.all_gather_tensor(own, 0, group))
        assert torch.equal(
            ours.all_to_all(x, size, group.group_name),
            functional.all_to_all_single(x, [length] * size, [length] * size, group),
        )


def calibrated(rank, size):
    """All ranks find the same static scales, and no scales are sent."""
    own, calibration = Chain(rank, size), Calibration()
    compiled(own, SequenceParallel(min_tokens=1, quantize="int8", scales=calibration))(rows(40))
    scales = calibration.scales("int8")
    said = [None] * size
    dist.all_gather_object(said, scales)
    assert all(other == scales for other in said)
    sp = SequenceParallel(min_tokens=1, quantize="int8", scales=scales)
    x = rows(40)
    near(compiled(own, sp, dynamic=True)(x), own(x), 0.05)
    assert found(sp.report())["MiddleAllReduceRMSNormStaticINT8"] == len(scales) - 1, sp.report()
    # With one scale for all tokens, only the returned values are gathered as float32.
    assert sp.report()["collectives"]["after"]["all_gather"] == len(scales) + 1, sp.report()


def noted(rank, size):
    """If one rank recorded nothing, or non-finite numbers, all ranks raise and none waits."""
    for unlike, words in (
        ({}, "recorded nothing"),
        ({"a": 1.0, "b": 2.0}, "different graphs on different ranks"),
        ({"a": torch.nan}, "not finite"),
    ):
        for odd in range(size):
            calibration = Calibration()
            for place, highest in (unlike if rank == odd else {"a": 2.0}).items():
                calibration.note(place, torch.tensor(highest))
            with pytest.raises(ValueError, match=words):
                calibration.scales("int8")
    calibration = Calibration()
    calibration.note("a", torch.tensor(448.0 * (rank + 1)))
    assert calibration.scales("fp8") == {"fp8/a": float(size)}


def cache(rank, size):
    """A graph from torch's cache is counted too, and another threshold has its own cached graph."""
    own, x = Chain(rank, size), rows(13)
    expected = own(x)
    reports = []
    for min_tokens in (13, 13, 14):
        counters.clear()
        sp = SequenceParallel(min_tokens=min_tokens)
        near(compiled(own, sp)(x), expected)
        reports.append(sp.report())
        assert counters["inductor"]["fxgraph_cache_hit"] == (len(reports) == 2)
    assert reports[0] == reports[1]
    assert reports[0]["collectives"]["after"] == {"all_to_all": 4, "all_gather": 4}
    assert reports[2]["collectives"]["after"] == reports[2]["collectives"]["before"] == {"all_reduce": 4}


DOES = {"more": lambda total: 2 * total, "all": lambda total: total.cumsum(0)}


class Apart(torch.nn.Module):
    """Only rank 0 applies an op to a sum."""

    def __init__(self, rank, size, does):
        super().__init__()
        self.rank, self.size, self.does = rank, size, does
        self.embed, self.layers = Mixer(rank, size, 1), Chain(rank, size, given=True)

    def forward(self, x):
        total = summed(self.embed(x), self.size)
        return self.layers(self.does(total) if self.rank == 0 else total)


def meet_again(rank, size, seconds=60):
    """Start a new process group."""
    place = f"file://{Path(os.environ['TORCHINDUCTOR_CACHE_DIR']).parent / f'world{next(worlds)}'}"
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))


def differ(rank, size, does):
    """Ranks whose graphs would hang, or would compute different shards, raise before the graphs run. Later graphs stay
    unchanged."""
    x = rows(13)
    with pytest.raises(RanksDifferError, match=r"Rank 0: .*Rank 1: .*run the same code"):
        compiled(Apart(rank, size, DOES[does]), SequenceParallel(min_tokens=1))(x)
    own, sp = Chain(rank, size), SequenceParallel(min_tokens=2)
    near(compiled(own, sp)(x), own(x))
    assert "found to differ" in sp.explain()
    assert sp.report()["collectives"]["after"] == {"all_reduce": 4}


class Shifted(torch.nn.Module):
    """The same number is a constant in rank 0's graph and an operand in the other ranks' graphs."""

    def __init__(self, rank, size):
        super().__init__()
        self.size, self.embed, self.layers = size, Mixer(rank, size, 1), Chain(rank, size, given=True)
        self.small = 0.25 if rank == 0 else torch.nn.Buffer(torch.tensor(0.25))

    def forward(self, x):
        return self.layers(summed(self.embed(x), self.size) + self.small)


def numbers(rank, size):
    own, sp, x = Shifted(rank, size), SequenceParallel(min_tokens=1), rows(13)
    near(compiled(own, sp)(x), own(x))
    assert "all_reduce" not in sp.report()["collectives"]["after"], sp.report()


def options(rank, size):
    """Ranks with different thresholds raise at the first graph, even though both leave it unchanged."""
    with pytest.raises(RanksDifferError, match=r"Rank 0: .*min_tokens 10, .*Rank 1: .*min_tokens 20, "):
        compiled(Chain(rank, size), SequenceParallel(min_tokens=10 + 10 * rank))(rows(5))


def alone(rank, size):
    """A rank that compiles a graph alone raises after the group's timeout, and so does a rank that comes too late."""
    meet_again(rank, size, seconds=5)
    told = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent / "told"
    while rank == 1 and not told.exists():
        time.sleep(0.1)
    with pytest.raises(RanksDifferError, match="rank 1 of 2 has not compiled" if rank == 0 else "Rank 0: gave up"):
        compiled(Chain(rank, size), SequenceParallel(min_tokens=1))(rows(13))
    told.touch()


class NoMemory(CustomGraphPass):
    def __call__(self, graph):
        raise MemoryError("none left for the compiler")

    def uuid(self):
        return "no memory"


def fail_midway(rank, size):
    """Fail in the compiler after the pass has run."""
    torch._dynamo.reset()
    passes = {"post_grad_custom_pre_pass": SequenceParallel(min_tokens=1), "post_grad_custom_post_pass": NoMemory()}
    with pytest.raises(InductorError, match="none left"):
        torch.compile(Chain(rank, size), fullgraph=True, dynamic=False, options=passes)(rows(13))


def failed(rank, size):
    """A compilation that failed midway is not part of the summary of the next one."""
    if rank == 1:
        fail_midway(rank, size)
        assert torch.compile(lambda x: 2 * x)(torch.ones(3)).tolist() == [2, 2, 2]
    module = Chain(rank, size) if rank == 0 else Apart(0, size, DOES["more"])
    with pytest.raises(RanksDifferError, match=r"Rank 0: .*Rank 1: "):
        compiled(module, SequenceParallel(min_tokens=1))(rows(13))
    meet_again(rank, size)
    if rank == 0:
        fail_midway(rank, size)
    meet_again(rank, size)
    own, x = Chain(rank, size), rows(13)
    near(compiled(own, SequenceParallel(min_tokens=1))(x), own(x))


def one_store(rank, size):
    """Ranks compare graphs in a store that they used before. Gloo must not use that store too: it could find old
    addresses in it, and wait for them."""
    own, x, port = Chain(rank, size), rows(13), Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.1)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    for min_tokens in (1, 100):
        meet_again(rank, size)
        of_this_world = dist.PrefixStore("default_pg", store)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agreement, "_get_default_store", lambda store=of_this_world: store)
            near(compiled(own, SequenceParallel(min_tokens=min_tokens))(x), own(x))
    assert store.add(f"default_pg/longhelix.passes/{dist.group.WORLD.group_name}/times/{rank}", 0) == 2
    dist.barrier()  # one rank hosts the store


def half_cached(rank, size):
    """Ranks agree if one takes its graph from the cache and the other compiles it."""
    own, x = Chain(rank, size), rows(13)
    for cached in (False, rank == 0):
        counters.clear()
        near(compiled(own, SequenceParallel(min_tokens=1))(x), own(x))
        assert counters["inductor"]["fxgraph_cache_hit"] == cached
        meet_again(rank, size)
        if rank == 1:
            shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def others(rank, size, name):
    """Models of transformers with torch's own tensor parallelism."""
    kind, configuration, expected = OTHERS[name]
    torch.manual_seed(0)
    model = kind(configuration(**SIZES)).eval()
    ids = torch.randint(0, 97, (1, 13), generator=torch.Generator().manual_seed(1))
    alone = model(ids, use_cache=False).last_hidden_state
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.layers:
        parallelize_module(layer, mesh, PLAN)
        layer.self_attn.config = model.config
    near(model(ids, use_cache=False).last_hidden_state, alone, 1e-4)
    sp = SequenceParallel(mesh.get_group(), min_tokens=1)
    changed = compiled(model, sp)(ids, use_cache=False).last_hidden_state
    assert found(sp.report()) == expected, sp.report()
    assert "all_reduce" not in sp.report()["collectives"]["after"], sp.report()
    near(changed, alone, 1e-4)


CASES = {
    each.__name__: each
    for each in (
        modules,
        large,
        calibrated,
        noted,
        cache,
        differ,
        numbers,
        options,
        alone,
        failed,
        one_store,
        half_cached,
        others,
    )
}


def main():
    started = StartedRank.from_command_line()
    rank, (size, cases) = started.rank, started.arguments
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(started.directory / f"inductor{rank}")
    meet(int(size), rank, started.directory)
    with torch.no_grad():
        for case in cases.split(","):
            name, *arguments = case.split("=")
            CASES[name](rank, int(size), *arguments)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
