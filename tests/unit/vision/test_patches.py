"""Images as patches: their size before any pixel is read, files of 16 bits, files that end early, settings."""

import gc
import json
import warnings

import numpy as np
import PIL.Image
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from longhelix.errors import UserError
from longhelix.vision.patches import Patcher

pytestmark = pytest.mark.unit

PROCESSOR = Qwen2VLImageProcessorPil(
    patch_size=4, image_mean=[0.5] * 3, image_std=[0.5] * 3, size={"shortest_edge": 64, "longest_edge": 4096}
)
TURNED = PIL.Image.Exif()
TURNED[0x0112] = 6  # is to be turned by a quarter, clockwise
RAMP_HW = np.tile(np.arange(64, dtype=np.uint16) * 4, (48, 1))


@pytest.fixture(scope="module")
def patcher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    PROCESSOR.save_pretrained(folder)
    return Patcher(folder)


def draw(width, height, seed=0):
    pixels_HWC = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels_HWC)


@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_size_alone_gives_the_grid(patcher, width, height):
    if max(width, height) > 200 * min(width, height):
        return
    image = draw(width, height)
    wanted = PROCESSOR(images=[image], return_tensors="np")
    found = patcher.patches(image)
    assert [1, 2 * found.rows, 2 * found.columns] == wanted["image_grid_thw"][0].tolist()
    assert patcher.num_tokens(image) == found.num_tokens
    np.testing.assert_array_equal(found.cut(), wanted["pixel_values"])


def test_tokens_are_counted_without_pixels(patcher, tmp_path):
    path = tmp_path / "cut.jpg"
    draw(64, 32).save(path, exif=TURNED)
    found = patcher.patches(path)
    assert (found.rows, found.columns) == (8, 4)
    path.write_bytes(path.read_bytes()[:-300])
    assert patcher.num_tokens(path) == found.num_tokens
    with pytest.raises(UserError, match="cannot be read as an image"):
        patcher.patches(path)


def test_digests_are_of_what_is_shown(patcher, tmp_path):
    image, path = draw(8, 16), tmp_path / "turned.png"
    image.rotate(90, expand=True).save(path, exif=TURNED)
    assert patcher.patches(path).digest == patcher.patches(image).digest
    pixels_HWC = np.array(image)
    pixels_HWC[-1, -1, -1] ^= 1
    others = [PIL.Image.fromarray(pixels_HWC), PIL.Image.frombytes("RGB", (16, 8), image.tobytes())]
    assert len({patcher.patches(one).digest for one in [image, *others]}) == 3


def test_a_file_that_changes_before_it_is_cut_is_refused(patcher, tmp_path):
    path = tmp_path / "image.png"
    draw(16, 16).save(path)
    found = patcher.patches(path)
    draw(16, 16, seed=1).save(path)
    with pytest.raises(UserError, match="changed while"):
        found.cut()


@pytest.mark.parametrize("mode", ["I;16", "I;16L", "I;16B", "I;16N"])
def test_16_bits_are_as_bright_as_8(patcher, mode):
    order = ">u2" if mode == "I;16B" else "<u2"
    narrow = PIL.Image.fromarray(RAMP_HW.astype(np.uint8))
    wide = PIL.Image.frombytes(mode, (64, 48), (RAMP_HW * 257).astype(order).tobytes())
    np.testing.assert_array_equal(patcher.patches(wide).cut(), patcher.patches(narrow).cut())


def test_files_of_16_bits(patcher, tmp_path):
    narrow, path = PIL.Image.fromarray(RAMP_HW.astype(np.uint8)), tmp_path / "ramp.png"
    PIL.Image.fromarray(RAMP_HW * 257).save(path)
    assert patcher.patches(path).digest == patcher.patches(narrow).digest


@pytest.mark.parametrize("mode", ["I", "F"])
def test_32_bits_are_refused_in_words(patcher, mode):
    with pytest.raises(UserError, match=r"32 bits for a pixel.*give it with 8 or 16 bits") as refusal:
        patcher.patches(PIL.Image.new(mode, (16, 16), 1))
    assert refusal.value.code == "invalid_image"


def test_files_are_closed(patcher, tmp_path):
    moving, cut = tmp_path / "moving.gif", tmp_path / "cut.jpg"
    draw(32, 32).save(moving, save_all=True, append_images=[draw(32, 32, seed=1)])
    draw(64, 32).save(cut)
    cut.write_bytes(cut.read_bytes()[:-300])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", ResourceWarning)
        patcher.patches(moving).cut()
        for path in (moving, cut):
            patcher.num_tokens(path)
        with pytest.raises(UserError):
            patcher.patches(cut)
        gc.collect()
    assert not [warning for warning in told if warning.category is ResourceWarning]


def test_images_of_pillow_stay_open(patcher, tmp_path):
    path = tmp_path / "moving.gif"
    draw(32, 32).save(path, save_all=True, append_images=[draw(32, 32, seed=1)])
    with PIL.Image.open(path) as image:
        first = patcher.patches(image)
        image.seek(1)
        assert patcher.patches(image).digest != first.digest


def test_settings_as_processors_have_them(patcher, tmp_path):
    """transformers 5 saves a processor's parts in one file."""
    own = json.loads(PROCESSOR.to_json_string())
    file = tmp_path / "processor_config.json"
    file.write_text(json.dumps({"image_processor": own, "processor_class": "Qwen3VLProcessor"}))
    image = draw(40, 24)
    np.testing.assert_array_equal(Patcher(tmp_path).patches(image).cut(), patcher.patches(image).cut())
    for broken in ("{", json.dumps({"processor_class": "Qwen3VLProcessor"})):
        file.write_text(broken)
        with pytest.raises(UserError, match=r"preprocessor_config.json or processor_config.json .* download it again"):
            Patcher(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=r"has no preprocessor_config.json or processor_config.json, which says how"):
        Patcher(tmp_path)
