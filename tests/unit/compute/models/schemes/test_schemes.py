"""Published forms of quantised weights: every cut equals the numbers that the publisher wrote, bit for bit."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from published_weights import MODULE, PUBLISHED, Published, fp8_block, gpt_oss, gptq, nvfp4, pack_quantized
from safetensors.torch import save_file

from longhelix.compute.models.safetensors_checkpoint import SafetensorsCheckpoint
from longhelix.compute.models.schemes import SCHEMES, with_stored_scales
from longhelix.errors import UserError
from longhelix.spec import FORMATS
from longhelix.spec.packed_share import packed_share
from longhelix.spec.quantisation import Storage

pytestmark = pytest.mark.unit

FORMS = sorted(PUBLISHED)


def written(published: Published, folder) -> SafetensorsCheckpoint:
    (folder / "config.json").write_text(json.dumps({}))
    save_file(published.tensors, folder / "model.safetensors")
    return SafetensorsCheckpoint(folder)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a function that returns what is published in a form, and the checkpoint that has it."""

    @cache
    def of(form: str):
        published = PUBLISHED[form]()
        return published, written(published, tmp_path_factory.mktemp("checkpoint"))

    return of


def read(published: Published, checkpoint: SafetensorsCheckpoint, rows: slice, inputs: slice):
    scheme = SCHEMES[published.scheme]
    return scheme.read(checkpoint, published.module, published.shape, published.storage, (rows, inputs))


def whole(published: Published) -> tuple[slice, slice]:
    return slice(0, published.shape[0]), slice(0, published.shape[1])


def test_every_scheme_is_published_here():
    """But for that of GGUF files, which have no tensors for scales (test_gguf_packing.py)."""
    assert {PUBLISHED[form]().scheme for form in FORMS} == set(SCHEMES) - {"gguf"}


@pytest.mark.parametrize("form", FORMS)
def test_whole_weights_equal_what_was_written(form, checkpoints):
    published, checkpoint = checkpoints(form)
    rows = read(published, checkpoint, *whole(published))
    assert torch.equal(rows.numbers(), torch.from_numpy(published.numbers))


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_cuts_equal_what_was_written(form, checkpoints, data):
    published, checkpoint = checkpoints(form)
    cut = []
    for size in published.shape:
        start = data.draw(st.integers(0, size - 1))
        cut.append(slice(start, data.draw(st.integers(start + 1, size))))
    rows = read(published, checkpoint, *cut)
    assert torch.equal(rows.numbers(), torch.from_numpy(published.numbers[tuple(cut)]))
    inputs = range(cut[1].start, cut[1].stop)
    share = packed_share(published.format, published.ordered, published.shape[1], inputs)
    assert (rows.dtype, rows.depth, rows.lead) == (share.format, share.depth, share.lead)
    assert sum(rows.row_bytes) == share.row_bytes
    numbers = FORMATS[published.format].weight_scales.numbers
    if not published.ordered:
        assert rows.depth == len(inputs)
        assert rows.lead == (inputs.start % numbers if numbers else 0)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_read_of_an_empty_cut(form, checkpoints, monkeypatch):
    published, checkpoint = checkpoints(form)
    monkeypatch.setattr(checkpoint, "read", None)
    for cut in ((slice(3, 3), slice(5, 9)), (slice(3, 8), slice(5, 5))):
        rows = read(published, checkpoint, *cut)
        inputs = range(cut[1].start, cut[1].stop)
        share = packed_share(published.format, published.ordered, published.shape[1], inputs)
        assert (rows.outputs, rows.depth) == (cut[0].stop - cut[0].start, share.depth)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_tensors_are_those_of_the_checkpoint_alone(form, checkpoints):
    published, checkpoint = checkpoints(form)
    forms = SCHEMES[published.scheme].tensors(published.module, published.shape, published.storage)
    assert {name for name, each in forms.items() if each.required} == set(published.tensors) - set(published.optional)
    assert set(published.tensors) <= set(forms)
    for name, info in checkpoint.tensors.items():
        assert forms[name].allows(info.shape, info.dtype)
        assert not forms[name].allows(info.shape, "float64")
        assert not forms[name].allows((*info.shape, 2), info.dtype)
        fixed = info.shape[1:] if published.scheme == "gpt_oss" else info.shape  # of any number of experts
        for dim in range(len(info.shape) - len(fixed), len(info.shape)):
            larger = (*info.shape[:dim], info.shape[dim] + 1, *info.shape[dim + 1 :])
            assert not forms[name].allows(larger, info.dtype)


NOT_POSITIVE = (float("nan"), float("inf"), 0.0, -1.0)
# Values that no checkpoint may have as a scale, by the format.
WRONG = {
    "fp8-block": NOT_POSITIVE, "fp8-channel": NOT_POSITIVE, "int8-channel": NOT_POSITIVE,
    "nvfp4": (float("nan"), -1.0), "mxfp4": (float("nan"),), "mxfp8": (float("nan"),),
}  # fmt: skip
GROUPS = (float("nan"), float("-inf"), 0.0)


