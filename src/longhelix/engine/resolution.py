"""Turns a user's settings into the engine's configuration.

It fills in all defaults and checks everything that can be checked before a rank starts.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from longhelix.compute.machine import host
from longhelix.compute.machine.devices import has_native_kernels, multiplies_integers
from longhelix.compute.machine.system import machine
from longhelix.compute.models.gguf_checkpoint import GgufCheckpoint
from longhelix.compute.models.parameters import check, mixed_weight, slow_weight, with_stored_formats
from longhelix.compute.models.rope import inverse_frequencies
from longhelix.compute.models.safetensors_checkpoint import SafetensorsCheckpoint
from longhelix.compute.models.vision_language_checkpoint import VisionLanguageCheckpoint
from longhelix.compute.runner.config import EngineConfig, ExecutionConfig, Machines, NumberFormats
from longhelix.compute.runner.pool_size import affordable_blocks, num_blocks, num_blocks_of_many, split_state_bytes
from longhelix.engine.options import MOST_CHUNK_TOKENS, EngineOptions
from longhelix.engine.places import Places
from longhelix.engine.sequence_parallelism import token_ranges
from longhelix.errors import UserError
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.stages import balanced
from longhelix.perf.threshold import local_threshold_tokens
from longhelix.scheduler.config import CacheConfig, PlacementConfig, SchedulerConfig, ServiceConfig, StepConfig
from longhelix.scheduler.kv.windows import KVWindow
from longhelix.spec import (
    DTYPES,
    FORMATS,
    WEIGHT_DTYPES,
    ModelSpec,
    product_dtype,
    read_hf_config,
    unread_fields,
)
from longhelix.spec.attention import GroupedQueryAttention
from longhelix.spec.layout import Layout
from longhelix.spec.missing_parts import missing_parts
from longhelix.spec.quantised_modules import Quantisation
from longhelix.values import one_of, refused

# Limit on the ranks per core. Ranks that share a core take turns, and all ranks wait for each other at every exchange.
_RANKS_PER_CORE = 4
_FLOAT8_CAPABILITY = (8, 9)  # the first compute capability of GPUs that multiply and convert FP8
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
    spec = _spec(checkpoint, options.rope_scaling)
    stored = spec.checkpoint.quantisation
    if options.weight_dtype is not None or not has_native_kernels():
        spec = spec.expanded()
    if options.activation_dtype is not None and stored is not None and not stored.packs:
        spec, stored = spec.expanded(), None  # numbers of a GGUF file are quantised while they load
    dtype, weight_dtype, kv_dtype = _dtypes(spec, options)
    if options.activation_dtype is not None:
        spec = _rounding_inputs(spec, options.activation_dtype, stored)
    max_model_len = _max_model_len(spec, options.max_model_len)
    if options.attention == "flashinfer":  # which takes no limits
        spec = spec.within(max_model_len)
    _check_rope(spec, max_model_len)
    _check_layout(spec, layout)
    places = Places.here(layout, with_gpus=options.device != "cpu") if places is None else places
    device = _device(options, places, weight_dtype=weight_dtype, kv_dtype=kv_dtype)
    if device != "cpu":
        spec = spec.expanded()
    stored_dtype = product_dtype(weight_dtype, options.activation_dtype)
    compile, replay = _layers_run(options, device)
    _check_runs_together(spec, options, device, replay)
    _check_float8(options, kv_dtype, device, places)
    if device == "cpu":
        _check_cores(places)
    system = machine(device)
    setting = Setting(spec, system, Dtypes(stored_dtype, kv_dtype, packed=True))
    layout = balanced(setting, layout)
    _warn_of_weights(spec, layout, device, stored_dtype)
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
            attention_dtype=_attention_dtype(options, kv_dtype, device),
        ),
        machines=Machines(
            hosts=places.hosts,
            threads_per_rank=tuple(
                max(cores // len(ranks), 1) for cores, ranks in zip(places.cores, places.hosts.ranks, strict=True)
            ),
            device=device,
            system=system,
        ),
        scheduler=_with_pools(scheduler, spec, windows, held),
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


def _with_pools(
    scheduler: SchedulerConfig, spec: ModelSpec, windows: tuple[KVWindow, ...], held: int
) -> SchedulerConfig:
    """Return the scheduler's settings with pools of `held` KV blocks on each KVP rank, and those of windows."""
    is_free = bool(windows) and all(spec.groups)  # no layer needs the KV blocks of those that see everything
    return scheduler.with_pools(max(held, scheduler.most_listed_blocks) if is_free else held, windows)


