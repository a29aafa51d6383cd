"""Random weights of a decoder, and its forward pass in float64, written out in torch.

Layers have grouped-query attention, and a dense FFN or experts. They may differ in all that their specs can say but
sinks, gates of outputs and what depends on positions otherwise than by rotation.
"""

from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import gelu, relu, silu

from longhelix.compute.models.parameters import declare
from longhelix.spec.layout import Layout

EPS = 1e-6  # rms_norm_eps of the models


def random_weights(spec, generator):
    """Return random weights in float32 by their usual names, whatever names the spec's family has for them."""
    parameters = declare(replace(spec, architecture="llama"), Layout(), 0)
    return {
        source.name: float("norm" in source.name) + 0.2 * torch.randn(source.shape, generator=generator)
        for parameter in parameters
        for source in parameter.sources
    }


def logits_of(layers, weights, ids):
    """Return logits_SV in float64.

    Args:
        layers: the specs of the layers.
        weights: the model's weights by their usual names.
        ids: the tokens.
    """
    weights = {name: weight.double() for name, weight in weights.items()}
    x_SH = weights["model.embed_tokens.weight"][ids]
    for index, layer in enumerate(layers):
        own = {name.removeprefix(f"model.layers.{index}."): weight for name, weight in weights.items()}
        own = {name: weight + is_less_one(name, layer) for name, weight in own.items()}
        before = "pre_feedforward" if layer.norms.after else "post_attention"
        x_SH = added(x_SH, ("input", "post_attention"), layer, own, attended)
        x_SH = added(x_SH, (before, "post_feedforward"), layer, own, ffn)
    last = weights["model.norm.weight"]
    return norm(x_SH, last + is_less_one("norm.weight", layers[-1])) @ weights["lm_head.weight"].T


def is_less_one(name, layer):
    """Whether this is the weight of a norm that is stored minus one."""
    return float(layer.norms.plus_one and name.endswith("norm.weight"))


def added(x_SH, names, layer, own, part):
    """Return x_SH with the output of a mixer or an FFN added. names: those of the norms before and after it."""
    before, after = (f"{name}_layernorm.weight" for name in names)
    y_SH = part(norm(x_SH, own[before]) if layer.norms.before else x_SH, layer, own)
    return x_SH + layer.residual_scale * (norm(y_SH, own[after]) if layer.norms.after else y_SH)


def ffn(x_SH, layer, own):
    return mlp(x_SH, own, "mlp.", layer.dense.activation) if layer.moe is None else mixed(x_SH, layer.moe, own)


def norm(x_SX, weight_X):
    return x_SX * (x_SX.square().mean(-1, keepdim=True) + EPS) ** -0.5 * weight_X


FUNCTIONS = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu_squared": lambda x: relu(x).square(),
    "clamped_swiglu": lambda x: x.clamp(max=7) * (1.702 * x.clamp(max=7)).sigmoid(),
}


def mlp(x_SH, own, name, activation):
    up_Sf = x_SH @ own[f"{name}up_proj.weight"].T
    function = FUNCTIONS[activation.function]
    if activation.gated:
        limited_Sf = up_Sf.clamp(-7, 7) + 1 if activation.function == "clamped_swiglu" else up_Sf
        inner_Sf = function(x_SH @ own[f"{name}gate_proj.weight"].T) * limited_Sf
    else:
        inner_Sf = function(up_Sf)
    return inner_Sf @ own[f"{name}down_proj.weight"].T


def mixed(x_SH, moe, own):
    """Experts with softmax scores, normalised, and a shared one."""
    scores_SE = (x_SH @ own["mlp.gate.weight"].T).softmax(-1)
    best_SY, experts_SY = scores_SE.topk(moe.experts_per_token)
    out_SH = mlp(x_SH, own, "mlp.shared_experts.", moe.activation)
    for expert in range(moe.num_experts):
        weight_S = (best_SY / best_SY.sum(-1, keepdim=True) * (experts_SY == expert)).sum(-1)
        out_SH = out_SH + weight_S[:, None] * mlp(x_SH, own, f"mlp.experts.{expert}.", moe.activation)
    return out_SH


def attended(x_SH, layer, own):
    attention = layer.attention

    def heads(name, count):
        bias = own[f"self_attn.{name}_proj.bias"] if attention.projections.qkv_bias else 0.0
        return (x_SH @ own[f"self_attn.{name}_proj.weight"].T + bias).unflatten(1, (count, -1)).transpose(0, 1)

    shape, positions_S = attention.heads, torch.arange(len(x_SH))
    q_qSC = heads("q", shape.num_query_heads)
    k_kSC, v_kSC = heads("k", shape.num_kv_heads), heads("v", shape.num_kv_heads)
    if attention.norms.qk:
        q_qSC, k_kSC = norm(q_qSC, own["self_attn.q_norm.weight"]), norm(k_kSC, own["self_attn.k_norm.weight"])
    if attention.norms.value:
        v_kSC = norm(v_kSC, 1.0)
    q_qSC, k_qSC = rotated(q_qSC, attention), rotated(k_kSC, attention).repeat_interleave(shape.group_size, 0)
    scores_qSS = q_qSC @ k_qSC.transpose(1, 2) * attention.scale
    if attention.scores.cap is not None:
        scores_qSS = (scores_qSS / attention.scores.cap).tanh() * attention.scores.cap
    first_S1 = torch.tensor([attention.visibility.first_seen(position) for position in positions_S.tolist()])[:, None]
    seen_SS = (positions_S <= positions_S[:, None]) & (positions_S >= first_S1)
    weights_qSS = scores_qSS.masked_fill(~seen_SS, -torch.inf).softmax(-1)
    out_SX = (weights_qSS @ v_kSC.repeat_interleave(shape.group_size, 0)).transpose(0, 1).flatten(1)
    return out_SX @ own["self_attn.o_proj.weight"].T


def rotated(x_nSC, attention):
    size, rope = attention.rotated_size, attention.rope
    frequencies_R = rope.theta ** (-torch.arange(0, size, 2).double() / max(size, 1)) / rope.scaling.factor
    turns_SR = torch.exp(1j * torch.arange(x_nSC.shape[1])[:, None] * frequencies_R)
    pairs_nSR = torch.complex(x_nSC[..., : size // 2], x_nSC[..., size // 2 : size]) * turns_SR
    return torch.cat((pairs_nSR.real, pairs_nSR.imag, x_nSC[..., size:]), dim=-1)
