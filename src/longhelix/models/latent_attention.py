"""Multi-head latent attention of one layer (MLA), absorbed or direct, and sharded as GQA is."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from longhelix.kernels import (
    KVLayer,
    Weight,
    can_expand,
    direct_attention,
    linear,
    make_weight,
    partial_attention,
    rms_norm,
    rotate_heads,
    write_kv,
)
from longhelix.layout import HeadShape
from longhelix.models.batch import Batch
from longhelix.models.overlap import attend_and_exchange
from longhelix.models.projection import add_projected
from longhelix.parallel.exchange import gather_heads
from longhelix.parallel.mesh import Mesh
from longhelix.spec import ModelSpec

_LATENT_EPS = 1e-6  # of the latents' norms, whatever the model's own is


class LatentAttention(nn.Module):
    """DeepSeek-V2 (arXiv 2405.04434, section 2.1): a token's cache entry is one latent and one rotated key.

    Queries are turned into latents by the key part of the up-projection (absorbed), so that all heads attend to the
    cache entries as they are; TPA > 1 shares heads and duplicates the entries. Sequences with `MLA.direct_rows` rows
    and more attend to keys and values that are made of the entries (direct), but not on GPUs and in graphs, whose
    launches are the same for all lengths.

    The value part comes after the exchange in decode steps on CPUs, else before it: values are kv_lora_rank /
    value_size times fewer bytes than latents, for KVP times the arithmetic, 2 kv_lora_rank value_size FLOP against
    2 (kv_lora_rank - value_size) bytes for a row and head. That is 171 FLOP per byte with DeepSeek-R1's sizes: little
    for a GPU and its links, much for cores that share memory. Chunks compute more than they send in either case, and
    what attends directly has values.
    """

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, weights: dict[str, Tensor], prefix: str, weight_dtype: str, hop_b: int
    ) -> None:
        super().__init__()
        assert spec.mla is not None
        layout, heads = mesh.layout, HeadShape(spec.num_query_heads, spec.num_kv_heads)
        self.mla = spec.mla
        self.mesh = mesh
        self.hop_b = hop_b
        self.scale = spec.head_size**-0.5 * spec.mla.scale_factor
        self.eps = spec.rms_norm_eps
        self.head_size = spec.head_size
        self.merged_heads_per_rank = [len(layout.merged_query_heads(heads, rank)) for rank in mesh.kvp.ranks]
        held, merged = layout.query_heads(heads, mesh.rank), layout.merged_query_heads(heads, mesh.rank)
        self.norm = weights.pop(prefix + "attention_norm")
        self.query_norm = weights.pop(prefix + "query_norm", None)
        down_XH, down_bias_X = weights.pop(prefix + "latent_down"), weights.pop(prefix + "latent_down_bias", None)
        halves_X = _in_halves(1, len(down_XH), spec.mla.rope_size)
        self.down = make_weight(down_XH[halves_X], weight_dtype)
        self.down_bias = None if down_bias_X is None else down_bias_X[halves_X]
        query_up_XY = weights.pop(prefix + "query_up")
        self.query_up = make_weight(
            query_up_XY[_in_halves(len(held), spec.head_size, spec.mla.rope_size)], weight_dtype
        )
        self.latent_norm = weights.pop(prefix + "latent_norm")
        self.up_qXZ = weights.pop(prefix + "latent_up").unflatten(0, (len(held), -1))
        self.key_up_qCZ, self.value_up_qCZ = self.up_qXZ.split((spec.mla.nope_size, spec.mla.value_size), dim=1)
        self.values_first = mesh.kvp.size == 1 or self.latent_norm.is_cuda
        self.merged = slice(merged.start - held.start, merged.stop - held.start)
        self.output = make_weight(weights.pop(prefix + "output"), weight_dtype)
        self.output_bias = weights.pop(prefix + "output_bias", None)

    @property
    def products(self) -> tuple[Weight, ...]:
        return self.down, self.query_up, self.output

    def forward(self, hidden_TH: Tensor, batch: Batch, layer: KVLayer) -> Tensor:
        """hidden_TH with this layer's attention added."""
        down_TX = linear(hidden_TH, self.down, bias=self.down_bias, norm=self.norm, norm_eps=self.eps)
        latent_TX, q_TqC = self._latents_and_queries(hidden_TH, down_TX, batch)
        self._write(latent_TX, batch, layer)
        exchanged = (self.mesh.kvp, self.merged_heads_per_rank, self.hop_b)
        if self.values_first or batch.num_sequences < len(hidden_TH):
            out_TnC = attend_and_exchange(q_TqC, layer, batch, self.scale, *exchanged, attend=self._attend_to_values)
        else:
            out_TnZ = attend_and_exchange(self._absorb(q_TqC), layer, batch, self.scale, *exchanged)
            out_TnC = torch.einsum("tqz,qcz->tqc", out_TnZ, self.value_up_qCZ[self.merged])
        if self.mesh.layout.ffn_replicas > 1:
            out_TnC = gather_heads(out_TnC, self.mesh.kvp, self.merged_heads_per_rank)
        return add_projected(hidden_TH, out_TnC.flatten(1), self.output, self.output_bias, self.mesh.ffn)

    def _latents_and_queries(self, hidden_TH: Tensor, down_TX: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """latent_TX: the token's latent and key, raw; q_TqC: queries, their last channels rotated."""
        if self.mla.q_lora_rank is None:
            latent_TX = down_TX
            q_TX = linear(hidden_TH, self.query_up, norm=self.norm, norm_eps=self.eps)
        else:
            query_TX, latent_TX = down_TX.split((self.mla.q_lora_rank, self.mla.cached_size), dim=1)
            q_TX = linear(query_TX.contiguous(), self.query_up, norm=self.query_norm, norm_eps=_LATENT_EPS)
        q_TqC = q_TX.unflatten(1, (-1, self.head_size))
        plain_TqC, key_TqC = q_TqC.split((self.mla.nope_size, self.mla.rope_size), dim=-1)
        return latent_TX, torch.cat((plain_TqC, rotate_heads(key_TqC, batch.cos_TR, batch.sin_TR)), dim=-1)

    def _write(self, latent_TX: Tensor, batch: Batch, layer: KVLayer) -> None:
        latent_TZ, key_TC = latent_TX.split((self.mla.kv_lora_rank, self.mla.rope_size), dim=1)
        latent_TZ = rms_norm(latent_TZ, self.latent_norm, _LATENT_EPS)
        key_T1C = rotate_heads(key_TC.unsqueeze(1), batch.cos_TR, batch.sin_TR)
        write_kv(torch.cat((latent_TZ.unsqueeze(1), key_T1C), dim=-1), None, layer, batch.slots_T)

    def _attend_to_values(
        self,
        q_TqC: Tensor,
        layer: KVLayer,
        blocks_BJ: Tensor,
        row_starts_B: Tensor,
        limits_T: Tensor,
        scale: float,
        max_rows: int,
    ) -> tuple[Tensor, Tensor]:
        """out_TqC (values) and lse_Tq of all held heads: sequences of many rows direct, the others absorbed."""
        if max_rows < self.mla.direct_rows or not self._may_be_direct(layer):
            return self._attend_absorbed(q_TqC, layer, blocks_BJ, row_starts_B, limits_T, scale, max_rows)
        counts_B = row_starts_B.diff()
        direct_B = counts_B >= self.mla.direct_rows
        out_TqC = q_TqC.new_empty(*q_TqC.shape[:2], self.mla.value_size)
        lse_Tq = q_TqC.new_empty(q_TqC.shape[:2], dtype=torch.float32)
        for chosen_B, attend in ((direct_B, self._attend_directly), (~direct_B, self._attend_absorbed)):
            rows_T = chosen_B.repeat_interleave(counts_B)
            starts_B = pad(counts_B[chosen_B].cumsum(0), (1, 0))
            out_TqC[rows_T], lse_Tq[rows_T] = attend(
                q_TqC[rows_T], layer, blocks_BJ[chosen_B], starts_B, limits_T[rows_T], scale
            )
        return out_TqC, lse_Tq

    def _may_be_direct(self, layer: KVLayer) -> bool:
        graphed = layer.values.is_cuda or torch.compiler.is_compiling()
        return not graphed and can_expand(layer.format, self.mla.nope_size, self.mla.value_size)

    def _attend_directly(self, q_TqC: Tensor, layer: KVLayer, *rows) -> tuple[Tensor, Tensor]:
        return direct_attention(q_TqC, layer, self.up_qXZ, self.mla.nope_size, *rows)

    def _attend_absorbed(self, q_TqC: Tensor, layer: KVLayer, *rows) -> tuple[Tensor, Tensor]:
        out_TqZ, lse_Tq = partial_attention(self._absorb(q_TqC), layer, *rows)
        # What einsum gives lies head by head, and the exchange takes rows.
        return torch.einsum("tqz,qcz->tqc", out_TqZ, self.value_up_qCZ).contiguous(), lse_Tq

    def _absorb(self, q_TqC: Tensor) -> Tensor:
        """Queries for the cache entries: a latent and a rotated part."""
        plain_TqC, rotated_TqC = q_TqC.split((self.mla.nope_size, self.mla.rope_size), dim=-1)
        return torch.cat((torch.einsum("tqc,qcz->tqz", plain_TqC, self.key_up_qCZ), rotated_TqC), dim=-1)


def _in_halves(num_heads: int, size: int, rope_size: int) -> Tensor:
    """Rows of a projection whose heads end in pairs to rotate, (i, half), as (half, i): scores stay the same."""
    rows = torch.arange(num_heads * size).view(num_heads, size)
    pairs = rows[:, size - rope_size :].view(num_heads, rope_size // 2, 2)
    return torch.cat((rows[:, : size - rope_size], pairs.transpose(1, 2).flatten(1)), dim=1).flatten()