def _dtypes(spec: ModelSpec, options: EngineOptions) -> tuple[str, str, str]:
    """Return the dtypes of activations, of weights that the checkpoint does not pack, and of KV."""
    dtype = options.dtype or one_of("dtype", spec.checkpoint.dtype, DTYPES)
    quantised = [name for name in WEIGHT_DTYPES if name not in DTYPES]
    if spec.checkpoint.quantisation is not None:
        if options.weight_dtype in quantised:
            raise UserError(
                f"the checkpoint's weights are already quantised ({spec.checkpoint.quantisation.formats}): leave "
                "out weight_dtype"
            )
        quantised = []
    in_bytes = options.activation_dtype == "int8" and bool(quantised)
    default = "int8" if in_bytes else dtype
    weight_dtype = one_of("weight_dtype", options.weight_dtype or default, (dtype, *quantised))
    if in_bytes and weight_dtype != "int8":
        raise UserError(
            f"activation_dtype int8 needs int8 weights, but weight_dtype is {weight_dtype}: leave one of them out"
        )
    return dtype, weight_dtype, options.kv_dtype or dtype


def _rounding_inputs(spec: ModelSpec, dtype: str, stored: Quantisation | None) -> ModelSpec:
    """Return the spec of a model whose products round their inputs to `dtype`, as weights of the checkpoint are.

    stored: How the checkpoint is quantised. The spec of a GGUF file may have its weights expanded.
    """
    quantisation = spec.checkpoint.quantisation
    if quantisation is None and dtype == "int8":
        return spec  # weights are quantised while they load
    if stored is None:
        raise UserError(
            f"activation_dtype {dtype} needs a checkpoint with {dtype} weights, but this one is not quantised: leave "
            "out activation_dtype"
        )
    rounding = None if quantisation is None else quantisation.rounding_inputs(dtype)
    if rounding is None:
        raise UserError(
            f"activation_dtype {dtype} needs {dtype} weights, but those of the checkpoint are quantised otherwise "
            f"({stored.formats}): leave out activation_dtype"
        )
    return spec.quantised_by(rounding)


def _attention_dtype(options: EngineOptions, kv_dtype: str, device: str) -> str | None:
    if options.attention_dtype is None:
        return None
    if kv_dtype not in ("int8", "int4"):
        raise UserError(
            f"attention_dtype int8 needs a quantised KV cache, but kv_dtype is {kv_dtype}: set kv_dtype to int8 or "
            "int4, or leave attention_dtype out"
        )
    if device != "cpu" or not multiplies_integers():
        raise UserError(
            "attention_dtype int8 needs the native kernels on a CPU with AVX-512 VNNI, VBMI and BF16, which this "
            "machine does not have: leave attention_dtype out"
        )
    return options.attention_dtype


def _check_runs_together(spec: ModelSpec, options: EngineOptions, device: str, replay: bool) -> None:
    if options.batch_invariant and spec.has_latents:
        raise UserError(
            "batch_invariant does not work for models with latent attention, which use torch's matrix products: leave "
            "batch_invariant out"
        )
    if options.attention == "flashinfer":
        _check_flashinfer(spec, options, device, replay)
    if options.activation_dtype == "int8" and not has_native_kernels():
        raise UserError(
            "activation_dtype int8 needs the native CPU kernels, which this install does not have: leave "
            "activation_dtype out"
        )
    if device == "cpu" and not has_native_kernels():
        warnings.warn(
            "the native CPU kernels are missing because there was no C++ compiler when longhelix was installed, so the "
            "engine runs many times slower: install GCC 12 or later and then longhelix again, or install a wheel",
            stacklevel=4,
        )


