"""The program that every host of a cluster runs in tests: engines for one case after the other.

python hosts_program.py NODE_RANK CASES. CASES: a JSON list; each case has a model, a layout, settings, prompts and
sampling. Host 0 prints one line of JSON for each case.
"""

import json
import sys

from longhelix import LLM, Layout, SamplingParams


def main():
    node_rank, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    for case in cases:
        try:
            with LLM(case["model"], Layout(**case["layout"]), node_rank=node_rank, **case["settings"]) as llm:
                results = llm.generate(case["prompts"], SamplingParams(**case["sampling"]))
                found = {
                    "tokens": [list(result.token_ids) for result in results],
                    "cached": [result.cached_tokens for result in results],
                }
        except SystemExit as end:  # a follower
            assert end.code == 0, end
        else:
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
