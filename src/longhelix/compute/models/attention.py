"""GQA attention of one layer in Helix: local attention, one exchange, output projection at TP = N."""

from functools import partial

import torch
from torch import Tensor, nn

from longhelix.compute.kernels import KVLayer, Weight, linear, partial_attention, rms_norm, rotate_and_write
from longhelix.compute.models.batch import Batch
from longhelix.compute.models.overlap import attend_and_exchange, attend_and_share
from longhelix.compute.models.projection import Residual, add_projected, normed_local_rows, project_normed
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.exchange import gather_heads
from longhelix.compute.parallel.mesh import Mesh
from longhelix.spans import UNTRACED, Spans
from longhelix.spec import ModelSpec
from longhelix.spec.attention import GroupedQueryAttention


class Attention(nn.Module):
    """Attention of Helix (arXiv 2507.07120, section 2.1).

    Every KVP rank computes QKV for the heads of its TPA shard, which are the same on all ranks with KV of a request. It
    writes only the KV that it owns, attends to its KV shard, and exchanges partial outputs for complete heads.
    """

    def __init__(self, spec: ModelSpec, index: int, mesh: Mesh, weights: Weights, spans: Spans = UNTRACED) -> None:
        super().__init__()
        attention = spec.layers[index].attention
        assert isinstance(attention, GroupedQueryAttention)
        self.group, self.rotation = spec.group_of(index), spec.rotation_of(index)
        layout, heads, prefix = mesh.layout, attention.heads, f"layers.{index}."
        self.mesh = mesh
        self.spans = spans
        self.scale = attention.scale
        self.attend = partial(partial_attention, cap=attention.scores.cap)
        self.eps = spec.rms_norm_eps
        self.head_size = attention.head_size
        self.heads_among = partial(layout.heads_among, heads, mesh.rank)
        self.merged_heads_per_rank = [len(layout.merged_query_heads(heads, rank)) for rank in mesh.kvp.ranks]
        self.norm = weights.find(prefix + "attention_norm")
        norm_after = weights.find(prefix + "attention_norm_after")
        self.residual = Residual(norm_after, self.eps, spec.layers[index].residual_scale)
        self.qkv = weights.product(prefix + "qkv")
        self.qkv_bias = weights.find(prefix + "qkv_bias")
        self.q_norm = weights.find(prefix + "q_norm")
        self.k_norm = weights.find(prefix + "k_norm")
        self.norms_values = attention.norms.value
        self.output = weights.product(prefix + "output")
        self.output_bias = weights.find(prefix + "output_bias")

    @property
    def products(self) -> tuple[Weight, ...]:
        return self.qkv, self.output

    def forward(self, hidden_TH: Tensor, batch: Batch, kv: KVLayer) -> Tensor:
        """Return hidden_TH with this layer's attention added."""
        span = self.spans.begin("QKV")
        rows, shared = batch.attention, batch.sharding.shared
        if batch.sharding.holders is None:
            qkv_tX = project_normed(hidden_TH, self.qkv, self.norm, self.eps, batch, bias=self.qkv_bias)
        else:
            x_tH, options = normed_local_rows(hidden_TH, self.norm, self.eps, batch, self.qkv.dtype)
            qkv_tX = linear(x_tH, self.qkv, bias=self.qkv_bias, **options)
        if self.norms_values:
            qkv_tX = self._with_normed_values(qkv_tX, kv.format.num_kv_heads)
        q_tqC = rotate_and_write(
            qkv_tX,
            self.q_norm,
            self.k_norm,
            self.eps,
            *rows.rotations[self.rotation],
            kv,
            rows.views[self.group].slots_t,
        )
        self.spans.end(span)
        if shared is not None:
            out_TnC = attend_and_share(
                q_tqC, kv, batch, self.scale, self.heads_among, self.attend, self.group, self.spans
            )
        else:
            out_TnC = attend_and_exchange(
                q_tqC,
                kv,
                batch,
                self.scale,
                self.mesh.kvp,
                self.merged_heads_per_rank,
                self.attend,
                self.group,
                self.spans,
            )
        span = self.spans.follow("merge and output projection")
        if self.mesh.layout.ffn_replicas > 1 and shared is None:
            out_TnC = gather_heads(out_TnC, self.mesh.kvp, self.merged_heads_per_rank)
        hidden_TH = add_projected(
            hidden_TH, out_TnC.flatten(1), self.output, self.output_bias, self.residual, self.mesh.ffn, batch
        )
        self.spans.end(span)
        return hidden_TH

    def _with_normed_values(self, qkv_tX: Tensor, num_kv_heads: int) -> Tensor:
        """Return qkv_tX with each value head divided by its root mean square."""
        channels = num_kv_heads * self.head_size
        others_tX, values_tX = qkv_tX.split((qkv_tX.shape[1] - channels, channels), dim=1)
        ones_C = values_tX.new_ones(self.head_size)
        values_tkC = rms_norm(values_tX.unflatten(1, (num_kv_heads, self.head_size)), ones_C, self.eps)
        return torch.cat((others_tX, values_tkC.flatten(1)), dim=1)
