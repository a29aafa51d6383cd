"""What choosing the tokens of a step costs beside the head's product, on one rank: peaked rows, flat rows, greedy ones.

python benchmarks/sampling.py [--rows 64] [--vocabulary 131072] [--threads 1]
"""

import argparse
import statistics
import time

import numpy as np
import torch

from longhelix.compute.cache.block_arena import BlockArena
from longhelix.compute.kernels import native
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.sampling import Sampling
from longhelix.compute.runner.seen_tokens import SeenTokens
from longhelix.compute.runner.sequence_state import SequenceState, sequence_numbers
from longhelix.measure.bench.environment import environment
from longhelix.scheduler.request import SamplingParams
from longhelix.scheduler.step import NewSequence
from longhelix.spec.layout import Layout

TURNS = 30
SETTINGS = {
    "greedy": SamplingParams(),
    "greedy, penalty": SamplingParams(repetition_penalty=1.1),
    "temperature 0.8, top-p 0.95": SamplingParams(temperature=0.8, top_p=0.95),
    "temperature 0.8, top-p 0.95, penalty": SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1),
    "temperature 1": SamplingParams(temperature=1.0),
    "temperature 5, top-p 0.99": SamplingParams(temperature=5.0, top_p=0.99),
}


def logits(rows: int, vocabulary: int, likely: int) -> torch.Tensor:
    """Normal ones; of the peaked, a few tokens that are well above the others."""
    generator = torch.Generator().manual_seed(0)
    logits_SV = 1.5 * torch.randn(rows, vocabulary, generator=generator)
    if likely:
        places = torch.randint(0, vocabulary, (rows, likely), generator=generator)
        logits_SV.scatter_(1, places, 14 + 4 * torch.rand(rows, likely, generator=generator))
    return logits_SV


def sequences(params: SamplingParams, rows: int, vocabulary: int, context: int) -> tuple[SequenceState, ...]:
    """In the middle of their answers, after `context` tokens."""
    chance, found = np.random.default_rng(0), []
    numbers, arena = sequence_numbers(1), BlockArena(0, torch.device("cpu"))
    for row in range(rows):
        seen = SeenTokens(range(vocabulary))
        seen.add(chance.integers(0, vocabulary, context))
        new = NewSequence(row, params, row, 2 * context, (0,), True)
        kept = seen if params.repetition_penalty != 1 else None
        found.append(SequenceState(new, torch.zeros(0), numbers, arena, kept))
        found[-1].length = context
    return tuple(found)


def milliseconds(
    sampling: Sampling, alone: RankGroup, logits_SV: torch.Tensor, rows: tuple[SequenceState, ...]
) -> float:
    times_s = []
    for _ in range(TURNS):
        for row in rows:
            row.length += 1
        used_up_SV = logits_SV.clone()
        begin_s = time.perf_counter()
        sampling(used_up_SV, rows, alone)
        times_s.append(time.perf_counter() - begin_s)
    return 1e3 * statistics.median(times_s[TURNS // 5 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=131_072)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native.set_num_threads(arguments.threads)
    group = RankGroup((0,), 0, None)
    sampling = Sampling(Mesh(Layout(), 0, group, group, group), arguments.vocabulary, torch.device("cpu"))
    conditions = environment("")
    print(
        f"{conditions['cpu']}, {conditions['instruction_set']}, commit {conditions['commit']}, load averages before "
        f"{conditions['load_average']}; {arguments.rows} rows of {arguments.vocabulary} logits, "
        f"{arguments.threads} threads.\n"
    )
    print("| ms a step, median | peaked, 1K tokens before | peaked, 1M tokens before | flat |\n|---|--:|--:|--:|")
    peaked_SV, flat_SV = (logits(arguments.rows, arguments.vocabulary, likely) for likely in (40, 0))
    for name, params in SETTINGS.items():
        given = ((peaked_SV, 1_000), (peaked_SV, 1_000_000), (flat_SV, 1_000))
        times = [
            milliseconds(sampling, group, logits_SV, sequences(params, arguments.rows, arguments.vocabulary, context))
            for logits_SV, context in given
        ]
        print(f"| {name} | " + " | ".join(f"{ms:.2f}" for ms in times) + " |", flush=True)


if __name__ == "__main__":
    main()
