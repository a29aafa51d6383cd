"""Multi-head latent attention (MLA) of one layer, absorbed or direct, sharded like GQA."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from longhelix.compute.kernels import (
    KVLayer,
    Weight,
    can_expand,
    direct_attention,
    linear,
    partial_attention,
    rms_norm,
    rotate_heads,
    write_kv,
)
from longhelix.compute.models.batch import Batch
from longhelix.compute.models.overlap import attend_and_exchange, attend_and_share
from longhelix.compute.models.projection import Residual, add_projected, normed_local_rows
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.exchange import gather_heads
from longhelix.compute.parallel.mesh import Mesh
from longhelix.spans import UNTRACED, Spans
from longhelix.spec import FORMATS, MLA, ModelSpec
from longhelix.spec.attention import MultiHeadLatentAttention

_LATENT_EPS = 1e-6  # of the latents' norms in all models


class LatentAttention(nn.Module):
    """MLA of DeepSeek-V2 (arXiv 2405.04434, section 2.1). A token's cache entry is one latent and one rotated key.

    The key half of the up-projection turns queries into latents (absorbed), so all heads attend to the cache entries
    as they are. TPA > 1 splits the heads and duplicates the entries. Sequences with at least `MLA.direct_rows` rows
    attend to keys and values computed from the entries (direct). On GPUs and in graphs they do not, because launches
    are the same for all lengths there.

    The value half follows the exchange in decode steps on CPUs, and precedes it in other steps. If it comes first,
    ranks send value_size instead of kv_lora_rank channels, but compute it KVP times: 2 kv_lora_rank value_size FLOP
    against 2 (kv_lora_rank - value_size) bytes for a row and head. That is 171 FLOP per byte with DeepSeek-R1's sizes:
    little for a GPU and its links, much for cores that share memory. Chunks compute more than they send in either case,
    and direct attention returns values anyway.
    """

    def __init__(self, spec: ModelSpec, index: int, mesh: Mesh, weights: Weights, spans: Spans = UNTRACED) -> None:
        super().__init__()
        attention = spec.layers[index].attention
        assert isinstance(attention, MultiHeadLatentAttention)
        assert spec.view_of(index) is None, "missing_parts names windows of latent attention"
        layout, heads, mla, prefix = mesh.layout, attention.heads, attention.latents, f"layers.{index}."
        self.mla, self.rotation = mla, spec.rotation_of(index)
        self.mesh = mesh
        self.spans = spans
        self.scale = attention.head_size**-0.5 * attention.rope.scaling.latent_factor
        self.eps = spec.rms_norm_eps
        self.head_size = attention.head_size
        self.heads_among = partial(layout.heads_among, heads, mesh.rank)
        self.merged_heads_per_rank = [len(layout.merged_query_heads(heads, rank)) for rank in mesh.kvp.ranks]
        local_heads, merged_heads = layout.query_heads(heads, mesh.rank), layout.merged_query_heads(heads, mesh.rank)
        self.norm = weights.find(prefix + "attention_norm")
        norm_after = weights.find(prefix + "attention_norm_after")
        self.residual = Residual(norm_after, self.eps, spec.layers[index].residual_scale)
        self.query_norm = weights.find(prefix + "query_norm")
        down_bias_X = weights.find(prefix + "latent_down_bias")
        halves_X = _in_halves(1, (mla.q_lora_rank or 0) + mla.cached_size, mla)
        self.down = weights.product(prefix + "latent_down", order_O=halves_X)
        self.down_bias = None if down_bias_X is None else down_bias_X[halves_X]
        halves_X = _in_halves(len(local_heads), attention.head_size, mla)
        self.query_up = weights.product(prefix + "query_up", order_O=halves_X)
        self.latent_norm = weights.take(prefix + "latent_norm")
        self.up_qXZ = weights.take(prefix + "latent_up").unflatten(0, (len(local_heads), -1))
        self.key_up_qCZ, self.value_up_qCZ = self.up_qXZ.split((mla.nope_size, mla.value_size), dim=1)
        self.values_first = mesh.kvp.size == 1 or self.latent_norm.is_cuda
        self.merged = slice(merged_heads.start - local_heads.start, merged_heads.stop - local_heads.start)
        self.output = weights.product(prefix + "output")
        self.output_bias = weights.find(prefix + "output_bias")

    @property
    def products(self) -> tuple[Weight, ...]:
        return self.down, self.query_up, self.output

    def forward(self, hidden_TH: Tensor, batch: Batch, latent: KVLayer) -> Tensor:
        """Return hidden_TH with this layer's attention added."""
        span = self.spans.begin("QKV")
        latent_tX, q_tqC = self._latents_and_queries(hidden_TH, batch)
        self._write(latent_tX, batch, latent)
        # The same on all ranks that exchange: instances with their own clocks may have chunks next to shared rows.
        shared = batch.sharding.shared
        values = self.values_first or shared is not None or not batch.decodes
        if not values:
            q_tqC = self._absorb(q_tqC)
        self.spans.end(span)
        attend = partial(self.attend, values)
        if shared is not None:
            out_TnX = attend_and_share(q_tqC, latent, batch, self.scale, self.heads_among, attend, spans=self.spans)
        else:
            out_TnX = attend_and_exchange(
                q_tqC, latent, batch, self.scale, self.mesh.kvp, self.merged_heads_per_rank, attend, spans=self.spans
            )
        span = self.spans.follow("merge and output projection")
        out_TnC = out_TnX if values else torch.einsum("tqz,qcz->tqc", out_TnX, self.value_up_qCZ[self.merged])
        if self.mesh.layout.ffn_replicas > 1 and shared is None:
            out_TnC = gather_heads(out_TnC, self.mesh.kvp, self.merged_heads_per_rank)
        hidden_TH = add_projected(
            hidden_TH, out_TnC.flatten(1), self.output, self.output_bias, self.residual, self.mesh.ffn, batch
        )
        self.spans.end(span)
        return hidden_TH

    def _latents_and_queries(self, hidden_TH: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute latents and queries. With token shards, each rank projects its own rows down, and gathers latents.

        Returns:
            latent_tX: Latents and keys of the rows, before norm and rotation.
            q_tqC: Queries. Their last channels are already rotated.
        """
        if self.mla.q_lora_rank is None:
            # Both products have the same rows: they are rounded before only if both round them.
            dtypes = self.down.dtype, self.query_up.dtype
            dtype = next((dtype for dtype in dtypes if not FORMATS[dtype].arithmetic.rounds_inputs), self.down.dtype)
            x_tH, options = normed_local_rows(hidden_TH, self.norm, self.eps, batch, dtype)
            latent_tX = linear(x_tH, self.down, bias=self.down_bias, **options)
            q_tX = linear(x_tH, self.query_up, **options)
        else:
            token_shards = batch.sharding.token_shards
            if token_shards is not None:
                down_LX = linear(hidden_TH, self.down, bias=self.down_bias, norm=self.norm, norm_eps=self.eps)
                down_tX = batch.local_rows(token_shards.all_rows(down_LX))
            else:
                x_tH, options = normed_local_rows(hidden_TH, self.norm, self.eps, batch, self.down.dtype)
                down_tX = linear(x_tH, self.down, bias=self.down_bias, **options)
            query_tX, latent_tX = down_tX.split((self.mla.q_lora_rank, self.mla.cached_size), dim=1)
            q_tX = linear(query_tX.contiguous(), self.query_up, norm=self.query_norm, norm_eps=_LATENT_EPS)
        q_tqC = q_tX.unflatten(1, (-1, self.head_size))
        plain_tqC, key_tqC = q_tqC.split((self.mla.nope_size, self.mla.rope_size), dim=-1)
        return latent_tX, torch.cat(
            (plain_tqC, rotate_heads(key_tqC, *batch.attention.rotations[self.rotation])), dim=-1
        )

    def _write(self, latent_tX: Tensor, batch: Batch, layer: KVLayer) -> None:
        latent_tZ, key_tC = latent_tX.split((self.mla.kv_lora_rank, self.mla.rope_size), dim=1)
        latent_tZ = rms_norm(latent_tZ, self.latent_norm, _LATENT_EPS)
        key_t1C = rotate_heads(key_tC.unsqueeze(1), *batch.attention.rotations[self.rotation])
        write_kv(torch.cat((latent_tZ.unsqueeze(1), key_t1C), dim=-1), None, layer, batch.attention.views[0].slots_t)

    def attend(self, values: bool, q_tqC: Tensor, *rows) -> tuple[Tensor, Tensor]:
        """Return partial outputs and their LSEs. The outputs are values, or latents if queries are already absorbed."""
        return self._attend_to_values(q_tqC, *rows) if values else partial_attention(q_tqC, *rows)

    def _attend_to_values(
        self,
        q_tqC: Tensor,
        layer: KVLayer,
        blocks_X: Tensor,
        extents_b2: Tensor,
        row_starts_b: Tensor,
        limits_t: Tensor,
        scale: float,
        max_rows: int,
        most_tokens: int,
        firsts_t: None,
    ) -> tuple[Tensor, Tensor]:
        """Return out_tqC (values) and lse_tq of all local heads. Only sequences of many rows attend directly."""
        if max_rows < self.mla.direct_rows or not self._may_be_direct(layer):
            table = blocks_X, extents_b2, row_starts_b, limits_t
            return self._attend_absorbed(q_tqC, layer, *table, scale, max_rows, most_tokens)
        counts_b = row_starts_b.diff()
        direct_b = counts_b >= self.mla.direct_rows
        out_tqC = q_tqC.new_empty(*q_tqC.shape[:2], self.mla.value_size)
        lse_tq = q_tqC.new_empty(q_tqC.shape[:2], dtype=torch.float32)
        for chosen_b, attend in ((direct_b, self._attend_directly), (~direct_b, self._attend_absorbed)):
            rows_t = chosen_b.repeat_interleave(counts_b)
            starts_b = pad(counts_b[chosen_b].cumsum(0), (1, 0))
            out_tqC[rows_t], lse_tq[rows_t] = attend(
                q_tqC[rows_t], layer, blocks_X, extents_b2[chosen_b], starts_b, limits_t[rows_t], scale
            )
        return out_tqC, lse_tq

    def _may_be_direct(self, layer: KVLayer) -> bool:
        graphed = layer.values.is_cuda or torch.compiler.is_compiling()
        return not graphed and can_expand(layer.format, self.mla.nope_size, self.mla.value_size)

    def _attend_directly(self, q_tqC: Tensor, layer: KVLayer, *rows) -> tuple[Tensor, Tensor]:
        return direct_attention(q_tqC, layer, self.up_qXZ, self.mla.nope_size, *rows)

    def _attend_absorbed(self, q_tqC: Tensor, layer: KVLayer, *rows) -> tuple[Tensor, Tensor]:
        out_tqZ, lse_tq = partial_attention(self._absorb(q_tqC), layer, *rows)
        # einsum returns heads outermost, but the exchange needs rows outermost.
        return torch.einsum("tqz,qcz->tqc", out_tqZ, self.value_up_qCZ).contiguous(), lse_tq

    def _absorb(self, q_tqC: Tensor) -> Tensor:
        """Turn queries into the channels of cache entries: latents, then rotated channels."""
        plain_tqC, rotated_TqC = q_tqC.split((self.mla.nope_size, self.mla.rope_size), dim=-1)
        return torch.cat((torch.einsum("tqc,qcz->tqz", plain_tqC, self.key_up_qCZ), rotated_TqC), dim=-1)


def _in_halves(num_heads: int, size: int, mla: MLA) -> Tensor:
    """Return the order of rows of a projection that puts each head's rotated channels into halves (half, i)."""
    rows = torch.arange(num_heads * size).view(num_heads, size)
    if mla.interleaved:
        pairs = rows[:, size - mla.rope_size :].unflatten(1, (-1, 2))
        rows = torch.cat((rows[:, : size - mla.rope_size], pairs.transpose(1, 2).flatten(1)), dim=1)
    return rows.flatten()
