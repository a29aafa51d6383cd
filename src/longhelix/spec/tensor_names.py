"""What checkpoints call their tensors: the same models are published under names with and without prefixes."""

import re

# What stands before a decoder's own names: its place in a model for causal language models, none (`AutoModel`'s
# exports, Qwen3-Embedding), its place in a vision-language model, and what wrappers of training add.
_DECODER = re.compile(
    r"(?:(?:module|_orig_mod|base_model|model|language_model|text_model)\.)*((?:embed_tokens|layers|norm|lm_head)\..+)",
    re.DOTALL,
)
_TOWER = re.compile(r"(?:(?:module|_orig_mod|base_model|model)\.)*visual\.(.+)", re.DOTALL)


def canonical(name: str) -> str:
    """A tensor's name as transformers writes that of the model: `model.layers.0...`, `lm_head.weight`, and of a vision
    tower `model.visual...`. Names of anything else stay as they are."""
    name = name.replace("._orig_mod.", ".")  # of layers that were compiled one by one
    if (match := _DECODER.fullmatch(name)) is not None:
        return match[1] if match[1].startswith("lm_head.") else f"model.{match[1]}"
    if (match := _TOWER.fullmatch(name)) is not None:
        return f"model.visual.{match[1]}"
    return name
