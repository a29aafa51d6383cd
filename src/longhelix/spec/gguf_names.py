"""What GGUF files call the tensors of models, and which part of a stored tensor a tensor of the model is."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from longhelix.spec.family import Family
from longhelix.spec.gguf import GgufForm

_MODEL_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
# Modules of layers in all families, as most Hugging Face checkpoints call them.
LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_rot_embd": "self_attn.rotary_emb.inv_freq",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    # Layers that predict further tokens.
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
# The experts of a layer are one tensor. The last one has two projections: the rows of the gate, then of the other.
_EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
# Up-projections of latent attention may be split. Hugging Face checkpoints have the rows of each head's keys and values
# in one tensor.
_LATENT_HALVES = {"attn_k_b.weight": "k_b", "attn_v_b.weight": "v_b"}
LATENT_UP = "self_attn.kv_b_proj.weight"
_SCORE_BIAS = "exp_probs_b.bias"
_VECTORS = frozenset({"ffn_gate_inp_shexp"})  # stored without their only row


class GgufPart(NamedTuple):
    """A tensor of the model, and the part of a stored tensor that it is.

    Attributes:
        name: Its name in a Hugging Face checkpoint. With `expert`, "{}" stands for the number of an expert.
        is_of_expert: Whether the stored tensor has all experts of a layer.
        place, places: It is the part `place` of `places` equal parts of the rows.
        is_interleaved: Whether rows of heads are stored for interleaved rotation.
        is_row: Whether it is one row, which is stored as a vector.
        half: "k_b" or "v_b" if it is a half of the up-projection of latents.
    """

    name: str
    is_of_expert: bool = False
    place: int = 0
    places: int = 1
    is_interleaved: bool = False
    is_row: bool = False
    half: str | None = None


def model_parts(name: str, form: GgufForm, family: Family) -> tuple[GgufPart, ...]:
    """Return what a stored tensor is made of. Empty: models of the family have no such tensor."""
    return tuple(_parts(name, form, family))


def _parts(name: str, form: GgufForm, family: Family) -> Iterator[GgufPart]:
    match = re.fullmatch(r"(?:blk\.([0-9]{1,9})\.)?([\w.]+)\.(weight|bias)", name)
    if match is None:
        return
    layer, module, kind = match.groups()
    if layer is None:
        if module in _MODEL_MODULES:
            yield GgufPart(f"{_MODEL_MODULES[module]}.{kind}")
        return
    modules, stored = {**LAYER_MODULES, **form.modules}, f"{module}.{kind}"

    def named(tensor: str) -> str:
        return f"model.layers.{layer}.{family.tensors.get(tensor, tensor)}"

    if module in _EXPERTS:
        projections = _EXPERTS[module]
        for place, projection in enumerate(projections):
            tensor = named(f"mlp.experts.{{}}.{projection}.{kind}")
            yield GgufPart(tensor, is_of_expert=True, place=place, places=len(projections))
    elif stored in _LATENT_HALVES:
        yield GgufPart(named(LATENT_UP), half=_LATENT_HALVES[stored])
    elif stored == _SCORE_BIAS:
        yield GgufPart(named("mlp.gate.e_score_correction_bias"))
    elif module in modules:
        tensor = named(f"{modules[module]}.{kind}".removesuffix(".weight" if module == "attn_rot_embd" else ""))
        yield GgufPart(tensor, is_interleaved=module in form.interleaved, is_row=module in _VECTORS)
