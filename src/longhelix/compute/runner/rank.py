"""Builds a rank from the configuration: its mesh, model, KV pool and runner."""

import os
import socket
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.cache.swap_space import SwapSpace
from longhelix.compute.kernels import PANELS, KVFormat, flashinfer, native
from longhelix.compute.kernels.flashinfer import PageLists
from longhelix.compute.machine import host
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.compute.models.parameters import declare
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.execution import Execution, RankCapabilities
from longhelix.compute.runner.meeting import Meeting
from longhelix.compute.runner.runner import ModelRunner
from longhelix.errors import UserError
from longhelix.spans import UNTRACED, Spans
from longhelix.spec.attention import GroupedQueryAttention
from longhelix.spec.layer import Attention

# Pieces are small compared to the memory that pools leave free, because ranks that are done do not count any longer.
_PARTS_OF_LAYER = 8


def join(config: EngineConfig, rank: int, directory: Path, spans: Spans = UNTRACED) -> Mesh:
    """Connect to the other ranks through a common directory, and make the groups of the layout."""
    native.set_num_threads(config.machines.threads_of(rank))
    device = device_of(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if config.layout.world_size > 1 and not dist.is_initialized():
        meet(config.layout.world_size, rank, directory, "nccl" if device.type == "cuda" else "gloo")
    return Mesh.build(config.layout, rank, spans=spans, hosts=config.machines.hosts)


def meet(world_size: int, rank: int, directory: Path, backend: str = "gloo", interface: str = "lo") -> None:
    """Connect all ranks of this host. Nothing listens on the network, unless `interface` is part of it."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface
    dist.init_process_group(backend, init_method=f"file://{directory / 'rendezvous'}", rank=rank, world_size=world_size)


def meet_at(config: EngineConfig, rank: int, meeting: Meeting, on_port: Callable[[int], None]) -> None:
    """Connect the ranks of several hosts.

    torch's store, gloo and NCCL use the network without authentication or encryption.

    Args:
        on_port: Called on rank 0 with the port on which it waits for the other ranks.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = meeting.interface
    os.environ["NCCL_SOCKET_IFNAME"] = f"={meeting.interface}"  # otherwise eth1 would mean eth10 too
    if rank == 0:
        opened = socket.create_server((meeting.address, 0))
        port = opened.getsockname()[1]
        store = dist.TCPStore(
            meeting.address, port, is_master=True, wait_for_workers=False, master_listen_fd=opened.detach()
        )
        on_port(port)
    else:
        store = dist.TCPStore(meeting.address, meeting.port, is_master=False, wait_for_workers=False)
    backend = "nccl" if config.machines.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=config.layout.world_size)


def load_model(
    config: EngineConfig,
    mesh: Mesh,
    progress: Callable[[int], None] = lambda elements: None,
    spans: Spans = UNTRACED,
) -> Decoder:
    """Load this rank's shard of the model.

    Args:
        progress: Called with numbers of loaded elements.
        spans: Records what layers do, except in compiled graphs.
    """
    weights = Weights(
        open_checkpoint(config.model_path),
        declare(config.spec, config.layout, mesh.rank),
        dtype=getattr(torch, config.formats.dtype),
        weight_dtype=config.formats.product_dtype,
        device=device_of(config, mesh.rank),
        progress=progress,
    )
    return Decoder(config.spec, mesh, weights, UNTRACED if config.execution.compile else spans)


def new_pool(config: EngineConfig, rank: int, num_blocks: int) -> KVPool:
    """Allocate this rank's pool of `num_blocks` KV blocks. Raises UserError if memory is no longer free."""
    spec, device = config.spec, device_of(config, rank)
    layers, windows = config.layout.layers(spec.num_layers, rank), config.scheduler.cache.windows
    formats = [_formats(config, rank, spec.layers[layer].attention) for layer in layers]
    groups = [spec.groups[layer] for layer in layers] if windows else ()
    window_blocks = [window.num_blocks for window in windows]
    pool = KVPool(formats, num_blocks, device, groups=groups, window_blocks=window_blocks)
    if device.type == "cpu":
        hosts = config.machines.hosts
        _take_memory(pool, len(hosts.ranks[hosts.node_of(rank)]))
    return pool


