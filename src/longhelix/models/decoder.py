"""The decoder: one model for every supported architecture; what differs is in the spec and in the weights."""

import torch
from torch import Tensor, nn

from longhelix.cache.pool import KVPool
from longhelix.kernels import KVLayer, Weight, linear, make_weight
from longhelix.models.attention import Attention
from longhelix.models.batch import Batch
from longhelix.models.experts import ExpertFFN
from longhelix.models.ffn import DenseFFN
from longhelix.models.latent_attention import LatentAttention
from longhelix.parallel.mesh import Mesh
from longhelix.spans import UNTRACED, Spans
from longhelix.spec import ModelSpec


class Layer(nn.Module):
    """Pre-norm attention and FFN, each added to the residual."""

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

    def forward(self, hidden_TH: Tensor, batch: Batch, layer: KVLayer) -> Tensor:
        hidden_TH = self.attention(hidden_TH, batch, layer)
        span = self.spans.begin("FFN")
        hidden_TH = self.ffn(hidden_TH)
        self.spans.end(span)
        return hidden_TH


class Decoder(nn.Module):
    """This rank's part of the model. `weights` are those of `parameters.declare` for the same layout and rank; they are
    taken out of the dict one by one as they are packed, so that no second copy of all of them ever exists. `spans` are
    told of what layers do."""

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, weights: dict[str, Tensor], weight_dtype: str, spans: Spans = UNTRACED
    ) -> None:
        super().__init__()
        self.spans = spans
        self.mesh = mesh
        self.eps = spec.rms_norm_eps
        self.layers_begun = 0  # op by op: those of tapes and graphs are not seen
        self.vocabulary = mesh.layout.vocabulary(spec.vocab_size, mesh.rank)
        self.layers = nn.ModuleList(
            Layer(spec, mesh, weights, index, weight_dtype, spans) for index in range(spec.num_layers)
        )
        self.norm = weights.pop("norm")
        embedding_vH = weights.pop("embedding")
        self.head = make_weight(embedding_vH if spec.tied_embeddings else weights.pop("head"), weight_dtype)
        shared = spec.tied_embeddings and self.head.has_rows
        self.embedding = self.head if shared else Weight(embedding_vH, weight_dtype, *embedding_vH.shape, packed=False)

    def products(self) -> list[Weight]:
        """The weights that this rank multiplies with; some ranks have none of some."""
        layers = [(*layer.attention.products, *layer.ffn.products) for layer in self.layers]
        return [weight for weight in (*sum(layers, ()), self.head) if weight.outputs and weight.depth]

    def expert_rows(self) -> list[list[int]]:
        """How many rows each expert of this rank has had, by layer; empty for layers without experts."""
        ffns = [layer.ffn for layer in self.layers]
        return [ffn.rows_per_expert.tolist() if isinstance(ffn, ExpertFFN) else [] for ffn in ffns]

    def forget_expert_rows(self) -> None:
        """Count from here on."""
        for layer in self.layers:
            if isinstance(layer.ffn, ExpertFFN):
                layer.ffn.rows_per_expert.zero_()

    def run_layers(self, hidden_TH: Tensor, batch: Batch, pool: KVPool) -> Tensor:
        """Hidden states of all rows before the last norm; writes the rows' KV into the pool."""
        for index, (layer, kv) in enumerate(zip(self.layers, pool.layers, strict=True)):
            if not torch.compiler.is_compiling():
                self.layers_begun += 1
            self.spans.layer(index)
            hidden_TH = layer(hidden_TH, batch, kv)
        self.spans.layer(None)
        return hidden_TH

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits over this rank's vocabulary, float32, logits_Tv."""
        return linear(hidden_TH, self.head, norm=self.norm, norm_eps=self.eps, dtype=torch.float32)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """Hidden states before the first layer.

        Vocabulary-parallel: each rank looks up its own tokens, others give zeros, the sum has all.
        """
        if self.mesh.stage.size == 1:
            return self.embedding.rows(token_ids_T)
        local_T = token_ids_T - self.vocabulary.start
        elsewhere_T = (local_T < 0) | (local_T >= len(self.vocabulary))
        if not len(self.vocabulary):
            hidden_TH = self.norm.new_zeros(len(token_ids_T), len(self.norm))
        else:
            hidden_TH = self.embedding.rows(local_T.masked_fill(elsewhere_T, 0))
            hidden_TH = hidden_TH.masked_fill(elsewhere_T.unsqueeze(-1), 0.0)
        return self.mesh.stage.all_reduce(hidden_TH)
