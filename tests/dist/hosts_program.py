"""The program that every host of a cluster runs in tests: engines for one case after the other.

python hosts_program.py NODE_RANK CASES. CASES: a JSON list; each case has a model, a layout, settings, prompts and
sampling. Host 0 prints lines of JSON: {"tokens": [...]} for each case, and {"failed": REASON} if the engine fails,
which then starts again. If the case has "pause_in", host 0 prints {"paused": PHASE} once, and goes on when it reads a
line. The phases:

    idle: before all requests, while the engine is watched as a server does it
    unwatched: before all requests, while nobody looks at the engine
    prefill: half of the last prompt is on the ranks
    decode: the last request has some of its tokens
"""

import json
import select
import sys

from longhelix import LLM, EngineError, Layout, SamplingParams

_WATCH_S = 0.25


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
    phase = case.get("pause_in")
    if phase in ("idle", "unwatched"):
        say({"paused": phase})
        while phase == "idle" and not select.select([sys.stdin], [], [], _WATCH_S)[0]:
            surviving(llm, llm.watch)
        sys.stdin.readline()
        phase = None
    ids = [llm.add(prompt, SamplingParams(**case["sampling"])) for prompt in case["prompts"]]
    tokens, results = {id: [] for id in ids}, {}
    while len(results) < len(ids):
        for delta in surviving(llm, llm.step) or ():
            if delta.token_id is not None:
                tokens[delta.request_id].append(delta.token_id)
            if delta.result is not None:
                results[delta.request_id] = delta.result
        is_half_prefilled = 2 * llm.prefilled_tokens(ids[-1]) >= len(case["prompts"][-1])
        if (phase == "prefill" and is_half_prefilled) or (phase == "decode" and len(tokens[ids[-1]]) > 2):
            say({"paused": phase, "prefilled": llm.prefilled_tokens(ids[-1]), "tokens": len(tokens[ids[-1]])})
            sys.stdin.readline()
            phase = None
    assert [results[id].token_ids for id in ids] == [tokens[id] for id in ids]
    counters = llm._core.counters
    return {
        "tokens": [tokens[id] for id in ids],
        "steps": counters.steps,
        "sent": llm._cluster.sent if llm._cluster else {},
        "network_bytes": counters.network_bytes,
    }


def surviving(llm, call):
    """Return the result of a method of the engine. If the engine fails, start it again and return None."""
    try:
        return call()
    except EngineError as error:
        say({"failed": str(error)})
        llm.restart(most_failures=5)
        return None


def say(found):
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
