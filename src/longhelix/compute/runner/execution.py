"""How a rank runs its layers: resolved once when it starts, from what was asked for and from what the rank finds."""

from dataclasses import dataclass
from typing import Self

from longhelix.compute.runner.token_ranges import ONE_RANGE, TokenRanges


@dataclass(frozen=True)
class Found:
    """What a rank finds when it starts.

    device: "cpu" or "cuda". native: this install has the native kernels. overlaps: exchanges between KVP ranks travel
    while the ranks compute. sums_in_rank_order: sums over ranks add in rank order, so their bits repeat. packed: the
    pool and all weights are packed for the native kernels.
    """

    device: str
    native: bool
    overlaps: bool
    sums_in_rank_order: bool
    packed: bool


@dataclass(frozen=True)
class Execution:
    """How a rank runs its layers.

    compiled: all layers are one graph of torch.compile, for each of `token_ranges`. tapes: decode steps on a CPU run
    from tapes. graphs: steps on a GPU run from CUDA graphs. With none of the three, layers run op by op.

    overlaps: as found; the cost model of the links depends on it. parts: a batch may attend in parts (HOP-B).
    sees_waits: the time that a rank waits for exchanges is measured. sums_in_rank_order: as found. packed: no kernel is
    a reference kernel. compiles: a new shape may call a compiler, so steps of all shapes run before the first request.

    `parts` changes which collectives run: a batch attends in parts only if all ranks can. Ranks may differ in the rest.
    """

    compiled: bool
    tapes: bool
    graphs: bool
    overlaps: bool
    parts: bool
    sees_waits: bool
    sums_in_rank_order: bool
    packed: bool
    compiles: bool
    token_ranges: TokenRanges = ONE_RANGE

    @classmethod
    def resolve(
        cls, compile: bool, replay: bool, whole: bool, found: Found, token_ranges: TokenRanges = ONE_RANGE
    ) -> Self:
        """compile, replay, token_ranges: as in EngineConfig. whole: attention must see whole batches, as FlashInfer
        does."""
        on_gpu = found.device == "cuda"
        return cls(
            compiled=compile,
            # Kernels that the compiler made would be missing from a tape.
            tapes=replay and not compile and not on_gpu and found.native,
            graphs=replay and on_gpu,
            overlaps=found.overlaps,
            # The compiler's graph has one exchange in each layer.
            parts=found.overlaps and not compile and not whole,
            # The compiler's graphs wait out of sight, GPUs in their streams.
            sees_waits=found.overlaps and not compile and not on_gpu,
            sums_in_rank_order=found.sums_in_rank_order,
            packed=found.packed or on_gpu,
            compiles=compile or on_gpu,
            token_ranges=token_ranges,
        )
