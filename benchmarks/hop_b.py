"""HOP-B on a slow network: two ranks in two network namespaces of this host, joined by a link that `tc` slows down.

Measures a decode step of eight long requests with one exchange, with two, four and eight parts, and with as many as the
cost model chooses, in turn; prints a Markdown table with its conditions, and what a trace says of one layer. Needs
Linux, root, and the programs ip and tc (package iproute2). --out FOLDER also writes the table and a trace for each.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from two_ranks import run_ranks

from longhelix.measure.link import RANKS, join, missing

LAYERS = 4
PARTS = (1, 2, 4, 8)
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": 256,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 512,
    "vocab_size": 512,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=float, default=50, help="of the link, each direction")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=16384, help="tokens of each request")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return measure(arguments)
    if (lacking := missing()) is not None:
        print(f"error: {lacking}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks do not stay behind
    with tempfile.TemporaryDirectory(prefix="longhelix-hop-b-") as directory:
        _write_model(Path(directory))
        run_ranks([*sys.argv[1:], "--directory", directory])
        report = _report(arguments, Path(directory))
        print(report)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "hop_b.md").write_text(report)
            for trace in Path(directory).glob("trace-*.json"):
                shutil.copy(trace, arguments.out)
    return 0


def _write_model(folder: Path) -> None:
    """A model of random weights, in Hugging Face format."""
    import torch
    from safetensors.torch import save_file

    hidden, width, kv = CONFIG["hidden_size"], CONFIG["num_attention_heads"] * CONFIG["head_dim"], 4 * 128
    ffn, vocab = CONFIG["intermediate_size"], CONFIG["vocab_size"]
    shapes = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {
            prefix + f"self_attn.{name}_proj": (size, hidden) for name, size in zip("qkv", (width, kv, kv), strict=True)
        }
        shapes |= {prefix + "self_attn.o_proj": (hidden, width), prefix + "mlp.down_proj": (hidden, ffn)}
        shapes |= {prefix + f"mlp.{name}_proj": (ffn, hidden) for name in ("gate", "up")}
    torch.manual_seed(0)
    tensors = {f"{name}.weight": 0.02 * torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def measure(arguments: argparse.Namespace) -> int:
    """One rank: the steps in turn, then a traced one of each."""
    import torch

    from longhelix.compute.kernels import native
    from longhelix.compute.parallel.mesh import Mesh
    from longhelix.compute.runner.rank import load_model, meet, new_runner
    from longhelix.compute.runner.tracer import Tracer
    from longhelix.engine.workers.step_cost import step_cost
    from longhelix.measure.timing import interleave
    from longhelix.scheduler.cut import Cut
    from longhelix.scheduler.work import Work

    rank, directory = arguments.rank, arguments.directory
    native.set_num_threads(1)
    link = join(rank, directory)
    link.limit(arguments.rate_mbit)
    meet(len(RANKS), rank, directory, interface=link.device)
    config = _configure(arguments)
    mesh = Mesh.build(config.layout, rank, "gloo")
    latency_s = _latency_s(mesh)
    link = {"scale_out.bytes_per_s": arguments.rate_mbit * 1e6 / 8, "scale_out.latency_s": latency_s}
    system = config.machines.system.replaced(link, "this script's link")
    config = replace(config, machines=replace(config.machines, system=system))
    requests = Requests(config, rank, arguments.batch, arguments.context)
    runner = requests.attach(new_runner(config, mesh, load_model(config, mesh), requests.pool))
    cut = Cut(step_cost(config, overlaps=True), config.execution.hop_b)
    chosen = torch.tensor(cut.parts(Work.decode(arguments.batch, arguments.context)))
    mesh.stage.broadcast(chosen)
    variants = {str(parts): parts for parts in PARTS} | {"cost model": int(chosen)}
    waits_s = dict.fromkeys(variants, 0.0)

    def decode(name: str) -> None:
        waits_s[name] += requests.run(runner, variants[name]).measured.exposed_s

    with torch.inference_mode():
        timings = interleave({name: lambda name=name: decode(name) for name in variants}, arguments.repeats, warm_up=0)
    rows = [
        {"name": name, "parts": variants[name], "exposed_s": waits_s[name] / arguments.repeats, **timing.row("step_s")}
        for name, timing in timings.items()
    ]
    tracer = Tracer(torch.device("cpu"))
    traced_mesh = Mesh.build(config.layout, rank, "gloo", tracer)
    model = load_model(config, traced_mesh, spans=tracer)
    traced = requests.attach(new_runner(config, traced_mesh, model, requests.pool, tracer))
    events = {}
    for name, parts in variants.items():
        requests.run(traced, parts)
        tracer.take()
        requests.run(traced, parts)
        events[name] = [asdict(event) for event in tracer.take()]
    found = {"latency_s": latency_s, "rows": rows, "events": events}
    (directory / f"rank{rank}.json").write_text(json.dumps(found))
    return 0


def _configure(arguments: argparse.Namespace):
    from longhelix.compute.models.model_files import open_checkpoint
    from longhelix.engine.options import EngineOptions
    from longhelix.engine.resolution import resolve
    from longhelix.spec.layout import Layout

    options = EngineOptions(
        dtype="bfloat16",
        max_model_len=arguments.context,
        kv_cache_tokens=arguments.batch * arguments.context,
        device="cpu",
        execution="eager",
    )
    return resolve(open_checkpoint(str(arguments.directory)), Layout(kvp=len(RANKS)), options)


def _latency_s(mesh) -> float:
    """Of the smallest exchange: the first quartile of many, since what else the host does only adds to it."""
    import torch

    from longhelix.measure.timing import interleave

    send = torch.zeros(len(RANKS), dtype=torch.uint8)
    call = {"": lambda: mesh.kvp.all_to_all(send, [1] * len(RANKS), [1] * len(RANKS))}
    return interleave(call, 50)[""].quartiles_s[0]


class Requests:
    """`batch` requests of `context` tokens each, whose keys and values are random numbers, on one rank."""

    def __init__(self, config, rank: int, batch: int, context: int) -> None:
        from longhelix.compute.runner.rank import new_pool
        from longhelix.measure.model import fill

        self.kvp, self.rank, self.batch, self.context = config.layout.kvp, rank, batch, context
        self.block_tokens = config.scheduler.block_tokens
        self.blocks_each = -(-context // self.block_tokens)
        self.pool = new_pool(config, rank, -(-batch * self.blocks_each // self.kvp) + batch)
        fill(self.pool)

    def attach(self, runner):
        """The runner with these requests admitted, their last token not written."""
        from longhelix.scheduler.kv.blocks import Block
        from longhelix.scheduler.request import SamplingParams
        from longhelix.scheduler.step import InitialKV, NewSequence, SequenceChanges, Step

        params = SamplingParams()
        new = tuple(
            NewSequence(
                id,
                params,
                seed=0,
                capacity_tokens=self.context,
                kv=InitialKV((-(-self.blocks_each // self.kvp),) * self.kvp, spread=True),
            )
            for id in range(self.batch)
        )
        runner.running.admit(Step(0, changes=SequenceChanges(new=new, joining=tuple(range(self.batch)))))
        used = [0] * self.kvp
        for id, sequence in runner.running.by_id.items():
            blocks = []
            for index in range(self.blocks_each):
                owner = self.owner(id, index)
                blocks.append(Block(owner, used[owner]))
                used[owner] += 1
            sequence.add_blocks(tuple(blocks), self.rank)
        return runner

    def owner(self, id: int, block: int) -> int:
        return (id + block) % self.kvp

    def run(self, runner, parts: int):
        """One decode step at the requests' last token; always the same."""
        from longhelix.scheduler.step import Step
        from longhelix.scheduler.work import Work

        for id, sequence in runner.running.by_id.items():
            sequence.length, sequence.last_token = self.context - 1, 1
            owned = [self.owner(id, block) == self.rank for block in range(self.blocks_each)]
            last = sequence.length % self.block_tokens if owned[-1] else self.block_tokens
            sequence.local_length = self.block_tokens * (sum(owned) - 1) + last
        work = Work.decode(self.batch, self.context)._replace(parts=parts)
        return runner.execute(Step(0, most_tokens=self.context, work=work))


