"""A layer of a model: mixers side by side, then FFNs side by side."""

import msgspec

from longhelix.spec.attention import GroupedQueryAttention, MultiHeadLatentAttention
from longhelix.spec.ffn import MLP
from longhelix.spec.linear import LinearAttention
from longhelix.spec.moe import MoE
from longhelix.spec.norms import Norms

Attention = GroupedQueryAttention | MultiHeadLatentAttention
Mixer = GroupedQueryAttention | MultiHeadLatentAttention | LinearAttention
FFN = MLP | MoE


class LayerSpec(msgspec.Struct, frozen=True):
    """A layer. A model has few different ones.

    Attributes:
        mixers: What mixes rows, each with the same input. Their outputs are added to the residual.
        ffns: What follows, each with the same input. Their outputs are added to the residual.
        residual_scale: The outputs of mixers and FFNs are scaled by it before they are added.
        norms: The norms before and after mixers and FFNs.
    """

    mixers: tuple[Mixer, ...]
    ffns: tuple[FFN, ...]
    residual_scale: float = 1.0
    norms: Norms = Norms()

    @property
    def attention(self) -> Attention | None:
        """The mixer that keeps something of every token. None if there is none."""
        return next((mixer for mixer in self.mixers if not isinstance(mixer, LinearAttention)), None)

    @property
    def linear(self) -> LinearAttention | None:
        """The mixer with a state of fixed size. None if there is none."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, LinearAttention)), None)

    @property
    def dense(self) -> MLP | None:
        """The dense FFN. None if there is none."""
        return next((ffn for ffn in self.ffns if isinstance(ffn, MLP)), None)

    @property
    def moe(self) -> MoE | None:
        """The FFN with experts. None if there is none."""
        return next((ffn for ffn in self.ffns if isinstance(ffn, MoE)), None)

    def with_attention(self, **changes: object) -> "LayerSpec":
        """Return the layer with changed fields of its attention. Other mixers stay."""
        mixers = (
            mixer if isinstance(mixer, LinearAttention) else msgspec.structs.replace(mixer, **changes)
            for mixer in self.mixers
        )
        return msgspec.structs.replace(self, mixers=tuple(mixers))
