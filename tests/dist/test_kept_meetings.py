"""Instances with clocks of their own that share requests, then not for a while, and then again: by real ranks."""

import os
from pathlib import Path

import pytest

from longhelix import LLM, Layout, SamplingParams
from oracle import FAMILIES, make_oracle, save_tokenizer_files

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

KEEP_FEW = """
from longhelix.compute.parallel import instance_groups
instance_groups._KEPT_STEPS = 20
"""


def open_pidfds(llm):
    """Of all ranks: a group has one for each of its other ranks."""
    links = [link for pid in llm.process_ids.values() for link in Path(f"/proc/{pid}/fd").iterdir()]
    return sum("pidfd" in os.readlink(link) for link in links if link.is_symlink())


def test_groups_that_nobody_needs_leave_no_descriptors(tmp_path, monkeypatch):
    """And when they are needed again, the tokens are those of before."""
    oracle = make_oracle(FAMILIES["llama"], tmp_path / "model")
    save_tokenizer_files(oracle.path)
    (tmp_path / "sitecustomize.py").write_text(KEEP_FEW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    layout = Layout(kvp=3, ffn_replicas=3)
    settings = {"block_tokens": 4, "placement": "growing", "growth_limit_tokens": 16, "prefix_cache": False}
    with LLM(str(oracle.path), layout, device="cpu", **settings) as llm:
        assert llm.config.scheduler.steps.own_clocks
        at_first, held, tokens = open_pidfds(llm), [], []
        for _ in range(3):
            shared = [[2 + at] * 28 for at in range(3)]  # each by two instances
            tokens.append([one.token_ids for one in llm.generate(shared, SamplingParams(4, ignore_eos=True))])
            held.append(open_pidfds(llm))
            for _ in range(4):  # by one instance each
                llm.generate([[3]] * 3, SamplingParams(14, ignore_eos=True))
            held.append(open_pidfds(llm))
    assert tokens[0] == tokens[1] == tokens[2]
    assert all(count > at_first for count in held[::2])
    assert held[1::2] == [at_first] * 3
