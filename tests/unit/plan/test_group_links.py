"""Which links groups of ranks use: the table of `plan --explain-placement`."""

import pytest

from longhelix.perf.setting import Dtypes, Setting
from longhelix.plan.choice import Choice
from longhelix.plan.links import group_links, hosts_of
from longhelix.plan.question import Question
from longhelix.spec.presets import load_model, load_system

pytestmark = pytest.mark.unit


def choice(strategy="Helix", **degrees):
    layout = {"dp": 1, "kvp": 1, "tpa": 1, "tpf": 1, "ep": 1, "pp": 1, "ffn_replicas": 1, "placement": "striped"}
    gpus = degrees.get("kvp", 1) * degrees.get("tpa", 1) * degrees.get("pp", 1)
    return Choice(
        strategy=strategy, layout=layout | degrees, replicas=1, gpus=gpus, batch=4, users=4, chunk_tokens=512,
        ttl_s=0.0, ttl_p95_s=0.0, ttft_s=0.0, rate_per_s=None, tokens_per_s_per_user=0.0, tokens_per_s_per_gpu=0.0,
        memory_bytes_per_gpu=0, headroom_bytes=0, cost_per_million_tokens=None, draft_tokens=0, accepted_tokens=1.0,
        violates=(),
    )  # fmt: skip


def found(system, given):
    setting = Setting(load_model("llama-3.1-405b"), load_system(system), Dtypes("fp8", "fp8"))
    return {each.name: each for each in group_links(Question(setting, 1_000_000, given.gpus), given)}


def test_groups_of_one_server_stay_on_its_links():
    links = found("h200", choice(kvp=2, tpa=4, tpf=8))
    assert {name: (len(each.ranks), each.hosts, each.domains, each.link) for name, each in links.items()} == {
        "KVP": (2, 1, 1, "scale-up"),
        "attention": (8, 1, 1, "scale-up"),
        "FFN": (8, 1, 1, "scale-up"),
    }
    assert links["KVP"].ranks == (0, 4)


def test_kvp_and_stages_cross_servers_where_tpa_does_not():
    links = found("h200", choice(kvp=2, tpa=8, tpf=16, pp=2))
    assert {name: (each.ranks[:2], each.hosts, each.link) for name, each in links.items()} == {
        "KVP": ((0, 8), 2, "scale-out"),
        "attention": ((0, 1), 2, "scale-out"),
        "FFN": ((0, 1), 2, "scale-out"),
        "stages": ((0, 16), 2, "scale-out"),
    }
    assert all(0 < each.share < 1 and each.sent_bytes > 0 and each.seconds > 0 for each in links.values())
    assert sum(each.share for each in links.values()) < 1


def test_a_domain_of_many_servers_is_one_link():
    links = found("gb200", choice(kvp=8, tpa=8, tpf=64))
    assert (links["KVP"].hosts, links["KVP"].domains, links["KVP"].link) == (8, 1, "scale-up")


def test_ranks_are_placed_on_servers_as_the_engine_places_them():
    assert str(hosts_of(load_system("h200"), 12)) == "0,1,2,3,4,5;6,7,8,9,10,11"
    assert str(hosts_of(load_system("h200"), 4)) == "0,1,2,3"
