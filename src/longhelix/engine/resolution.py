"""Turns a user's settings into the engine's configuration.

It fills in all defaults and checks everything that can be checked before a rank starts.
"""

import math
import warnings
from collections.abc import Sequence

from longhelix.compute.machine import host
from longhelix.compute.machine.devices import has_native_kernels
from longhelix.compute.machine.system import machine
from longhelix.compute.models.gguf_checkpoint import GgufCheckpoint
from longhelix.compute.models.rope import inverse_frequencies
from longhelix.compute.models.safetensors_checkpoint import SafetensorsCheckpoint
from longhelix.compute.runner.config import EngineConfig, ExecutionConfig, Machines, NumberFormats
from longhelix.compute.runner.pool_size import affordable_blocks, num_blocks, num_blocks_of_many, split_state_bytes
from longhelix.engine.options import EngineOptions
from longhelix.engine.places import Places
from longhelix.engine.sequence_parallelism import token_ranges
from longhelix.engine.settings.formats import attention_dtype, base_dtypes, check_float8, rounding_inputs
from longhelix.engine.settings.kernels import check_kernels
from longhelix.engine.settings.model import read_model
from longhelix.engine.settings.scheduler import scheduler_config, with_pools
from longhelix.engine.settings.weight_warnings import warn_of_weights
from longhelix.errors import UserError
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.stages import balanced
from longhelix.spec import FORMATS, ModelSpec, product_dtype
from longhelix.spec.layout import Layout
from longhelix.values import refused

# Limit on the ranks per core. Ranks that share a core take turns, and all ranks wait for each other at every exchange.
_RANKS_PER_CORE = 4
_FEW_RANKS = 64  # number of ranks that any machine may run, so that users can try out a layout
# Limits on the memory for image states in the engine's process, in bytes and as a fraction of the free memory. They
# apply separately to waiting requests and to the vision tower. An image of 1,024 tokens takes 34 MB in a model with a
# hidden size of 4,096.
_MOST_IMAGE_BYTES, _IMAGE_SHARE = 2**29, 1 / 16


