"""Questions about one document: the time to the first token of the first, and of those that find it in the cache.

python benchmarks/prefix.py [--document 4000] [--questions 5] [--kvp 1]
"""

import argparse
import random
import statistics

from longhelix import LLM, Layout, SamplingParams
from longhelix.measure.bench.environment import environment

QUESTION_TOKENS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--document", type=int, default=4000, help="tokens")
    parser.add_argument("--questions", type=int, default=5)
    parser.add_argument("--kvp", type=int, default=1)
    arguments = parser.parse_args()
    conditions, chance = environment(""), random.Random(0)
    print(
        f"{conditions['cpu']}, {conditions['instruction_set']}, commit {conditions['commit']}, load averages before "
        f"{conditions['load_average']}; {arguments.model}, KVP {arguments.kvp}, a document of {arguments.document} "
        f"tokens and {QUESTION_TOKENS} tokens of a question.\n"
    )

    def ids(count: int) -> list[int]:
        return [chance.randrange(1000, 40_000) for _ in range(count)]

    params, found = SamplingParams(max_new_tokens=8, ignore_eos=True), []
    with LLM(arguments.model, Layout(kvp=arguments.kvp)) as llm:
        llm.generate([ids(100)], params)
        document = ids(arguments.document)
        print("| question | TTFT, ms | cached tokens |\n|--:|--:|--:|")
        for number in range(arguments.questions):
            (result,) = llm.generate([document + ids(QUESTION_TOKENS)], params)
            found.append(1e3 * result.ttft_s)
            print(f"| {number + 1} | {found[-1]:.1f} | {result.cached_tokens} |", flush=True)
    print(f"\nThe first takes {found[0] / statistics.median(found[1:]):.0f} times as long as the others.")


if __name__ == "__main__":
    main()