def with_first(scales: torch.Tensor, place: tuple[int, ...], value: float) -> torch.Tensor:
    """Return scales with another one at `place`. Bytes are exponents."""
    dtype = torch.float8_e8m0fnu if scales.dtype == torch.uint8 else scales.dtype
    number = torch.tensor(value).to(dtype)
    changed = scales.clone()
    if changed.element_size() == 1:
        changed.view(torch.uint8)[place] = number.view(torch.uint8)
    else:
        changed[place] = number
    return changed


@pytest.mark.parametrize("form", FORMS)
def test_scales_that_are_none_are_refused_by_name_where_they_are_read(form, tmp_path):
    published = PUBLISHED[form]()
    good = published.tensors[published.scale]
    is_exponent = good.dtype in (torch.uint8, torch.float8_e8m0fnu)
    # The first scale that is read: of gpt-oss, that of the third expert, whose second row is the first of up_proj.
    place = (2, int(form == "gpt-oss up"), 0) if published.scheme == "gpt_oss" else (0,) * good.ndim
    for wrong in (float("nan"),) if is_exponent else WRONG.get(published.format, GROUPS):
        damaged = replace(published, tensors=published.tensors | {published.scale: with_first(good, place, wrong)})
        checkpoint = written(damaged, tmp_path)
        with pytest.raises(UserError, match="scales must be finite") as caught:
            read(damaged, checkpoint, *whole(damaged))
        assert caught.value.code == "invalid_checkpoint"
        assert repr(published.scale) in str(caught.value)
        if good.numel() > 1:
            cut = tuple(slice(size - 3, size) for size in published.shape)
            assert torch.equal(read(damaged, checkpoint, *cut).numbers(), torch.from_numpy(published.numbers[cut]))


@pytest.mark.parametrize("wrong", NOT_POSITIVE)
@pytest.mark.parametrize("scheme", ["nvfp4_pack_quantized", "modelopt_nvfp4"])
def test_scales_of_tensors_are_refused_by_name(scheme, wrong, tmp_path):
    published = nvfp4(scheme=scheme)
    name = f"{MODULE}.{'weight_scale_2' if scheme == 'modelopt_nvfp4' else 'weight_global_scale'}"
    published.tensors[name] = torch.full_like(published.tensors[name], wrong)
    with pytest.raises(UserError, match="scales must be finite") as caught:
        read(published, written(published, tmp_path), *whole(published))
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize(
    ("form", "name", "dtype"),
    [
        ("fp8 of tensors", "input_scale", "fp8"),
        ("fp8 of tensors, transformers", "activation_scale", "fp8"),
        ("fp8 blocks of modelopt", "input_scale", "fp8"),
        ("int8 of outputs", "input_scale", "int8"),
    ],
)
def test_scales_of_static_activations_are_checked_where_products_round_their_inputs(form, name, dtype, tmp_path):
    published = PUBLISHED[form]()
    rounding = msgspec.structs.replace(published.storage, input_dtype=dtype)
    arguments = published.module, published.shape
    for scale in (0.5, *NOT_POSITIVE):
        published.tensors[f"{MODULE}.{name}"] = torch.tensor(scale)
        checkpoint = written(published, tmp_path)
        rows = read(published, checkpoint, *whole(published))
        scheme = SCHEMES[published.scheme]
        if scale == 0.5:
            rounded = scheme.read(checkpoint, *arguments, rounding, whole(published))
            assert torch.equal(rounded.numbers(), rows.numbers())
            continue
        with pytest.raises(UserError, match="scales must be finite and not zero and not negative") as caught:
            scheme.read(checkpoint, *arguments, rounding, whole(published))
        assert repr(f"{MODULE}.{name}") in str(caught.value)


def test_a_scale_whose_inverse_is_infinite_is_refused(tmp_path):
    published = nvfp4()
    published.tensors[f"{MODULE}.weight_global_scale"] = torch.tensor([1e-45])
    with pytest.raises(UserError, match="weight_global_scale' has the scale inf"):
        read(published, written(published, tmp_path), *whole(published))


def test_experts_that_a_checkpoint_lacks_are_refused(tmp_path):
    published = gpt_oss()
    checkpoint = written(published, tmp_path)
    beyond = replace(published, module=published.module.replace(".2.", ".3."))
    with pytest.raises(UserError, match="gate_up_proj_blocks' has 3 experts, but the model's config requires more"):
        read(beyond, checkpoint, *whole(beyond))


def test_negative_scales_of_groups_are_numbers(tmp_path):
    published = pack_quantized()
    published.tensors[f"{MODULE}.weight_scale"].neg_()
    rows = read(published, written(published, tmp_path), *whole(published))
    assert torch.equal(rows.numbers(), -torch.from_numpy(published.numbers))


