"""What a request with a guide says of it to the scheduler."""

from types import SimpleNamespace

import pytest

from longhelix.engine.core import TokenCore
from longhelix.scheduler.guide import Guide
from longhelix.scheduler.request import SamplingParams
from longhelix.spec.vocabulary import Vocabulary

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("guide", "expected_s"), [(Guide("regex", "a+"), 0.43), (None, 0.0)])
def test_a_request_knows_how_long_its_guide_takes_to_be_compiled(guide, expected_s):
    core = object.__new__(TokenCore)  # without ranks
    spec = SimpleNamespace(vocabulary=Vocabulary(10, (9,)), vision=None)
    core.config = SimpleNamespace(spec=spec, scheduler=SimpleNamespace(max_model_len=100))
    core._failure, core._next_id = "", 7
    core._guides = SimpleNamespace(check={Guide("regex", "a+"): 0.43}.__getitem__)
    core._scheduler = SimpleNamespace(check=lambda request: None)
    request = core.request([1, 2], SamplingParams(guide=guide))
    assert (request.id, request.guide_s) == (7, expected_s)
    assert request.resumed(request.prompt_token_ids).guide_s == expected_s
