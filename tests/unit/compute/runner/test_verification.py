"""Draft tokens through the runner: whatever is asked of its sampling, a request has the tokens that it has without."""

import random
from array import array
from dataclasses import replace

import pytest
from test_adjustments import ASKED, FEW_BLOCKS, GUIDED, TABLE, ending, guided_runner, run_all
from test_runner import VOCAB, make_request, make_runner

from longhelix.compute.runner.matchers import Matchers
from longhelix.compute.runner.seen_tokens import SeenTokens
from longhelix.scheduler.guide import Guide

pytestmark = pytest.mark.unit


class Drafts:
    """Draft tokens of all requests but number 2: of those that it is known to have any number, then any others."""

    def __init__(self, known, seed):
        self._known, self._chance = known, random.Random(seed)
        self.num_right = self.num_drafted = 0

    def drafts(self, request):
        return request.id != 2

    def propose(self, seq):
        done = seq.request.num_generated + len(seq.tokens.output)
        right = self._known[seq.id][done : done + self._chance.randrange(5)]
        found = right + [self._chance.randrange(VOCAB) for _ in range(self._chance.randrange(4))]
        self.num_right += len(right)
        self.num_drafted += len(found)
        return array("i", found)


@pytest.mark.parametrize("settings", [{}, FEW_BLOCKS, {"prefix_cache": True, "max_running": 1}], ids=["", "few", "hit"])
@pytest.mark.parametrize("asked", ASKED + GUIDED, ids=str)
def test_tokens_are_those_without_drafts(asked, settings):
    requests = [ending(make_request(0, 20, 40, **asked)), make_request(1, 20, 40, **asked), make_request(2, 9, 20)]
    requests.append(replace(requests[0], id=3))  # begins with cached KV, if any is
    expected, logprobs, *_ = run_all(guided_runner(), requests, **settings)
    runner, drafter = guided_runner(), Drafts(expected, str(asked))
    found, also, usages, _ = run_all(runner, requests, drafter=drafter, **settings)
    assert found == expected
    assert also == logprobs
    assert drafter.num_drafted > drafter.num_right > 0
    assert not runner.running.by_id
    assert not runner.running.decoding.records
    assert (sum(usage.preemptions for usage in usages.values()) > 0) == (settings is FEW_BLOCKS)
    assert len(runner.running.numbers._free) == len(runner.running.numbers.values)


def test_right_drafts_take_fewer_steps():
    """40 tokens in rows of up to five."""

    class Right(Drafts):
        def propose(self, seq):
            return array("i", self._known[seq.id][len(seq.tokens.output) :][:4])

    requests = [make_request(0, 20, 40)]
    runner = make_runner()
    expected, *_ = run_all(runner, requests)
    num_plain = len(runner.model.fed)
    runner = make_runner()
    found, *_ = run_all(runner, requests, drafter=Right(expected, 0))
    assert found == expected
    assert (num_plain, len(runner.model.fed)) == (3 + 39, 3 + 8)
    assert [len(fed) for fed in runner.model.fed[3:]] == [5] * 7 + [4]


def test_a_row_after_a_draft_token_has_seen_it_and_others_have_not():
    seen = SeenTokens(range(3, 9))
    after = seen.with_token(4).with_token(8)
    assert seen.words_W.tolist()[0] == 0
    assert after.words_W.tolist()[0] == 0b100010


def test_after_a_token_that_its_guide_does_not_allow_a_text_counts_as_ended():
    """It is never sampled, and so nobody sees what is sampled after it. The guide itself goes on."""
    matcher = Matchers(TABLE).new(Guide("regex", "ab[ab]c"))
    assert matcher.with_draft_token(5).has_ended
    allowed = matcher.with_draft_token(2)
    assert not allowed.has_ended
    assert allowed.with_draft_token(0).allowed().nonzero()[0].tolist() == [5]
    assert matcher.with_draft_token(5).with_draft_token(2).has_ended
    assert matcher.allowed().nonzero()[0].tolist() == [0, 2, 9]
