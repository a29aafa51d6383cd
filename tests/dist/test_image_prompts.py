"""Images from files and from Pillow, as users give them: results, prefix cache, refusals, the command line."""

import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import PIL.Image
import pytest
from safetensors.torch import load_file, save_file
from shown import END, IMAGE, NEW_TOKENS, START, VISION_LANGUAGE, draw, make_shown_oracle

from longhelix import LLM, EngineError, ImagePrompt, Layout, SamplingParams, UserError
from longhelix.cli.main import main
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine import images as engine_images
from longhelix.engine.vision import patches as patches_module
from longhelix.engine.vision.tower import Tower
from longhelix.spec import read_hf_config
from oracle import save_tokenizer_files
from toy_model import attention_of

pytestmark = pytest.mark.dist

GREEDY = SamplingParams(NEW_TOKENS)
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}w192 w190 w193 {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    made = make_shown_oracle(VISION_LANGUAGE["qwen3_vl"], tmp_path_factory.mktemp("qwen3_vl"))
    save_tokenizer_files(made.path)
    (made.path / "chat_template.jinja").write_text(TEMPLATE)
    return made


@pytest.fixture(scope="module")
def llm(oracle):
    with LLM(str(oracle.path), Layout(kvp=2), block_tokens=4, chunk_tokens=7, kv_cache_tokens=512) as started:
        yield started


def prompt_of(oracle, index):
    given, shown = oracle.given[index], oracle.shown[index]
    return ImagePrompt(given, [oracle.images[name] for name in shown]) if shown else given


def test_results_equal_transformers(llm, oracle):
    results = llm.generate([prompt_of(oracle, index) for index in range(len(oracle.prompts))], GREEDY)
    assert [result.token_ids for result in results] == oracle.tokens
    assert [result.prompt_tokens for result in results] == list(map(len, oracle.prompts))


@pytest.mark.parametrize("layout", [Layout(pp=3), Layout(kvp=2, pp=2), Layout(tpa=2)], ids=["3 stages", "2x2", "tpa"])
def test_ranks_that_need_images_have_them(oracle, layout):
    """Of three layers two get rows of the tower's: with three stages the last one has none of these."""
    with LLM(str(oracle.path), layout, block_tokens=4, chunk_tokens=7) as llm:
        assert llm.config.image_ranks == tuple(range(2 if layout.pp == 3 else layout.world_size))
        results = llm.generate([prompt_of(oracle, index) for index in range(len(oracle.prompts))], GREEDY)
    assert [result.token_ids for result in results] == oracle.tokens


def test_instances_with_clocks_of_their_own(oracle):
    """Of which those that join a prompt later have its images as well."""
    layout = Layout(kvp=3, tpa=1, ffn_replicas=3)
    settings = {"block_tokens": 4, "chunk_tokens": 7, "placement": "growing", "growth_limit_tokens": 8}
    with LLM(str(oracle.path), layout, prefix_cache=False, **settings) as llm:
        assert llm.config.scheduler.steps.own_clocks
        results = llm.generate([prompt_of(oracle, index) for index in range(len(oracle.prompts))], GREEDY)
    assert [result.token_ids for result in results] == oracle.tokens


def test_a_prompt_is_cached_with_its_images(oracle):
    """The same one again, the same tokens with another image, and text alike up to an image that is another."""
    text = list(range(10))
    drawn = {"first": draw(3, 2, 7), "other": draw(3, 2, 8)}

    def ask(llm, *images):
        prompt = text + [START, IMAGE, END] * len(images) + [5, 6, 7]
        (result,) = llm.generate(ImagePrompt(prompt, [drawn[name] for name in images]), GREEDY)
        return result

    shown = (("first",), ("other",), ("first", "other"), ("first", "first"))
    with LLM(str(oracle.path), block_tokens=4, prefix_cache=False) as llm:
        alone = {images: ask(llm, *images).token_ids for images in shown}
    with LLM(str(oracle.path), block_tokens=4, kv_cache_tokens=512) as llm:
        # Of another image two blocks of text: the third has the image's first token.
        repeated = (shown[0], shown[0], shown[1], shown[1], *shown[2:], shown[2])
        for images, cached in zip(repeated, (0, 20, 8, 20, 16, 16, 28), strict=True):
            result = ask(llm, *images)
            assert (result.cached_tokens, result.token_ids) == (cached, alone[images])
        assert len(set(map(tuple, alone.values()))) == 4


def test_ranks_get_the_rows_of_each_step_with_it(llm, monkeypatch):
    """And nothing of requests that wait, or of what is cached."""
    told, pool = [], llm._core._pool

    def listen(name, real):
        monkeypatch.setattr(pool, name, lambda *given: (told.append((name, given[-1])), real(*given)))

    listen("show", pool.show)
    listen("submit", pool.submit)
    prompt = ImagePrompt([1, START, IMAGE, END, START, IMAGE, END, 2], [draw(2, 2, 11), draw(3, 2, 12)])
    row_bytes, places = 3 * 90 * 4, [2, 3, 4, 5, *range(8, 14)]  # float32
    for expected in (places, []):
        request = llm.add(prompt, GREEDY)
        assert not told
        assert llm.image_bytes == (4 + 6) * row_bytes
        while llm.has_work:
            llm.step()
        assert llm.image_bytes == 0
        found = []
        for (name, message), (_, behind) in pairwise([*told, (None, None)]):
            if name == "show":
                found += range(message.start, message.start + len(message.states) // row_bytes)
                if not isinstance(behind, type(message)):
                    assert request in {chunk.id for chunk in behind.chunks}
        assert found == expected
        told.clear()


def test_images_come_first_where_a_prompt_has_no_place_for_them(llm, oracle):
    images = [oracle.images["b"], oracle.images["c"]]
    placed = [START, IMAGE, END] * 2 + [8, 9]
    expected, found, of_text = llm.generate(
        [ImagePrompt(placed, images), ImagePrompt([8, 9], images), ImagePrompt("w8 w9", images)], GREEDY
    )
    assert found.token_ids == of_text.token_ids == expected.token_ids


def test_a_file_is_the_image_that_it_holds(llm, oracle, tmp_path):
    """Turned as its EXIF says, and without its transparency."""
    image, path = oracle.images["a"], tmp_path / "turned.png"
    exif = PIL.Image.Exif()
    exif[0x0112] = 6  # is to be turned by a quarter, clockwise
    image.rotate(90, expand=True).convert("RGBA").save(path, exif=exif)
    (result,) = llm.generate(ImagePrompt(oracle.given[0], [path]), GREEDY)
    assert result.token_ids == oracle.tokens[0]


def refusals(tmp_path):
    names = ("text.png", "cut.png", "narrow.png", "large.png", "larger.png")
    text, cut, narrow, large, larger = (tmp_path / name for name in names)
    text.write_text("no image")
    draw(4, 4, 0).save(cut)
    cut.write_bytes(cut.read_bytes()[:2000])
    PIL.Image.new("RGB", (1000, 2)).save(narrow)
    PIL.Image.new("1", (14_000, 10_000)).save(large)
    PIL.Image.new("1", (20_000, 10_000)).save(larger)
    return [
        (text, "cannot be read as an image"),
        (cut, "cannot be read as an image"),
        (narrow, "aspect ratio"),
        (large, "has more than 134217728 pixels: give a smaller image"),
        (larger, "has more than 134217728 pixels: give a smaller image"),
        (tmp_path / "none.png", "there is no image"),
        (tmp_path, "cannot be read as an image"),
        (7, "an image is 7: give the path of a file, its bytes, or a Pillow image"),
    ]


def test_what_is_no_image_is_refused_in_words(llm, tmp_path):
    for image, words in refusals(tmp_path):
        with pytest.raises(UserError, match=words) as refusal:
            llm.generate(ImagePrompt([1], [image]), GREEDY)
        assert refusal.value.code == "invalid_image"


def test_prompts_that_cannot_be_are_refused_in_words(llm, oracle):
    image = oracle.images["a"]
    wide = PIL.Image.new("RGB", (8 * 8, 8 * 8))  # 64 tokens, and all positions are twice as many
    for prompt, more, words in (
        (ImagePrompt([1, IMAGE], [image, image]), {}, "has 1 image placeholders, but 2 images"),
        (ImagePrompt([1], []), {}, "images is .*: set it to a list of 1 to"),
        (ImagePrompt([1], image), {}, "images is .*: set it to a list of 1 to"),
        ([1, IMAGE, 2], {}, r"1 image tokens \(id 190\), but its images need 0"),
        ("w1 w190", {}, r"1 image tokens \(id 190\), but its images need 0"),
        (ImagePrompt([1], [wide, wide]), {}, r"has 133 tokens with the first 2 of its 2 images, but .* is 128"),
        (ImagePrompt([1], [image]), {"context": "it"}, "cannot be combined with images"),
    ):
        with pytest.raises(UserError, match=words):
            llm.generate(prompt, GREEDY, **more)
    with pytest.raises(UserError, match="a saved context holds text only"):
        llm.save_context("it", ImagePrompt([1], [image]))
    assert not llm._core._loop.scheduler.num_waiting
    assert llm.image_bytes == 0


def test_a_prompt_that_is_too_long_is_refused_before_an_image_is_read(llm, tmp_path, monkeypatch):
    """After the first image that is too much: what comes behind it is not even opened."""
    path = tmp_path / "wide.jpg"
    PIL.Image.new("RGB", (8 * 8, 8 * 8)).save(path)
    monkeypatch.setattr(patches_module.Patcher, "patches", None)
    with pytest.raises(UserError, match="has 135 tokens with the first 2 of its 3 images") as refusal:
        llm.generate(ImagePrompt([1], [path, path, tmp_path / "none.png"]), GREEDY)
    assert refusal.value.code == "context_length_exceeded"


def test_patches_are_cut_where_ranks_need_them(llm, monkeypatch):
    """Once for an image, however often it is shown, and not while the tower has what came out."""
    cut, images = [], [draw(3, 1, 13), draw(1, 3, 14)]
    monkeypatch.setattr(patches_module.Patcher, "_cut", lambda *given, kept=patches_module.Patcher._cut: (
        cut.append(given), kept(*given))[1])  # fmt: skip
    llm.generate([ImagePrompt([1], images * 2)] * 2, GREEDY)
    llm.generate(ImagePrompt([2], images), GREEDY)
    assert len(cut) == 2


def test_states_of_another_shape_than_the_decoder_takes_are_refused(oracle):
    checkpoint = open_checkpoint(str(oracle.path))
    patches = patches_module.Patcher(oracle.path).patches(oracle.images["a"])
    spec = read_hf_config(checkpoint.config)
    for other in (
        replace(spec, hidden_size=45),
        replace(spec, vision=replace(spec.vision, num_deepstack=1)),
    ):
        with pytest.raises(UserError, match="states have a different shape from the decoder") as refusal:
            Tower(checkpoint, other, "float32", 2**20).states(patches)
        assert refusal.value.code == "invalid_checkpoint"


def test_an_image_whose_tower_fails_ends_its_request_alone(llm, oracle, monkeypatch):
    def fail(tower, patches):
        raise MemoryError("too much")

    prompt = ImagePrompt([1], [draw(2, 3, 12)])
    monkeypatch.setattr(engine_images.Tower, "_run", fail)
    with pytest.raises(MemoryError):
        llm.generate(prompt, GREEDY)
    monkeypatch.undo()
    assert not llm._core._loop.scheduler.num_waiting
    assert len(llm.generate(prompt, GREEDY)) == 1


def test_a_rank_that_is_gone_is_named_while_images_are_shown(oracle):
    """And what is then aborted says nothing else."""
    with LLM(str(oracle.path), block_tokens=4) as llm:
        stream = llm.stream(ImagePrompt([1], [oracle.images["a"]]), SamplingParams(100))
        next(stream)
        os.kill(llm.process_ids[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="rank 0"):
            llm.generate([ImagePrompt([1], [oracle.images["b"]])] * 2, SamplingParams(100))
        stream.close()


def damage(folder, oracle):
    """Copies of the model whose towers cannot be, each with what is said of it."""
    lacking, narrow, coarse, unscaled = (folder / name for name in ("lacking", "narrow", "coarse", "unscaled"))
    for copy in (lacking, narrow, coarse, unscaled):
        shutil.copytree(oracle.path, copy)
    tensors = load_file(lacking / "model.safetensors")
    del tensors["model.visual.merger.norm.bias"]
    save_file(tensors, lacking / "model.safetensors")
    config = json.loads((narrow / "config.json").read_text())
    config["vision_config"]["intermediate_size"] -= 1
    (narrow / "config.json").write_text(json.dumps(config))
    scaled = json.loads((coarse / "preprocessor_config.json").read_text())
    (coarse / "preprocessor_config.json").write_text(json.dumps(scaled | {"patch_size": 8, "merge_size": 1}))
    (unscaled / "preprocessor_config.json").unlink()
    return (
        (lacking, "differ in 1 tensors, such as 'merger.norm.bias'"),
        (narrow, "cannot be created from the model's config"),
        (coarse, "makes patches that do not fit"),
        (unscaled, "has no preprocessor_config.json or processor_config.json, but images need"),
    )


def test_a_damaged_tower_is_refused_when_an_image_comes(oracle, tmp_path):
    """And text is answered all the same."""
    for path, words in damage(tmp_path, oracle):
        with LLM(str(path), block_tokens=4) as llm:
            with pytest.raises(UserError, match=words) as refusal:
                llm.generate(prompt_of(oracle, 0), GREEDY)
            assert (refusal.value.code, len(str(refusal.value)) < 300) == ("invalid_checkpoint", True)
            assert llm.generate(oracle.prompts[1], GREEDY)[0].token_ids == oracle.tokens[1]


def test_missing_packages_are_named(llm, monkeypatch, oracle):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UserError, match=r"pip install 'longhelix\[vl\]'"):
        patches_module.Patcher(oracle.path)


def test_models_of_text_read_no_images(oracle):
    with LLM("builtin", max_model_len=64) as llm, pytest.raises(UserError, match="llama models do not take images"):
        llm.generate(ImagePrompt("w1", [oracle.images["a"]]), GREEDY)


def test_other_rope_settings_leave_pairs_their_axes(oracle):
    with LLM(str(oracle.path), rope_scaling={"rope_type": "linear", "factor": 2.0}, block_tokens=4) as llm:
        assert (attention_of(llm.config.spec).rope.scaling.kind, attention_of(llm.config.spec).rope.sections) == (
            "linear",
            (4, 3, 1),
        )
        (result,) = llm.generate(prompt_of(oracle, 0), GREEDY)
    assert result.token_ids != oracle.tokens[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_activations(oracle, dtype):
    with LLM(str(oracle.path), Layout(kvp=2), dtype=dtype, block_tokens=4) as llm:
        (result,) = llm.generate(prompt_of(oracle, 0), GREEDY)
    assert len(result.token_ids) == NEW_TOKENS


def test_the_command_line_shows_images(capfd, oracle, tmp_path):
    for name in "ab":
        oracle.images[name].save(tmp_path / f"{name}.png")
    shared = ["generate", "--model", oracle.path, "--max-new-tokens", NEW_TOKENS, "--json", "--prompt"]
    images = ["--image", tmp_path / "b.png", "--image", tmp_path / "a.png"]
    answers = []
    for arguments in (
        ["w5 w6", *images],
        ["w5 w6", "--chat", *images],
        ["w192 w190 w193 w192 w190 w193 w5 w6", *images],
    ):
        assert main([str(argument) for argument in [*shared, *arguments]]) == 0
        answers.append(json.loads(capfd.readouterr().out))
    assert answers[0]["token_ids"] == answers[1]["token_ids"] == answers[2]["token_ids"]
    assert answers[0]["prompt_tokens"] == 8 + 15 + 4 + 2
    for image, words in refusals(tmp_path)[:5]:
        assert main([str(argument) for argument in [*shared, "w5", "--image", image]]) == 2
        error = json.loads(capfd.readouterr().out)["error"]
        assert error["code"] == "invalid_image"
        assert words in error["message"]


def test_an_image_that_ranks_cannot_take_costs_others_nothing_while_its_request_waits(oracle, tmp_path, monkeypatch):
    """It waits behind one that runs, which goes on; when it begins, it fails alone."""
    fault_file = tmp_path / "fault"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "failpoints"))
    monkeypatch.setenv("FAULT_FILE", str(fault_file))
    fault_file.write_text(json.dumps({"rank": 1, "point": "image", "action": "out of memory", "always": True}))
    with LLM(str(oracle.path), Layout(kvp=2), block_tokens=4, kv_cache_tokens=512, max_running=1) as llm:
        good = llm.add([1, 2, 3], SamplingParams(60, ignore_eos=True))
        for _ in range(5):
            llm.step()
        bad = llm.add(prompt_of(oracle, 0), GREEDY)
        results, failures = {}, []
        while len(results) < 2 and len(failures) < 5:
            try:
                results |= {delta.request_id: delta.result for delta in llm.step() if delta.result is not None}
            except EngineError:
                failures.append(set(results))
                llm.restart()
    assert failures == [{good}] * 2
    assert (results[bad].finish_reason, len(results[good].token_ids)) == ("error", 60)
