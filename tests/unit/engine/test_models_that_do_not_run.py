"""What can be planned for and not run is refused where a checkpoint is taken up, in a sentence."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import _max_model_len, resolve
from longhelix.errors import UserError
from longhelix.spec import Visibility
from longhelix.spec.layout import Layout
from toy_model import toy_model

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
        "longhelix cannot run this gpt_oss model, because these parts are not implemented: attention sinks, the "
        "activation clamped_swiglu, experts with biases. `longhelix plan` can plan for it"
    )


@pytest.mark.parametrize("full_layers", [(), (1,)])
def test_a_window_in_some_layers_is_refused_like_one_in_all(full_layers):
    sizes = {"num_layers": 2, "hidden_size": 64, "num_query_heads": 4, "num_kv_heads": 2, "head_size": 16}
    sizes |= {"ffn_size": 32, "vocab_size": 100, "max_positions": 4096}
    spec = toy_model("mistral", **sizes, visibility=Visibility(window_tokens=100), full_layers=full_layers)
    for asked in (None, 101):
        with pytest.raises(UserError, match="sliding window of 100 tokens, which longhelix does not support"):
            _max_model_len(spec, asked)
    assert _max_model_len(spec, 100) == 100
    assert _max_model_len(spec.without_windows(), None) == 4096
