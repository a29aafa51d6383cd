"""Toy models straight from tensors, run by the engine's own scheduler and runner on every rank of a world."""

import msgspec
import torch
import torch.distributed as dist

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import KVFormat, native
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.parameters import declare
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.execution import Execution
from longhelix.compute.runner.rank import meet, rank_capabilities
from longhelix.compute.runner.runner import ModelRunner
from longhelix.spec.layout import Layout

BLOCK_TOKENS = 16
CPU = torch.device("cpu")


def join(started, size):
    """This rank's place in a world that shares its KV over all ranks, by shared memory."""
    native.set_num_threads(1)
    if size > 1:
        meet(size, started.rank, started.directory)
    mesh = Mesh.build(Layout(kvp=size), started.rank)
    assert size == 1 or dist.get_backend(mesh.kvp._handle) == "shm"
    return mesh


def make_runner(spec, mesh, tensors, kv_dtype, num_blocks):
    """What was never written to the pool is NaN, or has a scale that is."""
    weights = Weights(tensors, declare(spec, mesh.layout, mesh.rank), torch.float32, "float32", CPU)
    (attention,) = spec.attentions
    heads, size = len(mesh.layout.kv_heads(attention.heads, mesh.rank)), attention.head_size
    format = KVFormat.choose(kv_dtype, BLOCK_TOKENS, heads, size, size, CPU)
    pool = KVPool([{"kv": format}] * spec.num_layers, num_blocks, CPU)
    for layer in pool.entries():
        layer.values.view(torch.uint8).fill_(255)
    model = Decoder(spec, mesh, weights)
    execution = Execution.resolve(
        compile=False, replay=True, whole_batches=False, capabilities=rank_capabilities(mesh, model, pool)
    )
    return ModelRunner(spec, mesh, model, pool, execution)


class AtOnce:
    """A runner of the scheduler's loop that computes a step when it is submitted, for a scheduler on every rank."""

    def __init__(self, runner):
        self._runner = runner
        self._results = []

    def submit(self, step):
        result = self._runner.execute(step)
        self._results.append(
            msgspec.structs.replace(result, sampled=result.sampled or self._runner.next_tokens.last_sampled(step))
        )

    def collect(self, timeout_s):
        return self._results.pop(0)
