"""The decoder: one model for every supported architecture; what differs is in the spec and in the weights."""

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from longhelix.cache.pool import KVPool
from longhelix.models.attention import Attention
from longhelix.models.batch import Batch
from longhelix.models.ffn import DenseFFN
from longhelix.models.norm import RMSNorm
from longhelix.parallel.mesh import Mesh
from longhelix.spec import ModelSpec


class Layer(nn.Module):
    """Pre-norm attention and FFN, each added to the residual."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(weights["attention_norm"], spec.rms_norm_eps)
        self.attention = Attention(spec, mesh, weights)
        self.ffn_norm = RMSNorm(weights["ffn_norm"], spec.rms_norm_eps)
        self.ffn = DenseFFN(spec, mesh, weights)

    def forward(self, hidden_TH: Tensor, batch: Batch, k_PDkC: Tensor, v_PDkC: Tensor) -> Tensor:
        hidden_TH = hidden_TH + self.attention(self.attention_norm(hidden_TH), batch, k_PDkC, v_PDkC)
        return hidden_TH + self.ffn(self.ffn_norm(hidden_TH))


class Decoder(nn.Module):
    """This rank's part of the model. `weights` are those of `parameters.declare` for the same layout and rank."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.mesh = mesh
        self.vocabulary = mesh.layout.vocabulary(spec.vocab_size, mesh.rank)
        self.embedding = nn.Buffer(weights["embedding"])
        self.layers = nn.ModuleList(
            Layer(spec, mesh, _under(weights, f"layers.{layer}.")) for layer in range(spec.num_layers)
        )
        self.norm = RMSNorm(weights["norm"], spec.rms_norm_eps)
        self.head = self.embedding if spec.tied_embeddings else nn.Buffer(weights["head"])

    def forward(self, batch: Batch, pool: KVPool) -> Tensor:
        """Normalised hidden states of all rows, hidden_TH; writes the rows' KV into the pool."""
        hidden_TH = self._embed(batch.token_ids_T)
        for layer, k_PDkC, v_PDkC in zip(self.layers, pool.k, pool.v, strict=True):
            hidden_TH = layer(hidden_TH, batch, k_PDkC, v_PDkC)
        return self.norm(hidden_TH)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Logits over this rank's vocabulary, float32, logits_Tv."""
        return linear(hidden_TH, self.head).float()

    def _embed(self, token_ids_T: Tensor) -> Tensor:
        """Vocabulary-parallel: each rank looks up its own tokens, others give zeros, the sum has all."""
        local_T = token_ids_T - self.vocabulary.start
        elsewhere_T = (local_T < 0) | (local_T >= len(self.vocabulary))
        if not len(self.vocabulary):
            hidden_TH = self.embedding.new_zeros(len(token_ids_T), self.embedding.shape[1])
        else:
            hidden_TH = embedding(local_T.masked_fill(elsewhere_T, 0), self.embedding)
            hidden_TH = hidden_TH.masked_fill(elsewhere_T.unsqueeze(-1), 0.0)
        return self.mesh.stage.all_reduce(hidden_TH)


def _under(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
