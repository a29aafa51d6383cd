"""The program that every host of a cluster runs in tests: engines for one case after the other.

python hosts_program.py NODE_RANK CASES. CASES: a JSON list; each case has a model, a layout, settings, prompts and
sampling. Host 0 prints lines of JSON: {"tokens": [...]} for each case, {"step": N} after each step if the case has
"steps", and {"failed": REASON, "after_s": SECONDS} if the engine fails, which then starts again.
"""

import json
import sys
import time

from longhelix import LLM, EngineError, Layout, SamplingParams


def main():
    node_rank, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    for case in cases:
        try:
            with LLM(case["model"], Layout(**case["layout"]), node_rank=node_rank, **case["settings"]) as llm:
                say(answered(llm, case))
        except SystemExit as end:  # a follower
            if end.code:
                raise


def answered(llm, case):
    ids = [llm.add(prompt, SamplingParams(**case["sampling"])) for prompt in case["prompts"]]
    tokens, results = {id: [] for id in ids}, {}
    steps, progress_s = 0, time.monotonic()
    while len(results) < len(ids):
        try:
            for delta in llm.step():
                if delta.token_id is not None:
                    tokens[delta.request_id].append(delta.token_id)
                if delta.result is not None:
                    results[delta.request_id] = delta.result
            progress_s = time.monotonic()
        except EngineError as error:
            say({"failed": str(error), "after_s": time.monotonic() - progress_s})
            llm.restart(most_failures=5)
            say({"restarted": True})
        steps += 1
        if case.get("steps"):
            say({"step": steps})
    assert [results[id].token_ids for id in ids] == [tokens[id] for id in ids]
    counters = llm._core.counters
    return {
        "tokens": [tokens[id] for id in ids],
        "steps": counters.steps,
        "sent": llm._cluster.sent if llm._cluster else {},
        "network_bytes": counters.network_bytes,
    }


def say(found):
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
