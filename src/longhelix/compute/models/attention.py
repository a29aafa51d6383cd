"""GQA attention of one layer in Helix: local attention, one exchange, output projection at TP = N."""

from functools import partial

from torch import Tensor, nn

from longhelix.compute.kernels import KVLayer, Weight, linear, partial_attention, rotate_and_write
from longhelix.compute.models.batch import Batch
from longhelix.compute.models.overlap import attend_and_exchange, attend_and_share
from longhelix.compute.models.projection import add_projected, normed_local_rows, project_normed
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
        self.scale, self.residual_scale = attention.scale, spec.layers[index].residual_scale
        self.eps = spec.rms_norm_eps
        self.heads_among = partial(layout.heads_among, heads, mesh.rank)
        self.merged_heads_per_rank = [len(layout.merged_query_heads(heads, rank)) for rank in mesh.kvp.ranks]
        self.norm = weights.take(prefix + "attention_norm")
        self.qkv = weights.product(prefix + "qkv")
        self.qkv_bias = weights.find(prefix + "qkv_bias")
        self.q_norm = weights.find(prefix + "q_norm")
        self.k_norm = weights.find(prefix + "k_norm")
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
                q_tqC, kv, batch, self.scale, self.heads_among, partial_attention, self.group, self.spans
            )
        else:
            out_TnC = attend_and_exchange(
                q_tqC,
                kv,
                batch,
                self.scale,
                self.mesh.kvp,
                self.merged_heads_per_rank,
                partial_attention,
                self.group,
                self.spans,
            )
        span = self.spans.follow("merge and output projection")
        if self.mesh.layout.ffn_replicas > 1 and shared is None:
            out_TnC = gather_heads(out_TnC, self.mesh.kvp, self.merged_heads_per_rank)
        hidden_TH = add_projected(
            hidden_TH, out_TnC.flatten(1), self.output, self.output_bias, self.mesh.ffn, batch, self.residual_scale
        )
        self.spans.end(span)
        return hidden_TH
