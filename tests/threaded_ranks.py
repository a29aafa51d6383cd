"""One attention layer on all ranks of a KVP group, as threads of one process, beside a dense layer in float64."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.linalg import multi_dot

from longhelix.compute.kernels import KVFormat, KVLayer, write_kv
from longhelix.compute.models.attention import Attention
from longhelix.compute.models.batch import AttentionRows, Batch, RowRotation, RowView, StepShape
from longhelix.compute.models.latent_attention import LatentAttention
from longhelix.compute.parallel.mesh import Mesh
from longhelix.scheduler.kv.placement import Striped
from longhelix.spec import MLA, ModelSpec
from longhelix.spec.layout import HeadShape, Layout
from tensors import weights_of
from toy_model import attention_of, latents_of, toy_model

_TIMEOUT_S = 60
_SHARPNESS = 3.0  # standard deviation of scores: attention that is neither uniform nor of one token
_EPS = 1e-6
CPU = torch.device("cpu")


def gqa_spec(hidden_size: int, num_query_heads: int, num_kv_heads: int, head_size: int) -> ModelSpec:
    return _spec("llama", hidden_size, num_query_heads, num_kv_heads, head_size, None)


def mla_spec(hidden_size: int, num_query_heads: int, latent: int, rope: int, nope: int, value: int) -> ModelSpec:
    return _spec("deepseek_v2", hidden_size, num_query_heads, 1, nope + rope, MLA(None, latent, nope, rope, value))


def _spec(architecture, hidden_size, num_query_heads, num_kv_heads, head_size, mla):
    return toy_model(
        architecture,
        num_layers=1,
        hidden_size=hidden_size,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        ffn_size=16,
        vocab_size=16,
        max_positions=2**20,
        rms_norm_eps=_EPS,
        mla=mla,
    )


class ThreadGroup:
    """What attention asks of `parallel.collectives.RankGroup`, between threads; `meeting` is the same for all ranks."""

    def __init__(self, index: int, size: int, meeting: tuple[list, threading.Barrier]) -> None:
        self.index, self.size, self.ranks = index, size, tuple(range(size))
        self._slots, self._barrier = meeting

    def _share(self, value) -> list:
        """What all ranks gave, in their order."""
        self._slots[self.index] = value
        self._barrier.wait(_TIMEOUT_S)
        shared = list(self._slots)
        self._barrier.wait(_TIMEOUT_S)
        return shared

    def merges(self, head_size: int) -> bool:
        return False

    def start_all_to_all(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Callable[[], Tensor]:
        pieces = [pieces[self.index] for pieces in self._share(send.split(send_sizes))]
        assert [piece.numel() for piece in pieces] == receive_sizes
        return lambda: torch.cat(pieces)

    def all_to_all(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        return self.start_all_to_all(send, send_sizes, receive_sizes)()

    def all_reduce_add(self, values: Tensor, residual: Tensor) -> Tensor:
        return residual + sum(part.double() for part in self._share(values)).to(values.dtype)


@dataclass
class LayerCase:
    """Random weights, what is cached, and rows to come: `rows[b]` tokens of sequence b after `prefixes[b]` others."""

    spec: ModelSpec
    prefixes: list[int]
    rows: list[int]
    dtype: torch.dtype
    block_tokens: int

    @property
    def heads(self) -> HeadShape:
        return attention_of(self.spec).heads

    @property
    def head_size(self) -> int:
        return attention_of(self.spec).head_size

    def __post_init__(self) -> None:
        spec, mla, generator = self.spec, latents_of(self.spec), torch.Generator().manual_seed(1)

        def normal(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * std).to(self.dtype)

        hidden, queries, from_hidden = (
            spec.hidden_size,
            self.heads.num_query_heads * self.head_size,
            spec.hidden_size**-0.5,
        )
        total = sum(self.rows)
        self.hidden_TH = normal(total, hidden, std=0.25)
        angles_TR = torch.rand(total, attention_of(self.spec).rotated_size // 2, generator=generator) * 6
        self.cos_TR, self.sin_TR = angles_TR.cos(), angles_TR.sin()
        query_XH = normal(queries, hidden, std=from_hidden * _SHARPNESS)
        self.weights = {"attention_norm": 1 + normal(hidden, std=0.1)}
        if mla is None:
            keys = self.heads.num_kv_heads * self.head_size
            self.weights["qkv"] = torch.cat((query_XH, normal(2 * keys, hidden, std=from_hidden)))
            self.cached = [normal(2, prefix, self.heads.num_kv_heads, self.head_size) for prefix in self.prefixes]
            outputs = queries
        else:
            outputs, made = self.heads.num_query_heads * mla.value_size, mla.nope_size + mla.value_size
            self.weights["query_up"] = query_XH
            self.weights["latent_down"] = normal(mla.cached_size, hidden, std=from_hidden)
            self.weights["latent_norm"] = 1 + normal(mla.kv_lora_rank, std=0.1)
            self.weights["latent_up"] = normal(
                self.heads.num_query_heads * made, mla.kv_lora_rank, std=mla.kv_lora_rank**-0.5
            )
            self.cached = [normal(1, prefix, 1, mla.cached_size) for prefix in self.prefixes]
        self.weights["output"] = normal(hidden, outputs, std=outputs**-0.5)

    # ------------------------------------------------------------------------------------------------------------------
    # On ranks.
    # ------------------------------------------------------------------------------------------------------------------

    def run(self, kvp: int) -> list[Tensor]:
        """hidden_TH after the layer, on every rank."""
        meeting = [None] * kvp, threading.Barrier(kvp)
        with ThreadPoolExecutor(kvp) as threads:
            return list(threads.map(partial(self._run_rank, kvp=kvp, meeting=meeting), range(kvp)))

    @torch.inference_mode()
    def _run_rank(self, rank: int, kvp: int, meeting) -> Tensor:
        layout, spec = Layout(kvp=kvp), self.spec
        group = ThreadGroup(rank, kvp, meeting)
        heads = layout.output_heads(self.heads, rank)
        size = self.head_size if latents_of(spec) is None else latents_of(spec).value_size
        own = {"output": self.weights["output"][:, heads.start * size : heads.stop * size]}
        attention = Attention if latents_of(spec) is None else LatentAttention
        name = str(self.dtype).removeprefix("torch.")
        of_layer = {f"layers.0.{weight}": tensor for weight, tensor in (self.weights | own).items()}
        weights = weights_of(of_layer, name, self.dtype)
        module = attention(spec, 0, Mesh(layout, rank, group, group, group), weights)
        layer, batch = self._shard(rank, kvp)
        return module(self.hidden_TH, batch, layer)

    def _shard(self, rank: int, kvp: int) -> tuple[KVLayer, Batch]:
        """The pool with this rank's part of what is cached, and the batch as this rank sees it."""
        mla, block_tokens = latents_of(self.spec), self.block_tokens
        width = -(-max(map(sum, zip(self.prefixes, self.rows, strict=True))) // block_tokens)
        sizes = (self.head_size, self.head_size) if mla is None else (mla.cached_size, mla.kv_lora_rank)
        name = str(self.dtype).removeprefix("torch.")
        format = KVFormat.choose(
            name, block_tokens, self.heads.num_kv_heads, *sizes, CPU, shared_values=mla is not None
        )
        layer = format.new_layer(len(self.rows) * width, CPU)
        layer.values.view(torch.uint8).fill_(0xFF)  # NaN: whoever sees what nobody wrote shows it
        slots, limits = [], []
        for index, (prefix, rows) in enumerate(zip(self.prefixes, self.rows, strict=True)):
            placement = Striped(kvp, block_tokens, index % kvp)
            positions = torch.arange(prefix + rows)
            mine = (placement.start + positions // block_tokens) % kvp == rank
            limit_S = mine.cumsum(0)
            slot_S = torch.where(mine, index * width * block_tokens + limit_S - 1, -1)
            cached = self.cached[index]
            write_kv(cached[0], None if mla else cached[1], layer, slot_S[:prefix])
            slots.append(slot_S[prefix:])
            limits.append(limit_S[prefix:])
        return layer, Batch(
            token_ids_T=torch.zeros(sum(self.rows), dtype=torch.int64),
            shape=StepShape(num_sequences=len(self.rows), most_tokens=width * block_tokens),
            attention=AttentionRows(
                row_starts_b=torch.tensor([0, *self.rows]).cumsum(0),
                limits_t=torch.cat(limits),
                extents_b2=torch.arange(0, (len(self.rows) + 1) * width, width).unfold(0, 2, 1),
                max_rows=max(self.rows),
                rotations=(RowRotation(self.cos_TR, self.sin_TR),),
                views=(RowView(torch.cat(slots), torch.arange(len(self.rows) * width)),),
            ),
        )

    # ------------------------------------------------------------------------------------------------------------------
    # Dense.
    # ------------------------------------------------------------------------------------------------------------------

    def dense(self) -> Tensor:
        """What the layer adds to hidden_TH, in float64, from keys and values of all heads and tokens."""
        spec, weight = self.spec, {name: tensor.double() for name, tensor in self.weights.items()}
        x_TH = _norm(self.hidden_TH.double(), weight["attention_norm"])
        make = self._gqa if latents_of(spec) is None else self._mla
        q_TqC, new = make(x_TH, weight)
        out, start = [], 0
        for cached, rows in zip(self.cached, self.rows, strict=True):
            part = slice(start, start + rows)
            tokens = torch.cat((cached.double(), new[:, part]), dim=1)
            out += [self._attend(q_TqC[part], tokens, weight)]
            start += rows
        return torch.cat(out) @ weight["output"].T

    def _gqa(self, x_TH, weight):
        heads_TXC = (x_TH @ weight["qkv"].T).unflatten(1, (-1, self.head_size))
        sizes = self.heads.num_query_heads, self.heads.num_kv_heads, self.heads.num_kv_heads
        q_TqC, k_TkC, v_TkC = heads_TXC.split(sizes, dim=1)
        return self._rotate(q_TqC), torch.stack((self._rotate(k_TkC), v_TkC))

    def _mla(self, x_TH, weight):
        """Rotated channels of weights are pairs of neighbours, those of the cache are halves."""
        mla = latents_of(self.spec)
        q_TqC = (x_TH @ weight["query_up"].T).unflatten(1, (-1, self.head_size))
        latent_TZ, key_TC = (x_TH @ weight["latent_down"].T).split((mla.kv_lora_rank, mla.rope_size), dim=1)
        latent_TZ = _norm(latent_TZ, weight["latent_norm"])
        halves = torch.arange(mla.rope_size).view(-1, 2).T.flatten()
        key_T1C = self._rotate(key_TC[:, None, halves])
        rotated_TqC = self._rotate(q_TqC[..., mla.nope_size :][..., halves])
        return torch.cat((q_TqC[..., : mla.nope_size], rotated_TqC), 2), torch.cat((latent_TZ[:, None], key_T1C), 2)[
            None
        ]

    def _rotate(self, x_TQC):
        cos_T1R, sin_T1R = self.cos_TR.double()[:, None], self.sin_TR.double()[:, None]
        first, second = x_TQC.chunk(2, dim=2)
        return torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=2)

    def _attend(self, q_TqC, tokens, weight):
        """One sequence's rows, head by head, over all its tokens: the last ones are the rows' own."""
        mla, rows, length = latents_of(self.spec), len(q_TqC), tokens.shape[1]
        hidden_TS = torch.arange(length) > torch.arange(length - rows, length)[:, None]
        out = []
        for head in range(self.heads.num_query_heads):
            q_TC = q_TqC[:, head] * self.head_size**-0.5
            if mla is None:
                k_SC, v_SC = tokens[:, :, head * self.heads.num_kv_heads // self.heads.num_query_heads]
                weights_TS = (q_TC @ k_SC.T).masked_fill(hidden_TS, -torch.inf).softmax(-1)
                out.append(weights_TS @ v_SC)
                continue
            latent_SZ, rotated_SC = tokens[0, :, 0].split((mla.kv_lora_rank, mla.rope_size), dim=1)
            up_XZ = weight["latent_up"].unflatten(0, (self.heads.num_query_heads, -1))[head]
            plain_TC, rotated_TC = q_TC.split((mla.nope_size, mla.rope_size), dim=1)
            # In whichever order is cheapest: products are associative, and these are of float64.
            scores_TS = multi_dot((plain_TC, up_XZ[: mla.nope_size], latent_SZ.T)) + rotated_TC @ rotated_SC.T
            weights_TS = scores_TS.masked_fill(hidden_TS, -torch.inf).softmax(-1)
            out.append(multi_dot((weights_TS, latent_SZ, up_XZ[mla.nope_size :].T)))
        return torch.cat(out, dim=1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS) * weight
