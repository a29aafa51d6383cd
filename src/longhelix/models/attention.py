"""GQA attention of one layer, the Helix way: local attention, one exchange, output projection at TP = N."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.functional import linear

from longhelix.kernels import partial_attention, write_kv
from longhelix.layout import HeadShape
from longhelix.models.batch import Batch
from longhelix.models.norm import RMSNorm
from longhelix.models.rope import rotate
from longhelix.parallel.exchange import exchange
from longhelix.parallel.mesh import Mesh
from longhelix.spec import ModelSpec


class Attention(nn.Module):
    """Helix, arXiv 2507.07120, section 2.1: every KVP rank computes the QKV of its TPA head shard (the same on all),
    writes only the KV that it owns, attends to its own shard, and exchanges partial outputs for whole heads."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        layout, heads = mesh.layout, HeadShape(spec.num_query_heads, spec.num_kv_heads)
        self.mesh = mesh
        self.head_size = spec.head_size
        self.num_query_heads_local = len(layout.query_heads(heads, mesh.rank))
        self.num_kv_heads_local = len(layout.kv_heads(heads, mesh.rank))
        self.merged_heads_per_rank = [len(layout.merged_query_heads(heads, rank)) for rank in mesh.kvp.ranks]
        self.qkv = nn.Buffer(weights["qkv"])
        self.qkv_bias = nn.Buffer(weights["qkv_bias"]) if spec.qkv_bias else None
        self.q_norm = RMSNorm(weights["q_norm"], spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(weights["k_norm"], spec.rms_norm_eps) if spec.qk_norm else nn.Identity()
        self.output = nn.Buffer(weights["output"])
        self.output_bias = nn.Buffer(weights["output_bias"]) if spec.attention_output_bias else None

    def forward(self, hidden_TH: Tensor, batch: Batch, k_PDkC: Tensor, v_PDkC: Tensor) -> Tensor:
        rows = hidden_TH.shape[0]
        qkv_TX = linear(hidden_TH, self.qkv, self.qkv_bias)
        heads = (self.num_query_heads_local, self.num_kv_heads_local, self.num_kv_heads_local)
        q_TqC, k_TkC, v_TkC = qkv_TX.view(rows, sum(heads), self.head_size).split(heads, dim=1)
        q_TqC = rotate(self.q_norm(q_TqC), batch.cos_TR, batch.sin_TR)
        k_TkC = rotate(self.k_norm(k_TkC), batch.cos_TR, batch.sin_TR)
        write_kv(k_TkC, v_TkC, k_PDkC, v_PDkC, batch.slots_T)
        out_TqC, lse_Tq = partial_attention(
            q_TqC, k_PDkC, v_PDkC, batch.blocks_BJ, batch.row_starts_B, batch.limits_T, self.head_size**-0.5
        )
        out_TnC = exchange(out_TqC, lse_Tq, self.mesh.kvp, self.merged_heads_per_rank)
        hidden_TH = self.mesh.stage.all_reduce(linear(out_TnC.flatten(1), self.output))
        return hidden_TH if self.output_bias is None else hidden_TH + self.output_bias
