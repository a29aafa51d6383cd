"""The dashboard shows several servers of a model: together, or each by its name."""

import json
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

DASHBOARD = json.loads((Path(__file__).parents[3] / "deploy" / "grafana.json").read_text())
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("target", TARGETS, ids=[target["expr"] for target in TARGETS])
def test_series_of_several_servers_are_summed_or_named(target):
    is_named = "{{instance}}" in target["legendFormat"]
    series = len(re.findall("longhelix:", target["expr"]))
    sums = len(re.findall(r"sum(?: by\([a-z_, ]+\) )?\((?:rate\()?longhelix:", target["expr"]))
    assert sums == (0 if is_named else series)
