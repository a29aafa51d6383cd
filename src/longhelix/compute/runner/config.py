"""The configuration of an engine: all that ranks and scheduler need to know."""

from dataclasses import dataclass
from fractions import Fraction

from longhelix.compute.models.parameters import declare, stored_bytes
from longhelix.compute.runner.pool_size import kv_bytes_per_token
from longhelix.compute.runner.token_ranges import TokenRanges
from longhelix.scheduler.config import SchedulerConfig
from longhelix.spec import HardwareSpec, ModelSpec, product_dtype
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import HeadShape, Layout


def takes_images(spec: ModelSpec, layout: Layout, rank: int) -> bool:
    """Return whether a rank needs rows of images: for its embedding, or for layers that add vision states."""
    if spec.vision is None:
        return False
    return layout.has_embedding(rank) or layout.layers(spec.num_layers, rank).start < spec.vision.num_deepstack


@dataclass(frozen=True)
class NumberFormats:
    """Number formats of an engine, by name.

    Attributes:
        dtype: Hidden states, and all weights that are not quantised.
        weight_dtype: Weights of matrix products that the checkpoint does not pack.
        activation_dtype: int8 or fp8: products round their inputs to it. None: inputs stay in `dtype`.
        kv_dtype: KV cache.
        attention_dtype: int8: attention rounds queries and softmax weights to bytes. None: it does not.
    """

    dtype: str
    weight_dtype: str
    activation_dtype: str | None
    kv_dtype: str
    attention_dtype: str | None

    @property
    def product_dtype(self) -> str:
        """The number format of products' weights, which also determines the format of inputs."""
        return product_dtype(self.weight_dtype, self.activation_dtype)


@dataclass(frozen=True)
class Machines:
    """The machines that run the ranks.

    Attributes:
        hosts: Which host runs each rank.
        threads_per_rank: Threads of a rank's kernels, by node rank of its host.
        device: "cpu" or "cuda".
        system: The machine by whose costs the engine decides.
    """

    hosts: Hosts
    threads_per_rank: tuple[int, ...]
    device: str
    system: HardwareSpec

    def threads_of(self, rank: int) -> int:
        """Return the number of threads of a rank's kernels."""
        return self.threads_per_rank[self.hosts.node_of(rank)]


@dataclass(frozen=True)
class ExecutionConfig:
    """How ranks run the layers. A rank resolves it to `execution.Execution`.

    Attributes:
        compile: Compile all layers to one graph with torch.compile.
        replay: Run layers from tapes on CPUs and from CUDA graphs on GPUs, where possible.
        token_ranges: Which steps have compiled graphs of their own, and which are sequence-parallel.
        attention: Which kernels compute attention on GPUs: "own" or "flashinfer".
        hop_b: Maximum number of parts in which a batch attends. Each is exchanged while the next one attends. None: the
            number with the shortest predicted time.
        trace: Ranks report what they do and when.
    """

    compile: bool
    replay: bool
    token_ranges: TokenRanges
    attention: str
    hop_b: int | None
    trace: bool

    @property
    def mode(self) -> str:
        """`compile` and `replay` as the value of the option --execution."""
        return "compiled" if self.compile else "recorded" if self.replay else "eager"


@dataclass(frozen=True)
class EngineConfig:
    """All that ranks and scheduler need to know. Nothing in it changes after `resolve`.

    Attributes:
        model_path: Folder or file of the checkpoint.
        spec: The model.
        layout: How the model is split over ranks.
        formats: Number formats.
        machines: The machines that run the ranks.
        scheduler: Settings of the scheduler.
        execution: How ranks run the layers.
        image_bytes: Memory for images that waiting requests show, in the engine's process. The output of the vision
            tower for the latest images may use the same amount again.
    """

    model_path: str
    spec: ModelSpec
    layout: Layout
    formats: NumberFormats
    machines: Machines
    scheduler: SchedulerConfig
    execution: ExecutionConfig
    image_bytes: int

    @property
    def heads(self) -> HeadShape:
        """The heads of the first layer with attention."""
        return self.spec.attentions[0].heads

    @property
    def image_ranks(self) -> tuple[int, ...]:
        """The ranks that need rows of images."""
        return tuple(rank for rank in range(self.layout.world_size) if takes_images(self.spec, self.layout, rank))

    @property
    def weight_formats(self) -> str:
        """The number formats of products' weights, in words: those that the checkpoint packs, and of all others."""
        quantisation = self.spec.checkpoint.quantisation
        others = self.formats.weight_dtype
        alone = quantisation is None or quantisation.formats == others
        return others if alone else f"{quantisation.formats} and {others}"

    def weight_elements(self, rank: int) -> int:
        """Return the number of elements of the weights of `rank`."""
        return sum(parameter.num_elements for parameter in declare(self.spec, self.layout, rank))

    def weight_bytes(self, rank: int) -> int:
        """Return the bytes of the weights of `rank`."""
        return sum(self._stored_bytes(rank).values())

    def weight_bytes_read(self, rank: int) -> int:
        """Return the bytes of weights that a decode step of one row reads.

        These are all weights except experts that the row does not take, and except an embedding that is not the head.
        """
        sizes = self._stored_bytes(rank)
        experts = {name: size for name, size in sizes.items() if ".experts." in name}
        other_bytes = sum(sizes.values()) - sizes.get("embedding", 0) - sum(experts.values())
        return other_bytes + int(sum(size * self._share_taken(name) for name, size in experts.items()))

    def _share_taken(self, name: str) -> Fraction:
        """Return the share of a layer's experts that a row takes. name: name of a weight of an expert."""
        moe = self.spec.layers[int(name.split(".")[1])].moe
        assert moe is not None
        return Fraction(moe.experts_per_token, moe.num_experts)

    def _stored_bytes(self, rank: int) -> dict[str, int]:
        return stored_bytes(self.spec, self.layout, rank, self.formats.dtype, self.formats.product_dtype)

    def kv_bytes_per_token(self, rank: int) -> int:
        """Return the bytes of one token's K and V, for the KV heads of `rank` and the layers of its stage."""
        return kv_bytes_per_token(self.spec, self.layout, self.formats.kv_dtype, self.machines.device, rank)

    def kv_bytes(self, rank: int, tokens: int) -> int:
        """Return the bytes of a request's KV on `rank`. tokens: tokens of the request on this rank.

        Layers with a limit keep at most the tokens that a request needs at once.
        """
        group_tokens = [tokens, *(min(tokens, window_tokens) for window_tokens in self.scheduler.window_tokens)]
        return sum(self._kv_bytes_per_token(rank, group) * count for group, count in enumerate(group_tokens))

    def _kv_bytes_per_token(self, rank: int, group: int) -> int:
        """Return the bytes of one token's K and V in the layers of a KV group."""
        groups = [group] if self.scheduler.cache.windows else None
        return kv_bytes_per_token(self.spec, self.layout, self.formats.kv_dtype, self.machines.device, rank, groups)

    @property
    def moved_bytes_per_token(self) -> int:
        """Bytes of a token that moves to another KVP rank, on all ranks with its KV. Layers with a limit move none."""
        ranks = range(self.layout.world_size)
        return sum(self._kv_bytes_per_token(rank, 0) for rank in ranks if self.layout.kvp_rank(rank) == 0)
