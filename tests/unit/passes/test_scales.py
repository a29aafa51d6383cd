"""Static scales from a calibration run are constants of graphs for any number of tokens."""

import gc
import weakref

import pytest
import torch
from lockstep import Lockstep, group_of
from modules import LARGEST, Chain, H, rows
from test_sequence_parallel import found, near

from longhelix.passes import Calibration
from longhelix.passes.scales import OBSERVED
from tiers import few

LAYERS = 3
DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


def highest_of(module, x):
    """Return the input of each mixer, without the pass."""
    seen = []
    hooks = [norm.register_forward_hook(lambda norm, given, out: seen.append(out.abs().max())) for norm in module.norms]
    module(x)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen)


def rounded(x, scale, dtype):
    scaled = x / scale
    scaled = scaled.round() if dtype is torch.int8 else scaled
    return scaled.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype).float() * scale


def with_scales(module, scales, dtype, x):
    """Return the module's result when its mixers' inputs are rounded to these scales."""
    hooks = [
        norm.register_forward_hook(lambda norm, given, out, scale=scale: rounded(out, scale, dtype))
        for norm, scale in zip(module.norms, scales, strict=True)
    ]
    returned = module(x)
    for hook in hooks:
        hook.remove()
    return returned


@pytest.mark.parametrize(
    ("size", "dynamic", "quantize"), few([(3, True, "int8"), (2, False, "int8"), (3, False, "fp8")])
)
def test_scales_are_found_once_and_travel_with_no_row(size, dynamic, quantize):
    with group_of(size), torch.no_grad():
        alone, calibration = Chain(0, 1, LAYERS), Calibration()
        modules = [Chain(rank, size, LAYERS) for rank in range(size)]
        noting = Lockstep(modules, min_tokens=1, quantize=quantize, scales=calibration)
        for tokens in (13, 40):  # the last ranks have padding
            outcome = noting(rows(tokens))
            near(outcome.changed.returned[0][0], alone(rows(tokens)), quantize)
            assert found(outcome)[f"MiddleAllReduceRMSNormDynamic{quantize.upper()}"] == LAYERS - 1
        scales = calibration.scales(quantize)
        expected = torch.stack([highest_of(alone, rows(tokens)) for tokens in (13, 40)]).amax(0)
        # In the order of layers: rounding of one gathered value affects all later ones.
        given = torch.tensor([scales[place] for place in sorted(scales)])
        assert ((given * LARGEST[DTYPES[quantize]] / expected - 1).abs() < 0.1).all()

        ranks = Lockstep(modules, dynamic, min_tokens=1, quantize=quantize, scales=scales)
        for tokens in (13, 40) if dynamic else (13, 14):
            x, share = rows(tokens), -(-tokens // size)
            outcome = ranks(x)
            for returned in outcome.changed.returned:
                near(returned[0], with_scales(alone, given, DTYPES[quantize], x), quantize)
            names = {name + f"Static{quantize.upper()}" for name in ("FirstAllReduceRMSNorm", "MiddleAllReduceRMSNorm")}
            assert set(found(outcome)) == names | {"LastAllReduceRMSNorm"}
            narrow = {"int8": "int8", "fp8": "uint8"}[quantize]
            assert outcome.changed.sent_bytes["all_gather", narrow] == LAYERS * share * H * (size - 1)
            assert outcome.changed.sent_bytes["all_gather", "float32"] == share * H * 4 * (
                size - 1
            )  # the returned values
            assert outcome.explained == ""


def test_a_graph_that_was_not_calibrated_has_scales_of_tokens():
    with group_of(2), torch.no_grad():
        calibration = Calibration()
        Lockstep([Chain(rank, 2, 2) for rank in range(2)], min_tokens=1, quantize="int8", scales=calibration)(rows(13))
        others = [Chain(rank, 2, LAYERS) for rank in range(2)]
        ranks = Lockstep(others, min_tokens=1, quantize="int8", scales=calibration.scales("int8"))
        outcome = ranks(rows(13))
        near(outcome.changed.returned[0][0], Chain(0, 1, LAYERS)(rows(13)), "int8")
        assert "no static scales are known" in outcome.explained
        assert found(outcome)["MiddleAllReduceRMSNormDynamicINT8"] == LAYERS - 1


def test_numbers_beyond_what_was_seen_are_the_largest():
    with group_of(2), torch.no_grad():
        calibration, modules = Calibration(), [Chain(rank, 2, 1) for rank in range(2)]
        Lockstep(modules, min_tokens=1, quantize="int8", scales=calibration)(rows(13))
        small = {place: scale / 1000 for place, scale in calibration.scales("int8").items()}
        outcome = Lockstep(modules, min_tokens=1, quantize="int8", scales=small)(rows(13))
        assert outcome.changed.returned[0][0].isfinite().all()


def test_calibrations_that_have_seen_nothing_or_too_much():
    with group_of(2), torch.no_grad():
        with pytest.raises(ValueError, match="recorded nothing on at least one rank"):
            Calibration().scales("int8")
        for unknown in ("int4", ["int8"], None):
            with pytest.raises(ValueError, match="is not known: use one of int8, fp8"):
                Calibration().scales(unknown)
        for number in (torch.inf, torch.nan):
            calibration = Calibration()
            noting = {"min_tokens": 1, "quantize": "int8", "scales": calibration}
            Lockstep([Chain(rank, 2, 1) for rank in range(2)], **noting)(rows(13) * number)
            with pytest.raises(ValueError, match="not finite: run it on other inputs"):
                calibration.scales("int8")


def test_rows_of_padding_are_not_noted():
    """A norm without eps turns zeros into NaN."""
    scales = []
    for tokens in (13, 14):
        with group_of(2), torch.no_grad():
            calibration, modules = Calibration(), [Chain(rank, 2, 1, eps=(0.0,)) for rank in range(2)]
            Lockstep(modules, min_tokens=1, quantize="int8", scales=calibration)(rows(14)[:tokens])
            scales.append(calibration.scales("int8"))
    assert scales[0].keys() == scales[1].keys()


def test_notes_go_with_their_calibration():
    """Graphs that record for a calibration may outlive it."""
    calibration = Calibration()
    place = f"{calibration.number}/a"
    OBSERVED(torch.tensor([[448.0], [896.0], [2.0]]), place)
    OBSERVED(torch.tensor([[2.0]]), place)
    with group_of(2):
        assert calibration.scales("fp8") == {"fp8/a": 2.0}
    gone = weakref.ref(calibration)
    del calibration
    gc.collect()
    assert gone() is None
    assert OBSERVED(torch.tensor([[5.0]]), place).item() == 5
