"""torch.compile's graphs of a rank's layers: all of them are there before the first request."""

import dataclasses
from array import array

import numpy as np
import pytest
import shown
from msgspec import structs
from test_llm import needs_compiler
from torch._dynamo.utils import counters

from longhelix.compute.models.model_files import open_checkpoint
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.rank import load_model, new_pool, new_runner
from longhelix.compute.runner.token_ranges import TokenRanges
from longhelix.compute.runner.warm_up import warm_up
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.engine.shown_images import ShownImage, ShownImages
from longhelix.scheduler.request import ImageSpan, Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.spec.layout import Layout

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800), needs_compiler]

IMAGE = ImageSpan(0, 3, 5, b"of fifteen tokens")
LENGTHS = (1, 2, 3, 5, 8, 9, 12, 20, 31, 32, 33, 50)


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("seed", range(2))
def test_no_request_compiles(tmp_path, seed):
    """Prompts of many lengths, some with an image, that come and go together."""
    shown.save_model(shown.PACKED, tmp_path)
    options = EngineOptions(
        device="cpu", dtype="float32", execution="compiled", kv_cache_tokens=1024, chunk_tokens=32, max_running=6
    )
    config = resolve(open_checkpoint(str(tmp_path)), Layout(), options)
    config = dataclasses.replace(
        config, execution=dataclasses.replace(config.execution, token_ranges=TokenRanges((9, 34)))
    )
    model = load_model(config, Mesh.build(config.layout, 0))
    runner = new_runner(config, model.mesh, model, new_pool(config, 0, config.scheduler.num_blocks))
    before = graphs()
    warm_up(config, runner, lambda share: None)
    warmed = graphs()
    assert warmed > before
    assert not runner._image_rows

    chance = np.random.default_rng(seed)
    states = chance.standard_normal((3, IMAGE.num_tokens, config.spec.hidden_size), np.float32)
    images_of = ShownImages(len(states), 2**20)
    scheduler, met = Scheduler(config.scheduler), set()
    for turn in range(150):
        for number in range(chance.integers(3) if turn < 120 else 0):
            length = int(chance.choice(LENGTHS))
            images = (structs.replace(IMAGE, start=length // 2),) if chance.random() < 0.4 else ()
            ids = array("i", [1] * length)
            for image in images:
                ids[image.start : image.start] = array("i", [shown.IMAGE] * image.num_tokens)
            sampling = SamplingParams(max_new_tokens=int(chance.integers(1, 9)))
            scheduler.add(Request(3 * turn + number, ids, sampling, frozenset(), 0, 0.0, images=images))
            images_of.add(3 * turn + number, [ShownImage(image, states.tobytes) for image in images])
        step = scheduler.schedule(0.0)
        if step is None:
            continue
        for rows in images_of.rows(step):
            runner.take_image_rows(rows.id, rows.start, rows.states)
        scheduler.complete(runner.execute(step))
        met.add((config.execution.token_ranges.range_of(step.work.rows), bool(step.work.chunk_rows)))
        rows = [chunk.num_tokens for chunk in step.chunks]
        assert graphs() == warmed, f"chunks of {rows} tokens beside {len(runner.running.decoding)} decodes"
    assert len(met) >= 4
