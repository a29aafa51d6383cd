"""The decoder: one model for all supported architectures, which differ in the spec and in the weights."""

import torch
from torch import Tensor, nn

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import PLAIN, KVLayer, Weight, linear
from longhelix.compute.kernels.weight import PACKED
from longhelix.compute.models.attention import Attention
from longhelix.compute.models.batch import Batch
from longhelix.compute.models.experts import ExpertFFN
from longhelix.compute.models.ffn import DenseFFN
from longhelix.compute.models.latent_attention import LatentAttention
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.mesh import Mesh
from longhelix.spans import UNTRACED, Spans
from longhelix.spec import FORMATS, ModelSpec
from longhelix.spec.attention import MultiHeadLatentAttention


class Layer(nn.Module):
    """A layer: attention and FFN, each added to the residual, with norms before or after it."""

    def __init__(self, spec: ModelSpec, index: int, mesh: Mesh, weights: Weights, spans: Spans) -> None:
        super().__init__()
        self.spans = spans
        layer = spec.layers[index]
        attention = LatentAttention if isinstance(layer.attention, MultiHeadLatentAttention) else Attention
        self.attention = attention(spec, index, mesh, weights, spans=spans)
        ffn = DenseFFN if layer.moe is None else ExpertFFN
        self.ffn = ffn(spec, index, mesh, weights)

    def forward(self, hidden_TH: Tensor, batch: Batch, entries: dict[str, KVLayer]) -> Tensor:
        """Run the layer. entries: cache entries of the layer, by name."""
        hidden_TH = self.attention(hidden_TH, batch, **entries)
        span = self.spans.begin("FFN")
        hidden_TH = self.ffn(hidden_TH, batch)
        self.spans.end(span)
        return hidden_TH


class Decoder(nn.Module):
    """This rank's shard of the model: the layers of its stage, the embedding on the first stage, the head on the last.

    Args:
        weights: The parameters of `parameters.declare` for the same layout and rank. All of them are taken.
        spans: Records what layers do.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, weights: Weights, spans: Spans = UNTRACED) -> None:
        super().__init__()
        layout, rank = mesh.layout, mesh.rank
        self.spans = spans
        self.mesh = mesh
        self.eps = spec.rms_norm_eps
        self.hidden_size, self.multipliers = spec.hidden_size, spec.vocabulary.multipliers
        self.layers_begun = 0  # op by op; layers of tapes and graphs do not count
        self.vocabulary = layout.vocabulary(spec.vocabulary.size, rank)
        self.indices = layout.layers(spec.num_layers, rank)
        self.dtype = weights.dtype
        self.embedding_factor = spec.vocabulary.multipliers.embedding
        if spec.vocabulary.multipliers.rounded:
            self.embedding_factor = torch.tensor(self.embedding_factor, dtype=self.dtype).item()
        self.layers = nn.ModuleList(Layer(spec, index, mesh, weights, spans=spans) for index in self.indices)
        self.norm = weights.find("norm")
        self.head = weights.product("head") if "head" in weights.unused else None
        if layout.has_head(rank) and self.head is None:  # tied embeddings: both are one matrix
            self.embedding, self.head = _tied(weights)
        else:
            self.embedding = _embedding(weights) if layout.has_embedding(rank) else None
        assert not weights.unused, f"declared, but not used: {weights.unused}"

    def products(self) -> list[Weight]:
        """Return all weights with which this rank multiplies, without empty ones."""
        layers = [(*layer.attention.products, *layer.ffn.products) for layer in self.layers]
        head = () if self.head is None else (self.head,)
        return [weight for weight in (*sum(layers, ()), *head) if weight.outputs and weight.depth]

    def expert_rows(self) -> list[list[int]]:
        """Return the rows of each local expert so far, by layer of the stage. Empty for layers without experts."""
        ffns = [layer.ffn for layer in self.layers]
        return [ffn.rows_per_expert.tolist() if isinstance(ffn, ExpertFFN) else [] for ffn in ffns]

    def forget_expert_rows(self) -> None:
        """Set the counts of `expert_rows` to 0."""
        for layer in self.layers:
            if isinstance(layer.ffn, ExpertFFN):
                layer.ffn.rows_per_expert.zero_()

    def run_layers(self, hidden_TH: Tensor, batch: Batch, pool: KVPool) -> Tensor:
        """Run the layers of this stage, and write the KV of the rows into the pool. Returns hidden_TH."""
        token_shards = batch.sharding.token_shards
        if token_shards is not None:
            hidden_TH = token_shards.local_rows(hidden_TH)
        for index, layer, entries in zip(self.indices, self.layers, pool.layers, strict=True):
            if not torch.compiler.is_compiling():
                self.layers_begun += 1
            self.spans.layer(index)
            hidden_TH = layer(hidden_TH, batch, entries)
            if batch.images is not None:
                hidden_TH = batch.images.add_after(index, hidden_TH, token_shards)
        self.spans.layer(None)
        return hidden_TH if token_shards is None else token_shards.all_rows(hidden_TH)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Return logits over the vocabulary of this rank, logits_Tv (float32). For ranks of the last stage."""
        logits_Tv = linear(hidden_TH, self.head, norm=self.norm, norm_eps=self.eps, dtype=torch.float32)
        cap = self.multipliers.logit_cap
        if cap is not None:
            return logits_Tv.div_(cap).tanh_().mul_(cap)
        return logits_Tv if self.multipliers.logits == 1 else logits_Tv.mul_(self.multipliers.logits)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Return hidden states before the first layer. For ranks of the first stage."""
        hidden_TH = self._looked_up(token_ids_T)
        return hidden_TH if self.embedding_factor == 1 else hidden_TH * self.embedding_factor

    def _looked_up(self, token_ids_T: Tensor) -> Tensor:
        """Return the embeddings of tokens.

        Vocabulary-parallel: each rank looks up the tokens that it has, and the ranks add up their results.
        """
        if self.mesh.ffn.size == 1:
            return self.embedding.rows(token_ids_T).to(self.dtype)
        local_T = token_ids_T - self.vocabulary.start
        elsewhere_T = (local_T < 0) | (local_T >= len(self.vocabulary))
        if not len(self.vocabulary):
            hidden_TH = torch.zeros(len(token_ids_T), self.hidden_size, dtype=self.dtype, device=token_ids_T.device)
        else:
            hidden_TH = self.embedding.rows(local_T.masked_fill(elsewhere_T, 0)).to(self.dtype)
            hidden_TH = hidden_TH.masked_fill(elsewhere_T.unsqueeze(-1), 0.0)
        return self.mesh.ffn.all_reduce(hidden_TH)


def _tied(weights: Weights) -> tuple[Weight, Weight]:
    """Return the embedding and the head: one weight, if rows of the head's format can be read exactly."""
    if not FORMATS[weights.format("embedding")].weight_scales.bits:
        shared = weights.product("embedding")
        return shared, shared
    embedding = _embedding(weights)
    return embedding, weights.lay_out(embedding.values, weights.weight_dtype)


def _embedding(weights: Weights) -> Weight:
    """Return the embedding as a weight for row lookups only."""
    if weights.is_packed("embedding"):
        return weights.product("embedding", arrangement=PACKED)
    dtype, embedding_vH = weights.format("embedding"), weights.take("embedding")
    outputs, depth = embedding_vH.shape
    return Weight(embedding_vH, dtype, outputs, depth, arrangement=PLAIN)
