"""What can be planned for and not run is refused where a checkpoint is taken up, in a sentence."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.errors import UserError
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit


def test_a_model_with_missing_parts_is_refused_with_their_names(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt_oss", "vocab_size": 100, "num_key_value_heads": 2} | sizes)
    )
    save_file({"model.norm.weight": np.zeros(8, dtype=np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError) as caught:
        resolve(open_checkpoint(str(tmp_path)), Layout(), EngineOptions(device="cpu"))
    assert caught.value.code == "unsupported_model"
    assert str(caught.value) == (
        "longhelix cannot run this gpt_oss model, because these parts are not implemented: attention sinks, "
        "experts with biases. `longhelix plan` can plan for it"
    )