def resolve(
    checkpoint: SafetensorsCheckpoint | GgufCheckpoint,
    layout: Layout,
    options: EngineOptions | None = None,
    places: Places | None = None,
) -> EngineConfig:
    """Return an engine's configuration.

    Args:
        places: what each host has, and which ranks it runs. None if this host runs all ranks.

    Raises:
        UserError: the model, layout and options cannot run together.
    """
    options = EngineOptions() if options is None else options
    if not isinstance(layout, Layout):
        raise refused("layout", layout, "a Layout, such as Layout(kvp=2)", "invalid_layout")
    spec = read_model(checkpoint, options.rope_scaling)
    stored = spec.checkpoint.quantisation
    if options.weight_dtype is not None or not has_native_kernels():
        spec = spec.expanded()
    if options.activation_dtype is not None and stored is not None and not stored.packs:
        spec, stored = spec.expanded(), None  # numbers of a GGUF file are quantised while they load
    dtype, weight_dtype, kv_dtype = base_dtypes(spec, options)
    if options.activation_dtype is not None:
        spec = rounding_inputs(spec, options.activation_dtype, stored)
    max_model_len = _max_model_len(spec, options.max_model_len)
    if options.attention == "flashinfer":  # which takes no limits
        spec = spec.within(max_model_len)
    _check_rope(spec, max_model_len)
    _check_layout(spec, layout)
    places = Places.here(layout, with_gpus=options.device != "cpu") if places is None else places
    device = _device(options, places, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
    if device != "cpu":
        spec = spec.on_gpus()
    stored_dtype = product_dtype(weight_dtype, options.activation_dtype)
    compile, replay = _layers_run(options, device)
    check_kernels(spec, options, device, replay)
    check_float8(options, kv_dtype, device, places)
    if device == "cpu":
        _check_cores(places)
    system = machine(device)
    setting = Setting(spec, system, Dtypes(stored_dtype, kv_dtype, packed=True))
    layout = balanced(setting, layout)
    warn_of_weights(spec, layout, device, stored_dtype)
    scheduler = scheduler_config(options, layout, max_model_len, setting)
    longest_tokens = scheduler.longest_local_tokens
    image_bytes = _image_bytes(spec)
    memories = _memories(
        spec,
        layout=layout,
        places=places,
        on_gpus=device == "cuda",
        longest_tokens=longest_tokens,
        taken_bytes=2 * image_bytes,
    )
    views = spec.views
    kinds = spec, layout, dtype, stored_dtype, kv_dtype, device, scheduler, views
    with_ends = min(affordable_blocks(*kinds, *memory) for memory in memories)
    most = min(affordable_blocks(*kinds, *memory, with_ends=False) for memory in memories) if views else with_ends
    sizes = scheduler.block_tokens, layout.kvp
    if isinstance(options.kv_cache_tokens, str):
        many = scheduler.steps.max_running * max_model_len
        held = num_blocks_of_many(many, with_ends, *sizes, shares_memory=device == "cpu")
    else:
        held = num_blocks(options.kv_cache_tokens, longest_tokens, most, *sizes)
    windows = scheduler.windows_of(views, held, with_ends=held <= with_ends)
    return EngineConfig(
        model_path=str(checkpoint.path),
        spec=spec,
        layout=layout,
        formats=NumberFormats(
            dtype=dtype,
            weight_dtype=weight_dtype,
            activation_dtype=options.activation_dtype,
            kv_dtype=kv_dtype,
            attention_dtype=attention_dtype(options, kv_dtype, device),
        ),
        machines=Machines(
            hosts=places.hosts,
            threads_per_rank=tuple(
                max(cores // len(ranks), 1) for cores, ranks in zip(places.cores, places.hosts.ranks, strict=True)
            ),
            device=device,
            system=system,
        ),
        scheduler=with_pools(scheduler, spec, windows, held),
        execution=ExecutionConfig(
            compile=compile,
            replay=replay,
            token_ranges=token_ranges(spec, layout, options, compile),
            attention=options.attention,
            hop_b=options.hop_b,
            trace=options.trace is not None,
        ),
        image_bytes=image_bytes,
    )


def _image_bytes(spec: ModelSpec) -> int:
    """Return the configuration's `image_bytes`, the limit on memory for image states. Without vision, it is 0."""
    return 0 if spec.vision is None else min(_MOST_IMAGE_BYTES, int(_IMAGE_SHARE * host.available_bytes()))


def _memories(
    spec: ModelSpec, layout: Layout, places: Places, on_gpus: bool, longest_tokens: int, taken_bytes: int
) -> list[tuple[int, Sequence[int]]]:
    """Return the size of each memory in bytes, with the ranks that use this memory.

    On CPUs, the ranks of a host share its free memory. The engine takes `taken_bytes` of the first host's memory. On
    GPUs, each rank has its own memory.
    """
    hosts = places.hosts
    if not on_gpus:
        taken = [taken_bytes, *[0] * (len(hosts.ranks) - 1)]
        return [(free - less, ranks) for free, less, ranks in zip(places.free_bytes, taken, hosts.ranks, strict=True)]
    return [
        (gpu_bytes - split_state_bytes(spec, layout, longest_tokens, rank), (rank,))
        for found, ranks in zip(places.gpu_bytes, hosts.ranks, strict=True)
        for gpu_bytes, rank in zip(found, ranks, strict=False)
    ]


def _device(options: EngineOptions, places: Places, weight_dtype: str, kv_dtype: str) -> str:
    """Return the device type of the ranks. "auto" selects GPUs if there is one for each rank, and CPUs otherwise."""
    device = options.device
    lacking = places.lacking_gpus
    if device == "auto":
        device = "cuda" if lacking is None else "cpu"
    if device == "cpu":
        return device
    if lacking is not None:
        ranks, found, where = len(places.hosts.ranks[lacking]), len(places.gpu_bytes[lacking]), places.where(lacking)
        raise UserError(
            f"the layout has {ranks} ranks{where} and each needs a GPU, but torch finds {found} "
            f"{'there' if where else 'here'}: set device to cpu, or choose a smaller layout"
        )
    in_bytes = options.activation_dtype == "int8"
    plain_weights = not in_bytes and bool({"plain", "packed"} & set(FORMATS[weight_dtype].weights))
    if not plain_weights or "rows" not in FORMATS[kv_dtype].kv:
        weights = "activation_dtype int8" if in_bytes else f"weight_dtype {weight_dtype}"
        narrow = f"kv_dtype {kv_dtype}" if plain_weights else weights
        raise UserError(f"{narrow} runs only on CPUs: set device to cpu, or choose another dtype")
    return device


def _check_cores(places: Places) -> None:
    """Reject a layout that has too many ranks for this number of cores.

    This check comes first, because later checks do some work for each rank.
    """
    for node, (ranks, cores) in enumerate(zip(map(len, places.hosts.ranks), places.cores, strict=True)):
        most = max(_FEW_RANKS, _RANKS_PER_CORE * cores)
        if ranks > most:
            raise UserError(
                f"the layout has {ranks} ranks{places.where(node)}, and each is a process, but {cores} cores can run "
                f"at most {most}: choose a layout of at most {most} ranks",
                "invalid_layout",
            )
        if ranks > cores:
            warnings.warn(
                f"{ranks} ranks{places.where(node)} share {cores} cores, so the engine runs slowly: choose a layout of "
                f"at most {cores} ranks",
                stacklevel=3,
            )


def _layers_run(options: EngineOptions, device: str) -> tuple[bool, bool]:
    """Return the values of `compile` and `replay` in the configuration.

    A trace contains the ops of a tape, but not the ops of a CUDA graph. Traced layers on GPUs therefore run op by op.
    """
    if options.execution == "compiled":
        return True, device == "cuda"
    op_by_op = device == "cuda" and options.trace is not None
    return False, options.execution == "recorded" and not op_by_op


def _max_model_len(spec: ModelSpec, asked: int | None) -> int:
    max_model_len = spec.max_positions if asked is None else asked
    if max_model_len > spec.max_positions:
        warnings.warn(
            f"max_model_len {max_model_len} exceeds the {spec.max_positions} positions that the model was trained for, "
            f"so answers may be poor beyond them: set max_model_len to at most {spec.max_positions}",
            stacklevel=3,
        )
    return max_model_len


def _check_rope(spec: ModelSpec, max_model_len: int) -> None:
    """Reject settings that are valid individually but together give unusable frequencies.

    With dynamic and longrope, the frequencies depend on the length. They are always between the frequencies of the
    shortest length and those of the longest length, so checking these two lengths is enough.
    """
    for rope, size in spec.rotations:
        try:
            frequencies = [
                frequency for length in (1, max_model_len) for frequency in inverse_frequencies(rope, size, length)
            ]
        except (ArithmeticError, ValueError):
            frequencies = [math.nan]
        if not all(0 < frequency < math.inf for frequency in frequencies):
            raise UserError(
                f"the rope settings give frequencies that are not finite and above 0 for {size} rotated channels of a "
                "head: leave rope_scaling out, or set it to the values that the model was trained with"
            )


def _check_layout(spec: ModelSpec, layout: Layout) -> None:
    spec.check(layout)
    heads = spec.fewest_heads
    num_experts = spec.num_experts
    if layout.ep > num_experts:
        has = f"{num_experts} experts" if spec.moes else "no experts"
        raise UserError(
            f"ep is {layout.ep}, but the model has {has}: set ep to {num_experts} or less", "invalid_layout"
        )
    if layout.ffn_replicas > 1 and (layout.ep > 1 or layout.ffn_replicas != layout.kvp):
        raise UserError(
            f"a tied layout replicates the FFN with all experts on each of {layout.kvp} KVP instances, but ep is "
            f"{layout.ep} and ffn_replicas is {layout.ffn_replicas}: leave ep out, and set ffn_replicas to "
            f"{layout.kvp}",
            "invalid_layout",
        )
    if layout.duplicates_kv(heads):
        copies = -(-layout.tpa // heads.num_kv_heads)
        warnings.warn(
            f"tpa {layout.tpa} exceeds the {heads.num_kv_heads} KV heads of a layer, so up to {copies} ranks keep and "
            f"read the same KV: set tpa to {heads.num_kv_heads} and kvp higher to avoid the copies",
            stacklevel=3,
        )