def _check_float8(options: EngineOptions, kv_dtype: str, device: str, places: Places) -> None:
    """Reject arithmetic in FP8, and FP8 that only hardware converts, on devices without it."""
    if options.activation_dtype == "fp8" and device == "cpu":
        raise UserError(
            "activation_dtype fp8 runs only on GPUs, but the device is cpu: set device to cuda, or leave "
            "activation_dtype out"
        )
    setting = "activation_dtype" if options.activation_dtype == "fp8" else "kv_dtype" if kv_dtype == "fp8" else None
    least = places.least_capability
    if device == "cpu" or setting is None or least is None or least >= _FLOAT8_CAPABILITY:
        return
    needed, found = (".".join(map(str, each)) for each in (_FLOAT8_CAPABILITY, least))
    raise UserError(
        f"{setting} fp8 needs GPUs of compute capability {needed} or later, but a rank has one of {found}: leave "
        f"{setting} out"
    )


def _warn_of_weights(spec: ModelSpec, layout: Layout, device: str, weight_dtype: str) -> None:
    """Warn if packed weights take more memory or time than their format makes users expect."""
    mixed = mixed_weight(spec)
    if mixed is not None:
        names = " and ".join(source.module for source in mixed.sources)
        if mixed.in_experts and mixed.storage is None:
            reason = "experts with act-order. Their rows would need an order for each expert"
        elif mixed.in_experts:
            reason = "and the other weights of these experts in different formats. Experts need one"
        else:
            reason = "in different formats. longhelix multiplies them together"
        warnings.warn(
            f"the checkpoint stores {names} {reason}, so weights such as these become {mixed.format(weight_dtype)} in "
            "memory: use another checkpoint to save memory",
            stacklevel=4,
        )
    quantisation = spec.checkpoint.quantisation
    if quantisation is not None and quantisation.gguf and quantisation.plain.names:
        warnings.warn(
            "the GGUF file has experts of one layer in different formats, such as "
            f"{min(quantisation.plain.names)}, so all experts of such layers become "
            f"{weight_dtype} in memory: use a file with K-quants alone",
            stacklevel=4,
        )
    slow = slow_weight(spec, layout, weight_dtype) if device == "cpu" and has_native_kernels() else None
    if slow is not None:
        rank, parameter = slow
        inputs = parameter.sources[0].slices[1]
        if parameter.rounds_inputs or parameter.format(weight_dtype) == "w8a8":
            raise UserError(
                "activation_dtype int8 needs weights with a multiple of 16 inputs on each rank, but rank "
                f"{rank} has {len(inputs)} of {parameter.sources[0].module}: choose another layout, or leave "
                "activation_dtype out"
            )
        warnings.warn(
            f"rank {rank} has the inputs {inputs.start} to {inputs.stop - 1} of {parameter.sources[0].module}, but the "
            "native CPU kernels read packed weights only in sixteens of inputs. Products with this weight run many "
            "times slower: choose a layout that splits it elsewhere, if there is one",
            stacklevel=4,
        )


def _check_flashinfer(spec: ModelSpec, options: EngineOptions, device: str, replay: bool) -> None:
    if device == "cpu" or not replay:
        raise UserError(
            "attention flashinfer runs only inside CUDA graphs: run on GPUs without execution eager and without trace, "
            "or leave attention out"
        )
    if spec.has_latents:
        raise UserError("attention flashinfer does not support latent attention: leave the option out")
    if any(isinstance(each, GroupedQueryAttention) and each.scores.cap is not None for each in spec.attentions):
        raise UserError("attention flashinfer does not support scores with a cap: leave the option out")
    if spec.views:
        raise UserError(
            "attention flashinfer does not support layers whose rows see only some tokens: leave the option out"
        )
    if len(spec.attentions) > 1:
        raise UserError("attention flashinfer does not support layers with different attention: leave the option out")
    if options.hop_b not in (None, 1):
        raise UserError(
            f"hop_b is {options.hop_b}, but attention flashinfer cannot split a batch into parts: leave one of them out"
        )


