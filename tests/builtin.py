"""The built-in model: its checkpoint, opened once, and its config, as transformers has it."""

import functools

from longhelix.compute.models.model_files import open_checkpoint


@functools.cache
def builtin():
    return open_checkpoint("builtin")


def builtin_config():
    """SmolLM2-135M's sizes, written down here."""
    from transformers import LlamaConfig  # takes seconds, and few ask

    return LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
