"""How a rank runs a step: resolved once at its start, from what was asked for and from what it finds."""

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Found:
    """What a rank finds. device: "cpu" or "cuda". native: this install has the native kernels. overlaps: what the KVP
    ranks exchange travels while they compute. sums_in_rank_order: so do all sums over ranks. packed: the pool and all
    products are."""

    device: str
    native: bool
    overlaps: bool
    sums_in_rank_order: bool
    packed: bool


@dataclass(frozen=True)
class Arrangement:
    """compiled: all layers are one graph of the compiler. tapes, graphs: decode steps on a CPU run from tapes, all
    steps on a GPU from CUDA graphs; with neither, layers run op by op or as they are compiled.

    overlaps: as found; another model of the links follows from it. parts: a batch may attend in parts (HOP-B).
    sees_waits: the time that a rank waits for exchanges is measured. sums_in_rank_order: as found. packed: no kernel is
    a reference. compiles: shapes that are new may call a compiler, so that steps of all of them run before the first
    request.

    `parts` changes which collectives run, so that all ranks must have it; in the others ranks may differ.
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

    @classmethod
    def resolve(cls, compile: bool, replay: bool, whole: bool, found: Found) -> Self:
        """compile, replay: as in EngineConfig. whole: attention is planned for whole batches, as FlashInfer's is."""
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
        )
