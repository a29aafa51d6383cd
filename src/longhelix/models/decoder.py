"""The decoder: one model for all supported architectures. They differ in the spec and in the weights."""

import torch
from torch import Tensor, nn

from longhelix.cache.pool import KVPool
from longhelix.kernels import PLAIN, KVLayer, Weight, linear, make_weight
from longhelix.models.attention import Attention
from longhelix.models.batch import Batch
from longhelix.models.experts import ExpertFFN
from longhelix.models.ffn import DenseFFN
from longhelix.models.latent_attention import LatentAttention
from longhelix.parallel.mesh import Mesh
from longhelix.spans import UNTRACED, Spans
from longhelix.spec import ModelSpec


class Layer(nn.Module):
    """Attention and FFN, each with a norm before it and added to the residual. `entries`: what the layer caches, by
    name."""

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, weights: dict[str, Tensor], index: int, weight_dtype: str, spans: Spans
    ) -> None:
        super().__init__()
        self.spans = spans
        prefix = f"layers.{index}."
        attention = Attention if spec.mla is None else LatentAttention
        self.attention = attention(spec, mesh, weights, prefix, weight_dtype, spans)
        ffn = ExpertFFN if spec.has_experts(index) else DenseFFN
        self.ffn = ffn(spec, mesh, weights, prefix, weight_dtype)

    def forward(self, hidden_TH: Tensor, batch: Batch, entries: dict[str, KVLayer]) -> Tensor:
        hidden_TH = self.attention(hidden_TH, batch, **entries)
        span = self.spans.begin("FFN")
        hidden_TH = self.ffn(hidden_TH, batch.padding_T)
        self.spans.end(span)
        return hidden_TH


class Decoder(nn.Module):
    """This rank's shard of the model: the layers of its stage, the embedding on the first stage, the head on the last.

    `weights`: those of `parameters.declare` for the same layout and rank. Each is taken out of the dict as it is
    packed, so that there is never a second copy of all of them. `spans` are told of what layers do.
    """

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, weights: dict[str, Tensor], weight_dtype: str, spans: Spans = UNTRACED
    ) -> None:
        super().__init__()
        layout, rank = mesh.layout, mesh.rank
        self.spans = spans
        self.mesh = mesh
        self.eps = spec.rms_norm_eps
        self.hidden_size = spec.hidden_size
        self.layers_begun = 0  # op by op: those of tapes and graphs are not seen
        self.vocabulary = layout.vocabulary(spec.vocab_size, rank)
        self.indices = layout.layers(spec.num_layers, rank)
        self.dtype = weights[f"layers.{self.indices.start}.attention_norm"].dtype
        self.layers = nn.ModuleList(Layer(spec, mesh, weights, index, weight_dtype, spans) for index in self.indices)
        embedding_vH, self.norm = weights.pop("embedding", None), weights.pop("norm", None)
        head_vH = weights.pop("head", embedding_vH)  # one matrix, where embeddings are tied and this rank has both
        self.head = make_weight(head_vH, weight_dtype) if layout.has_head(rank) else None
        shared = self.head is not None and self.head.has_rows and head_vH is embedding_vH
        self.embedding = self.head if shared else _plain(embedding_vH, weight_dtype)
        assert not weights, f"declared, but not used: {list(weights)}"

    def products(self) -> list[Weight]:
        """The weights that this rank multiplies with. A weight of which the rank has nothing is left out."""
        layers = [(*layer.attention.products, *layer.ffn.products) for layer in self.layers]
        head = () if self.head is None else (self.head,)
        return [weight for weight in (*sum(layers, ()), *head) if weight.outputs and weight.depth]

    def expert_rows(self) -> list[list[int]]:
        """How many rows each expert of this rank has had, by layer of its stage. Empty for layers without experts."""
        ffns = [layer.ffn for layer in self.layers]
        return [ffn.rows_per_expert.tolist() if isinstance(ffn, ExpertFFN) else [] for ffn in ffns]

    def forget_expert_rows(self) -> None:
        """Set the counts of `expert_rows` to 0."""
        for layer in self.layers:
            if isinstance(layer.ffn, ExpertFFN):
                layer.ffn.rows_per_expert.zero_()

    def run_layers(self, hidden_TH: Tensor, batch: Batch, pool: KVPool) -> Tensor:
        """hidden_TH after the layers of this stage. Writes the rows' KV into the pool."""
        for index, layer, entries in zip(self.indices, self.layers, pool.layers, strict=True):
            if not torch.compiler.is_compiling():
                self.layers_begun += 1
            self.spans.layer(index)
            hidden_TH = layer(hidden_TH, batch, entries)
        self.spans.layer(None)
        return hidden_TH

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """logits_Tv: logits over the vocabulary of this rank, float32. For ranks of the last stage."""
        return linear(hidden_TH, self.head, norm=self.norm, norm_eps=self.eps, dtype=torch.float32)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Hidden states before the first layer. For ranks of the first stage.

        Vocabulary-parallel: each rank looks up the tokens that it has and gives zeros for the others; the sum has all.
        """
        if self.mesh.ffn.size == 1:
            return self.embedding.rows(token_ids_T)
        local_T = token_ids_T - self.vocabulary.start
        elsewhere_T = (local_T < 0) | (local_T >= len(self.vocabulary))
        if not len(self.vocabulary):
            hidden_TH = torch.zeros(len(token_ids_T), self.hidden_size, dtype=self.dtype, device=token_ids_T.device)
        else:
            hidden_TH = self.embedding.rows(local_T.masked_fill(elsewhere_T, 0))
            hidden_TH = hidden_TH.masked_fill(elsewhere_T.unsqueeze(-1), 0.0)
        return self.mesh.ffn.all_reduce(hidden_TH)


def _plain(weight_OI: Tensor | None, dtype: str) -> Weight | None:
    return None if weight_OI is None else Weight(weight_OI, dtype, *weight_OI.shape, PLAIN)