def _formats(config: EngineConfig, rank: int, attention: Attention) -> dict[str, KVFormat]:
    """Return the formats of the cache entries of a layer with this attention, by name."""
    entry = attention.cache_entry
    format = KVFormat.choose(
        dtype=config.formats.kv_dtype,
        block_tokens=config.scheduler.block_tokens,
        num_kv_heads=len(config.layout.kv_heads(attention.heads, rank)),
        key_size=entry.key_size,
        value_size=entry.value_size,
        device=device_of(config, rank),
        shared_values=entry.shared_values,
        rounded=config.formats.attention_dtype is not None,
    )
    return {entry.name: format}


def _take_memory(pool: KVPool, sharers: int) -> None:
    """Write to the whole pool piece by piece, because the system may have promised the memory to other engines too.

    `sharers` ranks do so at the same time.
    """
    left_bytes = pool.num_bytes
    for piece in chain.from_iterable(
        tensor.view(-1).chunk(_PARTS_OF_LAYER) for entry in pool.entries() for tensor in entry.tensors
    ):
        free_bytes = host.available_bytes()
        if free_bytes < sharers * piece.nbytes:
            raise UserError(
                f"the KV cache needs {left_bytes} more bytes on a rank, but {free_bytes} bytes are free for {sharers} "
                "ranks: other processes have taken memory since the engine started; end some of them, or lower "
                "--kv-cache-tokens or --max-model-len",
                "out_of_memory",
            )
        piece.zero_()
        left_bytes -= piece.nbytes


def new_runner(config: EngineConfig, mesh: Mesh, model: Decoder, pool: KVPool, spans: Spans = UNTRACED) -> ModelRunner:
    """Make the runner of this rank. Raises UserError if there is no room for swapped KV blocks."""
    settings = config.execution
    execution = Execution.resolve(
        compile=settings.compile,
        replay=settings.replay,
        whole_batches=settings.attention == "flashinfer",
        capabilities=rank_capabilities(mesh, model, pool),
        token_ranges=settings.token_ranges,
    )
    page_lists, scheduler = new_page_lists(config, mesh.rank, pool), config.scheduler
    num_slots = [scheduler.cache.swap_blocks, *(window.num_slots for window in scheduler.cache.windows)]
    swap_space = SwapSpace(pool, num_slots) if scheduler.cache.swap_blocks else None
    return ModelRunner(
        spec=config.spec,
        mesh=mesh,
        model=model,
        pool=pool,
        execution=execution,
        page_lists=page_lists,
        spans=spans,
        swap_space=swap_space,
    )


def rank_capabilities(mesh: Mesh, model: Decoder, pool: KVPool) -> RankCapabilities:
    """Return what this rank can do, for `Execution.resolve`."""
    return RankCapabilities(
        device=pool.device.type,
        native=native.module is not None,
        overlaps=mesh.kvp.overlaps,
        sums_in_rank_order=mesh.stage.sums_in_rank_order and mesh.kvp.sums_in_rank_order,
        packed=pool.device.type == "cuda"
        or (pool.packed and all(weight.arrangement is PANELS for weight in model.products())),
    )


def new_page_lists(config: EngineConfig, rank: int, pool: KVPool) -> PageLists | None:
    """Return page lists for FlashInfer, if the engine uses it. Raises UserError if it cannot read this pool."""
    if config.execution.attention != "flashinfer":
        return None
    (attention,) = config.spec.attentions
    num_query_heads = len(config.layout.query_heads(attention.heads, rank))
    if not num_query_heads:
        return None
    (format,) = pool.formats
    flashinfer.check(format, config.formats.dtype)
    assert isinstance(attention, GroupedQueryAttention), "FlashInfer takes no pool of latents"
    return PageLists(format, num_query_heads, attention.scale, getattr(torch, config.formats.dtype))


def device_of(config: EngineConfig, rank: int) -> torch.device:
    """Return the CPU, or the GPU of the rank on its host."""
    machines = config.machines
    return torch.device("cuda", machines.hosts.local_rank(rank)) if machines.device == "cuda" else torch.device("cpu")
