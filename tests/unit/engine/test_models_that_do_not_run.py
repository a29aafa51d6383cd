"""What can be planned for and not run is refused where a checkpoint is taken up, in a sentence."""

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import save_file

from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import _max_model_len, resolve
from longhelix.errors import UserError
from longhelix.spec import FAMILIES, PLANNED_FAMILIES, ModelSpec, RopeSpec
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("family", PLANNED_FAMILIES)
def test_families_that_are_planned_for_alone_are_refused_with_those_that_run(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    save_file({"model.norm.weight": np.zeros(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        resolve(open_checkpoint(str(tmp_path)), Layout(), EngineOptions(device="cpu"))
    assert caught.value.code == "unknown_architecture"
    assert str(caught.value) == f"the model's architecture is {family!r}: longhelix runs {', '.join(FAMILIES)}"


@pytest.mark.parametrize("full_layers", [(), (1,)])
def test_a_window_in_some_layers_is_refused_like_one_in_all(full_layers):
    spec = ModelSpec("mistral", 2, 64, 4, 2, 16, 32, 100, 4096, 1e-5, RopeSpec(), "float32", sliding_window=100,
                     full_layers=full_layers)  # fmt: skip
    for asked in (None, 101):
        with pytest.raises(UserError, match="sliding window of 100 tokens, which longhelix does not support"):
            _max_model_len(spec, asked)
    assert _max_model_len(spec, 100) == 100
    assert _max_model_len(replace(spec, sliding_window=None), None) == 4096
