"""What every host of a cluster runs in tests of features: engines for one case after the other.

python host_features_program.py NODE_RANK CASES. CASES: a JSON list. Each case has a model, a layout, settings and
rounds: the requests of a round run together. It may have `saves`, token ids of contexts to save first, by name; and
`copies`, pairs of folders, of which host 0 copies the first into the second before the engine starts.

Host 0 prints a line of JSON for each case: what `answers` returns.
"""

import json
import shutil
import sys
from dataclasses import asdict

from longhelix import LLM, Guide, ImagePrompt, Layout, SamplingParams, UserError

_SHOWN = (
    "token_ids",
    "text",
    "finish_reason",
    "cached_tokens",
    "preemptions",
    "swapped_tokens",
    "moved_bytes",
    "prompt_logprobs",
)


def main():
    node_rank, cases = int(sys.argv[1]), json.loads(sys.argv[2])
    for case in cases:
        if node_rank == 0:
            for source, target in case.get("copies", ()):
                shutil.copytree(source, target, dirs_exist_ok=True)
        try:
            print(json.dumps(answers(case, node_rank=node_rank)), flush=True)
        except SystemExit as end:  # a follower
            if end.code:
                raise


def answers(case, **place):
    """The results of each round, and what steps have counted."""
    with LLM(case["model"], Layout(**case["layout"]), **case["settings"], **place) as llm:
        refusals, sampled = [], []
        for name, token_ids in case.get("saves", {}).items():
            try:
                llm.save_context(name, token_ids)
            except UserError as error:
                refusals.append(str(error))
        rounds = [results(llm, requests, sampled) for requests in case["rounds"]]
        counters = llm._core.counters
        return {
            "rounds": rounds,
            "refusals": refusals,
            "sampled": sampled,
            "rows": counters.rows,
            "exchanged_bytes": counters.exchanged_bytes,
            "network_bytes": counters.network_bytes,
        }


def results(llm, requests, sampled):
    """By request; or why one of them is refused. sampled: how many tokens each step has given; takes more of them."""
    try:
        ids = [
            llm.add(prompt_of(request), sampling_of(request), context=request.get("context")) for request in requests
        ]
    except UserError as error:
        return str(error)
    found = {}
    while len(found) < len(ids):
        deltas = llm.step()
        sampled.append(sum(delta.token_id is not None for delta in deltas))
        found |= {delta.request_id: asdict(delta.result) for delta in deltas if delta.result is not None}
    return [{name: found[id][name] for name in _SHOWN} for id in ids]


def prompt_of(request):
    return ImagePrompt(request["prompt"], request["images"]) if request.get("images") else request["prompt"]


def sampling_of(request):
    sampling = dict(request["sampling"])
    if "guide" in sampling:
        sampling["guide"] = Guide(*sampling["guide"])
    return SamplingParams(**sampling)


if __name__ == "__main__":
    main()
