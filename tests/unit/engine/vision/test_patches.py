"""Images as patches: their size before any pixel is read, files of 16 bits, files that end early, settings."""

import gc
import json
import warnings

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.image_transforms import convert_to_rgb
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from longhelix.engine.vision.patches import Patcher
from longhelix.errors import UserError

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
    with pytest.raises(UserError, match=r"32 bits per pixel.*give it with 8 or 16 bits") as refusal:
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
    with pytest.raises(UserError, match=r"processor_config\.json, but images need its settings"):
        Patcher(tmp_path)


def with_alpha(mode, seed=3):
    """Of 24 x 16 pixels, of which some are transparent, wholly or in part."""
    chance = np.random.default_rng(seed)
    alpha_HW = chance.choice(np.array([0, 1, 100, 254, 255], np.uint8), (16, 24))
    image = draw(24, 16, seed)
    image.putalpha(PIL.Image.fromarray(alpha_HW))
    return image.convert(mode)


def palette(transparent):
    """`transparent`: as PNG has it: bytes of alpha, one for each colour, or the number of one colour."""
    image = draw(24, 16, 4).quantize(16)
    image.info["transparency"] = transparent
    return image


def keyed(mode, transparent):
    image = draw(24, 16, 5).convert(mode)
    image.putpixel((3, 4), transparent)
    image.info["transparency"] = transparent
    return image


def animated():
    frames = [with_alpha("RGBA", seed) for seed in (6, 7)]
    return frames[0], {"save_all": True, "append_images": frames[1:]}


SHOWN = {
    "RGBA": lambda: (with_alpha("RGBA"), {}),
    "LA": lambda: (with_alpha("LA"), {}),
    "palette with alphas": lambda: (palette(bytes(range(0, 256, 16))), {}),
    "palette with a transparent colour": lambda: (palette(3), {}),
    "gray with a transparent level": lambda: (keyed("L", 7), {}),
    "RGB with a transparent colour": lambda: (keyed("RGB", (7, 8, 9)), {}),
    "1 bit with a transparent level": lambda: (keyed("1", 0), {}),
    "CMYK": lambda: (draw(24, 16).convert("CMYK"), {}),
    "YCbCr": lambda: (draw(24, 16).convert("YCbCr"), {}),
    "gray": lambda: (draw(24, 16).convert("L"), {}),
    "animated": animated,
    "turned": lambda: (with_alpha("RGBA"), {"exif": TURNED}),
}
FORMATS = {
    "PNG": set(SHOWN) - {"CMYK", "YCbCr"},
    "WEBP": {"RGBA", "LA", "animated", "turned", "palette with a transparent colour"},
    "GIF": {"RGBA", "LA", "animated", "palette with a transparent colour", "gray with a transparent level"},
    "TIFF": {"RGBA", "LA", "CMYK", "YCbCr"},
    "JPEG": {"CMYK", "gray"},
}


@pytest.mark.parametrize(("form", "name"), [(form, name) for form, names in FORMATS.items() for name in sorted(names)])
def test_pixels_are_those_of_transformers_whatever_the_mode(patcher, tmp_path, form, name):
    """Transparent ones on white, however the file says what is transparent. Of an animation the first image."""
    image, more = SHOWN[name]()
    path = tmp_path / f"it.{form.lower()}"
    image.save(path, form, **more | ({"lossless": True} if form == "WEBP" else {}))
    for one in (path, path.read_bytes(), PIL.Image.open(path)):
        opened = one if isinstance(one, PIL.Image.Image) else PIL.Image.open(path)
        wanted = PROCESSOR(images=[PIL.ImageOps.exif_transpose(opened)], return_tensors="np")
        found = patcher.patches(one)
        np.testing.assert_array_equal(found.cut(), wanted["pixel_values"])
        assert found.digest == patcher.patches(PIL.Image.fromarray(composed(opened))).digest


def composed(image):
    return convert_to_rgb(PIL.ImageOps.exif_transpose(image), return_numpy=True)


def test_black_on_transparent_is_black_on_white(patcher):
    """And another image than black on black, which has the same colours: they may share no cached KV."""
    image = PIL.Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    image.putpixel((5, 5), (0, 0, 0, 255))
    on_white = PIL.Image.new("RGB", (16, 16), "white")
    on_white.putpixel((5, 5), (0, 0, 0))
    digests = {mode: patcher.patches(one).digest for mode, one in (("alpha", image), ("white", on_white))}
    assert digests["alpha"] == digests["white"] != patcher.patches(PIL.Image.new("RGB", (16, 16))).digest


@pytest.mark.parametrize(("mode", "plain"), [("RGBa", "RGBA"), ("La", "LA"), ("PA", "RGBA")])
def test_modes_that_files_do_not_have(patcher, mode, plain):
    """Colours that were multiplied by alpha, and palettes with an alpha of their own."""
    image = with_alpha(plain)
    if mode == "PA":
        given = draw(24, 16, 4).quantize(16).convert("PA")
        given.putalpha(image.getchannel("A"))
    else:
        given = image.convert(mode)
    wanted = convert_to_rgb(given.convert(plain), return_numpy=True)
    assert patcher.patches(given).digest == patcher.patches(PIL.Image.fromarray(wanted)).digest


def test_16_bits_with_a_transparent_level(patcher):
    values_HW = np.arange(24 * 16, dtype=np.uint16).reshape(16, 24) * 100
    image = PIL.Image.frombytes("I;16", (24, 16), values_HW.tobytes())
    image.info["transparency"] = 300
    wanted_HW = (values_HW >> 8).astype(np.uint8)
    wanted_HW[0, 3] = 255
    assert patcher.patches(image).digest == patcher.patches(PIL.Image.fromarray(wanted_HW)).digest
