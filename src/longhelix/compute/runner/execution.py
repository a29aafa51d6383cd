"""How a rank runs its layers. Resolved once, when the rank starts, from the settings and the rank's capabilities."""

from dataclasses import dataclass
from typing import Self

from longhelix.compute.runner.token_ranges import ONE_RANGE, TokenRanges


@dataclass(frozen=True)
class RankCapabilities:
    """What a rank can do.

    Attributes:
        device: "cpu" or "cuda".
        native: This installation has the native kernels.
        overlaps: Exchanges between KVP ranks travel while the ranks compute.
        sums_in_rank_order: Sums over ranks add in rank order, so their bits repeat.
        packed: No kernel is a reference kernel: on a CPU, the pool and all weights are packed for the native kernels.
    """

    device: str
    native: bool
    overlaps: bool
    sums_in_rank_order: bool
    packed: bool


@dataclass(frozen=True)
class Execution:
    """How a rank runs its layers.

    Without `compiled`, `tapes` and `graphs`, layers run op by op. `parts` changes which collectives run: a batch
    attends in parts only if all ranks can. Ranks may differ in all other fields.

    Attributes:
        compiled: All layers are one graph of torch.compile, for each of `token_ranges`.
        tapes: Decode steps on a CPU run from tapes.
        graphs: Steps on a GPU run from CUDA graphs.
        parts: A batch may attend in parts (HOP-B).
        sees_waits: The time that a rank waits for exchanges is measured.
        compiles: A new shape may call a compiler, so steps of all shapes run before the first request.
        token_ranges: As in `ExecutionConfig`.
        capabilities: What the rank can do.
    """

    compiled: bool
    tapes: bool
    graphs: bool
    parts: bool
    sees_waits: bool
    compiles: bool
    token_ranges: TokenRanges
    capabilities: RankCapabilities

    @classmethod
    def resolve(
        cls,
        compile: bool,
        replay: bool,
        whole_batches: bool,
        capabilities: RankCapabilities,
        token_ranges: TokenRanges = ONE_RANGE,
    ) -> Self:
        """Decide how this rank runs its layers.

        Args:
            compile: as in `ExecutionConfig`.
            replay: as in `ExecutionConfig`.
            whole_batches: attention must see whole batches, as FlashInfer does.
            capabilities: what this rank can do.
            token_ranges: as in `ExecutionConfig`.
        """
        on_gpu = capabilities.device == "cuda"
        return cls(
            compiled=compile,
            # Kernels that the compiler made would be missing from a tape.
            tapes=replay and not compile and not on_gpu and capabilities.native,
            graphs=replay and on_gpu,
            # The compiler's graph has one exchange in each layer.
            parts=capabilities.overlaps and not compile and not whole_batches,
            # The compiler's graphs wait out of sight, GPUs in their streams.
            sees_waits=capabilities.overlaps and not compile and not on_gpu,
            compiles=compile or on_gpu,
            token_ranges=token_ranges,
            capabilities=capabilities,
        )
