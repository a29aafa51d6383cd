"""Which of several places says a setting."""

from types import SimpleNamespace

import pytest

from longhelix.cli import options
from longhelix.cli.options import EngineFlags, ModelOptions

pytestmark = pytest.mark.unit


def test_flags_win_over_a_layout_file_and_that_over_a_verbs_defaults(tmp_path, monkeypatch):
    file = tmp_path / "layout.yaml"
    file.write_text("kvp: 2\nkv_cache_tokens: 4096\nplacement: striped\n")
    started = []

    def start(model, layout, **settings):
        started.append((layout, settings))
        return SimpleNamespace(config=None)

    monkeypatch.setattr(options, "LLM", start)
    defaults = {"policy": "lars", "placement": "auto", "kv_cache_tokens": "auto"}
    flags = EngineFlags(placement="growing")
    ModelOptions(model="builtin", layout=str(file)).start(flags, lambda config: None, defaults)
    ((layout, settings),) = started
    assert layout.kvp == 2
    found = {name: settings[name] for name in defaults}
    assert found == {"policy": "lars", "placement": "growing", "kv_cache_tokens": 4096}