def _report(arguments: argparse.Namespace, directory: Path) -> str:
    """The table, and the first layer of each traced step; writes the traces."""
    from longhelix.compute.runner.trace import TraceEvent, TraceFile
    from longhelix.measure.bench.environment import environment

    ranks = [json.loads((directory / f"rank{rank}.json").read_text()) for rank in RANKS]
    conditions = environment("")
    lines = [
        f"{conditions['cpu']}, {conditions['cores']} cores, torch {conditions['torch']}; load averages after the runs "
        f"{conditions['load_average']}; {len(RANKS)} ranks of one thread, gloo over a veth pair, tbf "
        f"{arguments.rate_mbit:g} Mbit/s, smallest exchange {1e6 * ranks[0]['latency_s']:.0f} us; {LAYERS} layers, "
        f"{CONFIG['num_attention_heads']} query and {CONFIG['num_key_value_heads']} KV heads of {CONFIG['head_dim']}, "
        f"bfloat16, op by op; {arguments.batch} requests of {arguments.context} tokens, {arguments.repeats} steps of "
        "each, in turn.",
        "",
        "| --hop-b | parts | step, ms | spread, % | against 1 | exposed, ms | overlap in the trace, ms |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    overlaps_ms = {name: _overlap_ms(events) for name, events in ranks[0]["events"].items()}
    single_s = ranks[0]["rows"][0]["step_s"]
    for index, row in enumerate(ranks[0]["rows"]):
        spread = "" if row["spread"] is None else f"{100 * row['spread']:.0f}"
        exposed_s = max(rank["rows"][index]["exposed_s"] for rank in ranks)
        lines.append(
            f"| {row['name']} | {row['parts']} | {1e3 * row['step_s']:.1f} | {spread} | "
            f"{row['step_s'] / single_s:.2f} | {1e3 * exposed_s:.1f} | {overlaps_ms[row['name']]:.1f} |"
        )
    lines += ["", "Layer 1 on rank 0, ms from the start of its attention:", ""]
    for name, events in ranks[0]["events"].items():
        lines.append(f"- {name}: {_intervals(events)}")
    for name in ranks[0]["events"]:
        file = TraceFile(directory / f"trace-{name.replace(' ', '-')}.json")
        for number, rank in enumerate(ranks):
            file.write(number, [TraceEvent(**event) for event in rank["events"][name]])
        file.close()
    return "\n".join(lines) + "\n"


def _overlap_ms(events: list[dict]) -> float:
    """How long attention and an exchange ran at once, in one step."""
    attentions = [event for event in events if event["name"] == "attention"]
    exchanges = _merged(event for event in events if event["name"] == "exchange")
    return sum(
        max(0.0, min(attention["end_us"], end_us) - max(attention["start_us"], start_us)) / 1e3
        for attention in attentions
        for start_us, end_us in exchanges
    )


def _merged(events) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the events."""
    merged: list[tuple[float, float]] = []
    for start_us, end_us in sorted((event["start_us"], event["end_us"]) for event in events):
        if merged and start_us <= merged[-1][1]:
            start_us, end_us = merged[-1][0], max(merged.pop()[1], end_us)
        merged.append((start_us, end_us))
    return merged


def _intervals(events: list[dict]) -> str:
    shown = [event for event in events if event["details"].get("layer") == 1 and "part" in event["details"]]
    shown.sort(key=lambda event: event["start_us"])
    zero_us = shown[0]["start_us"]
    return ", ".join(
        f"{event['name'][:3]} {event['details']['part']} {(event['start_us'] - zero_us) / 1e3:.2f} to "
        f"{(event['end_us'] - zero_us) / 1e3:.2f}"
        for event in shown
    )


if __name__ == "__main__":
    sys.exit(main())
