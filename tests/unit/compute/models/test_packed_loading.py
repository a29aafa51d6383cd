"""Quantised checkpoints stay packed: a rank's weights take the bytes of the formula, in every form and layout."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import oracle
from longhelix.compute.kernels import PANELS, Experts, Weight
from longhelix.compute.kernels.weight import PACKED, InputOrder
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.parameters import declare, stored_bytes
from longhelix.compute.models.safetensors_checkpoint import SafetensorsCheckpoint
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.engine.settings.model import read_model
from longhelix.spec import FORMATS
from longhelix.spec.layout import Layout
from packed_checkpoints import FORMS, save_packed

pytestmark = pytest.mark.unit

CONFIGS = {
    "llama": oracle.NATIVE_SIZES,
    "qwen3_moe": oracle.NATIVE_EXPERTS["native-qwen3_moe"],
    "deepseek_v3": type(oracle.NATIVE_LATENTS)(**oracle.NATIVE_LATENTS.to_dict() | {"moe_intermediate_size": 40}),
}
LAYOUTS = [Layout(), Layout(kvp=3), Layout(kvp=2, tpa=2, tpf=2, ep=2), Layout(pp=2)]


def resident_bytes(value) -> int:
    """Bytes of what an attribute of a module keeps, without padding: panels are whole, one for each half of a gated
    FFN, and sections of packed rows begin at multiples of 256 bytes."""
    match value:
        case Tensor():
            return value.nbytes
        case InputOrder():
            return resident_bytes(value.columns_I)
        case Weight() if value.arrangement is PACKED:
            row_bytes = sum(PACKED.rows_of(value).row_bytes)
            assert 0 <= value.values.nbytes - value.outputs * row_bytes < 4 * 256
            return value.outputs * row_bytes + resident_bytes(value.order)
        case Weight() if value.arrangement is PANELS:
            row_bytes = FORMATS[value.dtype].weight_row_bytes(value.depth, value.lead)
            panels, rest = divmod(value.values.nbytes, 16 * row_bytes) if row_bytes else (0, 0)
            assert rest == 0
            assert panels <= -(-value.outputs // 16) + 1
            return value.outputs * row_bytes + resident_bytes(value.order)
        case Weight():
            return value.values.nbytes
        case Experts():
            return sum(resident_bytes(weight) for weight in (*value.gate_up, *value.down))
        case tuple():
            return sum(resident_bytes(each) for each in value if isinstance(each, Experts))
    return 0


def mesh_of(layout: Layout, rank: int) -> Mesh:
    """A mesh that sends nothing."""

    def group(groups):
        return RankGroup(next(tuple(ranks) for ranks in groups if rank in ranks), rank, None)

    return Mesh(layout, rank, group(layout.stage_groups()), group(layout.kvp_groups()), group(layout.ffn_groups()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", CONFIGS)
def test_weights_take_the_bytes_of_the_formula(family, form, tmp_path):
    if (family, form) == ("llama", "kimi-int4"):
        pytest.skip("this form packs experts alone")
    save_packed(CONFIGS[family], FORMS[form], tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path / "packed")
    spec = read_model(checkpoint, None)
    for layout in LAYOUTS:
        if layout.ep > 1 and not spec.moes:
            continue
        for rank in range(layout.world_size):
            parameters = declare(spec, layout, rank)
            read = []
            weights = Weights(checkpoint, parameters, torch.bfloat16, "bfloat16", torch.device("cpu"), read.append)
            decoder = Decoder(spec, mesh_of(layout, rank), weights)
            modules = [module for module in decoder.modules() if module is not decoder.layers]
            views = {"key_up_qCZ", "value_up_qCZ"}  # of up_qXZ
            found = sum(
                resident_bytes(value) for module in modules for name, value in vars(module).items() if name not in views
            )
            assert sum(read) == sum(parameter.num_elements for parameter in parameters)
            assert found == sum(stored_bytes(spec, layout, rank, "bfloat16", "bfloat16").values()), (layout, rank)


@pytest.mark.parametrize("form", ["fp8-block", "fp8-channel"])
@pytest.mark.parametrize("family", CONFIGS)
def test_products_with_weights_that_the_checkpoint_quantises_round_their_inputs(family, form, tmp_path):
    save_packed(CONFIGS[family], FORMS[form], tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path / "packed")
    spec = read_model(checkpoint, None)
    rounding = replace(spec.checkpoint, quantisation=spec.checkpoint.quantisation.rounding_inputs("fp8"))
    spec, layout = replace(spec, checkpoint=rounding), Layout(kvp=2)
    weights = Weights(checkpoint, declare(spec, layout, 1), torch.bfloat16, "bfloat16", torch.device("cpu"))
    decoder = Decoder(spec, mesh_of(layout, 1), weights)
    values = [value for module in decoder.modules() for value in vars(module).values()]
    experts = [each for value in values if isinstance(value, tuple) for each in value if isinstance(each, Experts)]
    found = [value for value in values if isinstance(value, Weight)]
    found += [weight for each in experts for weight in (*each.gate_up, *each.down)]
    packed = [weight for weight in found if weight.dtype == form]
    assert len(packed) > 4
    assert all(weight.arrangement is PACKED for weight in packed)
    assert all(weight.rounds_inputs == (weight.dtype == form) for weight in found)
    assert all(each.rounds_inputs for each in experts)