def test_an_order_that_the_config_denies_is_refused(tmp_path):
    published = gptq()
    order = published.tensors[f"{MODULE}.g_idx"]
    order[[2, 40]] = order[[40, 2]]
    checkpoint = written(published, tmp_path)
    with pytest.raises(UserError, match=r"g_idx' orders inputs by their activations, but desc_act is false") as caught:
        read(published, checkpoint, *whole(published))
    assert caught.value.code == "invalid_checkpoint"
    cut = slice(0, 24), slice(41, 88)
    assert torch.equal(read(published, checkpoint, *cut).numbers(), torch.from_numpy(published.numbers[cut]))


@pytest.mark.parametrize("publish", [pack_quantized, gptq])
def test_weights_without_an_order_lie_in_order(publish, tmp_path):
    """compressed-tensors leaves the tensor out if a module was not ordered."""
    published = replace(publish(shape=(24, 88)), ordered=True)
    published.tensors.pop(f"{MODULE}.g_idx", None)
    for cut in (whole(published), (slice(3, 9), slice(5, 71))):
        rows = read(published, written(published, tmp_path), *cut)
        assert torch.equal(rows.numbers(), torch.from_numpy(published.numbers[cut]))


@pytest.mark.parametrize("wrong", [-1, 0, 7, 2**31 - 1])
def test_groups_of_other_sizes_are_refused(wrong, tmp_path):
    published = gptq(ordered=True, shape=(24, 200))
    order = published.tensors[f"{MODULE}.g_idx"]
    order[int((order != 0).nonzero()[0])] = wrong
    with pytest.raises(UserError, match=r"g_idx' does not have 32 inputs for each group of scales"):
        read(published, written(published, tmp_path), slice(0, 3), slice(5, 9))


@given(st.data())
def test_ordered_inputs_have_room_in_every_share(data):
    """The room depends on sizes alone, whatever the order is."""
    size, group = data.draw(st.integers(1, 400)), data.draw(st.sampled_from((32, 64, 128)))
    first = data.draw(st.integers(0, size - 1))
    inputs = range(first, data.draw(st.integers(first + 1, size)))
    order = data.draw(st.randoms(use_true_random=False))
    groups = [number // group for number in range(size)]
    order.shuffle(groups)
    share = packed_share(f"int4-g{group}", True, size, inputs)
    if len(inputs) == size:
        assert share.depth == size
        return
    blocks = sum(-(-count // 32) for count in Counter(groups[number] for number in inputs).values())
    assert 32 * blocks <= share.depth <= -(-size // 32) * 32


@pytest.mark.parametrize("scheme", ["gptq", "gptq_v2"])
def test_zero_points_of_symmetric_weights_are_eight(scheme, tmp_path):
    published = gptq(scheme=scheme)
    published.tensors[f"{MODULE}.qzeros"][1, 2] += 1
    with pytest.raises(UserError, match="qzeros' has zero points other than 8, but sym is true"):
        read(published, written(published, tmp_path), *whole(published))


def test_versions_of_gptq_differ(tmp_path):
    published = gptq(zero_points=True)
    checkpoint = written(published, tmp_path)
    assert not torch.equal(
        read(replace(published, scheme="gptq_v2"), checkpoint, *whole(published)).numbers(),
        torch.from_numpy(published.numbers),
    )


def test_the_shape_of_packed_weights_is_the_configs(tmp_path):
    published = pack_quantized()
    published.tensors[f"{MODULE}.weight_shape"] = torch.tensor([21, 174])
    with pytest.raises(UserError, match=r"weight_shape' is \[21, 174\], but the model's config requires \[21, 173\]"):
        read(published, written(published, tmp_path), *whole(published))


@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("publish", [pack_quantized, gptq])
def test_formats_follow_the_dtype_of_stored_scales(publish, half, zero_points, tmp_path):
    published = publish(zero_points=zero_points, half=half)
    checkpoint = written(published, tmp_path)
    suffix = "-zero" if zero_points else ""
    for guess in (f"int4-g32{suffix}", f"int4-g32-float16{suffix}"):
        stored = with_stored_scales(Storage(published.scheme, guess), checkpoint.tensors, MODULE, published.shape)
        assert stored == Storage(published.scheme, published.format)


def test_formats_without_groups_stay(tmp_path):
    checkpoint, storage = written(fp8_block(), tmp_path), Storage("fp8_block", "fp8-block")
    assert with_stored_scales(storage, checkpoint.tensors, MODULE, (300, 290)) == storage


@pytest.mark.parametrize("code", [0x7F, 0xFF])
@pytest.mark.parametrize("form", ["fp8 blocks", "fp8 of outputs", "mxfp8"])
def test_weights_that_are_none_are_refused_by_name(form, code, tmp_path):
    """Kernels of some instruction sets would read the two codes of NaN as numbers."""
    published = PUBLISHED[form]()
    name = f"{MODULE}.weight"
    published.tensors[name] = published.tensors[name].clone()
    published.tensors[name].view(torch.uint8)[1, 2] = code
    with pytest.raises(UserError, match="has a weight that is NaN") as caught:
        read(published, written(published, tmp_path), *whole(published))
    assert repr(name) in str(caught.value)