def scheduler_config(options: EngineOptions, layout: Layout, max_model_len: int, setting: Setting) -> SchedulerConfig:
    """Return the scheduler's settings, except for the size of its pools.

    setting: the model and the machine. The performance model uses them to distinguish short requests from long ones.
    """
    threshold_tokens = options.kvp_threshold_tokens
    placement = options.placement or ("striped" if threshold_tokens is None else "auto")
    if placement == "auto" and threshold_tokens is None:
        threshold_tokens = local_threshold_tokens(setting, layout, max_model_len)
    elif placement != "auto" and threshold_tokens is not None:
        raise UserError(
            f"kvp_threshold works only with placement auto, but placement is {placement}: set placement to auto, or "
            "leave one of them out"
        )
    return SchedulerConfig(
        kvp=layout.kvp,
        num_blocks=1,
        max_model_len=max_model_len,
        block_tokens=options.block_tokens,
        steps=StepConfig(
            chunk_tokens=MOST_CHUNK_TOKENS if options.chunk_tokens == "auto" else options.chunk_tokens,
            adaptive=options.chunk_tokens == "auto",
            max_running=options.max_running,
            pp=layout.pp,
            # With striped placement, every request uses all instances, so no instance can run a step alone.
            own_clocks=layout.ffn_replicas > 1 and layout.pp == 1 and placement != "striped",
        ),
        placement=PlacementConfig(
            name=placement,
            growth_limit_tokens=None if options.growth_limit_tokens == "auto" else options.growth_limit_tokens,
            kvp_threshold_tokens=threshold_tokens or 0,
            batch_invariant=options.batch_invariant,
        ),
        service=ServiceConfig(
            policy=options.policy,
            tbt_target_s=options.tbt_target_s,
            slo_scale=options.slo_scale,
            client_weights=options.client_weights or {},
        ),
        cache=CacheConfig(
            prefix_cache=options.prefix_cache,
            swap_blocks=-(-options.swap_tokens // (options.block_tokens * layout.kvp)),
        ),
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


def _spec(checkpoint: SafetensorsCheckpoint | GgufCheckpoint, rope_scaling: Mapping[str, Any] | None) -> ModelSpec:
    tensors = {name: (info.shape, info.dtype) for name, info in checkpoint.tensors.items()}
    if isinstance(checkpoint, GgufCheckpoint):
        spec = checkpoint.spec(rope_scaling)
        _check_runs(spec)
    else:
        spec = read_hf_config(checkpoint.config, checkpoint.generation_config, rope_scaling=rope_scaling)
        _check_runs(spec)
        spec = _with_own_head(spec, checkpoint)
        _warn_of_unread(checkpoint.config)
    spec = with_stored_formats(spec, checkpoint.tensors)
    check(spec, tensors, gguf=isinstance(checkpoint, GgufCheckpoint))
    return spec


def _with_own_head(spec: ModelSpec, checkpoint: SafetensorsCheckpoint | VisionLanguageCheckpoint) -> ModelSpec:
    """Use the checkpoint's own head if it differs from the embedding, even if the config ties head and embedding.

    transformers does the same.
    """
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    if not spec.vocabulary.tied_embeddings or embedding not in checkpoint.tensors:
        return spec
    if head not in checkpoint.tensors:
        quantisation = spec.checkpoint.quantisation
        packed = () if quantisation is None or quantisation.storage_of("lm_head") is None else checkpoint.tensors
        head = min((name for name in packed if name.startswith("lm_head.")), default="")
    if not head or checkpoint.holds_same(embedding, head):
        return spec
    warnings.warn(
        f"the model's config ties its head to its embedding, but the checkpoint has a different {head}, which the "
        "engine uses: set tie_word_embeddings to false in config.json, or remove the tensor",
        stacklevel=5,
    )
    return replace(spec, vocabulary=replace(spec.vocabulary, tied_embeddings=False))


def _check_runs(spec: ModelSpec) -> None:
    missing = missing_parts(spec)
    if missing:
        raise UserError(
            f"longhelix cannot run this {spec.architecture} model, because these parts are not implemented: "
            f"{', '.join(missing)}. `longhelix plan` can plan for it",
            "unsupported_model",
        )
    if any(moe.shared_bias for moe in spec.moes):
        raise UserError("mlp_bias with experts is not supported: set mlp_bias to false in the model's config")


def _warn_of_unread(config: Mapping[str, Any]) -> None:
    unread = unread_fields(config)
    if unread:
        warnings.warn(
            f"config.json has fields that neither longhelix nor transformers reads: {', '.join(unread)}. If the "
            "model's own code reads them, answers may differ from its answers",
            stacklevel=4,
        )


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
