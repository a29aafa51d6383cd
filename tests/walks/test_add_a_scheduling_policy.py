"""A newcomer's walk: a scheduling policy is one class, of the form that scheduler/policy.py describes."""

from array import array
from collections import deque

import pytest

from longhelix import LLM
from longhelix.scheduler.config import SchedulerConfig, StepConfig
from longhelix.scheduler.loop import Loop
from longhelix.scheduler.policy import Policy
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import SampledToken, StepResult

PROMPTS = [40, 10, 25]
CONFIG = SchedulerConfig(
    kvp=2, num_blocks=64, max_model_len=64, block_tokens=4, steps=StepConfig(chunk_tokens=8, max_running=8)
)


class ShortestFirst(Policy):
    """The request with the least left of its prefill."""

    overtakes = True

    def sort_key(self, job, left_s, now_s):
        return left_s


class OneTokenEach:
    """A runner without a model: every sequence that samples gets token 1."""

    def __init__(self):
        self.results = deque()

    def submit(self, step):
        sampled = tuple(SampledToken(chunk.id, 1) for chunk in step.chunks if chunk.sample)
        self.results.append(StepResult(step.id, sampled, step.work.rows))

    def collect(self, timeout_s):
        return self.results.popleft()


def finished(policy):
    """Ids of requests with PROMPTS in the order in which they end."""
    loop = Loop(Scheduler(CONFIG, policy=policy), OneTokenEach(), clock=lambda: 0.0)
    for request_id, tokens in enumerate(PROMPTS):
        sampling = SamplingParams(max_new_tokens=1)
        loop.add(Request(request_id, array("i", [0] * tokens), sampling, frozenset(), seed=0, arrival_s=0.0))
    ended = []
    while loop.has_work and (stepped := loop.step()) is not None:
        ended += [event.request_id for event in stepped[1] if event.finish_reason]
    return ended


@pytest.mark.unit
def test_a_policy_says_who_goes_next():
    assert finished(Policy()) == [0, 1, 2]
    assert finished(ShortestFirst()) == [1, 2, 0]


def generated(policy):
    """Token ids by request that an engine generates after PROMPTS, in the order in which the requests end."""
    settings = {"dtype": "float32", "device": "cpu", "max_model_len": 64, "max_running": 1}
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with LLM("builtin", policy=policy, **settings) as llm:
        for place, tokens in enumerate(PROMPTS):
            llm.add([1000 * place + token for token in range(tokens)], sampling)
        ended = {}
        while llm.has_work:
            ended |= {delta.request_id: delta.result.token_ids for delta in llm.step() if delta.result is not None}
    return ended


@pytest.mark.dist
def test_an_engine_runs_it():
    """The order of requests is the policy's, and their tokens are those of any policy."""
    expected, found = generated("fcfs"), generated(ShortestFirst())
    assert (list(expected), list(found)) == ([0, 1, 2], [1, 2, 0])
    assert found == expected
