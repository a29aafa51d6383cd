"""Pipeline stages without an engine: what each rank declares and keeps, and that one after the other is the model."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import KVFormat
from longhelix.compute.models.batch import AttentionRows, Batch, RowRotation, RowView, StepShape
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.parameters import declare
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.pool_size import kv_bytes_per_token
from longhelix.spec import MLA, MoE, Routing
from longhelix.spec.layout import Layout
from tensors import Tensors
from toy_model import attention_of, toy_model

pytestmark = pytest.mark.unit

CPU, ROWS, BLOCK_TOKENS = torch.device("cpu"), 5, 16
SIZES = {
    "num_layers": 5,
    "hidden_size": 32,
    "num_query_heads": 4,
    "num_kv_heads": 2,
    "head_size": 8,
    "ffn_size": 48,
    "vocab_size": 37,
    "max_positions": 64,
}
LLAMA = toy_model(**SIZES)
TIED = toy_model(**SIZES, tied_embeddings=True)
DEEPSEEK = toy_model(
    "deepseek_v3",
    **SIZES,
    mla=MLA(16, 16, 8, 4, 8),
    moe=MoE(4, 2, 16, shared_size=16, routing=Routing(bias=True, sigmoid=True)),
    num_dense_layers=2,
)
SPECS = {"llama": LLAMA, "tied": TIED, "deepseek": DEEPSEEK}
STAGES = [Layout(pp=2), Layout(pp=3), Layout(pp=3, stage_layers=(1, 1, 3)), Layout(kvp=2, tpa=2, pp=2)]


def id_of(value):
    return f"{value.kvp}x{value.tpa}-pp{value.pp}-{value.stage_layers}" if isinstance(value, Layout) else None


@pytest.mark.parametrize("layout", STAGES, ids=id_of)
@pytest.mark.parametrize("name", SPECS)
def test_stages_declare_each_tensor_once_and_tied_embeddings_at_both_ends(name, layout):
    spec, one_stage = SPECS[name], Layout(layout.kvp, layout.tpa)
    for place in range(layout.num_ranks):
        stages = [rank for rank in range(layout.world_size) if layout.stage_rank(rank) == place]
        parameters = [parameter for rank in stages for parameter in declare(spec, layout, rank)]
        whole = declare(spec, one_stage, place)
        found = Counter(source for parameter in parameters for source in parameter.sources)
        expected = Counter(source for parameter in whole for source in parameter.sources)
        if spec.vocabulary.tied_embeddings:
            expected.update(source for source in expected if source.name == "model.embed_tokens.weight")
        assert found == expected
        names = [parameter.name for parameter in parameters]
        assert len(set(names)) == len(names)
        assert set(names) == {parameter.name for parameter in whole} | {"head"}


@pytest.mark.parametrize("layout", STAGES, ids=id_of)
@pytest.mark.parametrize("name", SPECS)
def test_the_ends_are_at_the_ends(name, layout):
    for rank in range(layout.world_size):
        names = {parameter.name for parameter in declare(SPECS[name], layout, rank)}
        stage = layout.stage(rank)
        assert ("embedding" in names) == layout.has_embedding(rank) == (stage == 0)
        assert ("norm" in names) == ("head" in names) == layout.has_head(rank) == (stage == layout.pp - 1)


@pytest.mark.parametrize("layout", STAGES, ids=id_of)
@pytest.mark.parametrize("name", SPECS)
def test_what_stages_keep_of_a_token_adds_up(name, layout):
    spec, one_stage = SPECS[name], Layout(layout.kvp, layout.tpa)
    for place in range(layout.num_ranks):
        stages = range(place, layout.world_size, layout.num_ranks)
        kept = [kv_bytes_per_token(spec, layout, "bfloat16", "cpu", rank) for rank in stages]
        assert sum(kept) == kv_bytes_per_token(spec, one_stage, "bfloat16", "cpu", place)
        per_layer = kept[0] // len(layout.layers(spec.num_layers, place))
        assert kept == [per_layer * len(layout.layers(spec.num_layers, rank)) for rank in stages]


def make_decoder(spec, mesh):
    weights = Weights(Tensors.of(spec), declare(spec, mesh.layout, mesh.rank), torch.float32, "float32", CPU)
    return Decoder(spec, mesh, weights)


def make_stage(spec, layout, rank):
    """The decoder of a stage of one rank, and its pool."""
    group = RankGroup((rank,), rank, None)
    decoder = make_decoder(spec, Mesh(layout, rank, group, group, group))
    formats = {
        entry.name: KVFormat.choose(
            "float32",
            BLOCK_TOKENS,
            attention_of(spec).heads.num_kv_heads,
            entry.key_size,
            entry.value_size,
            CPU,
            entry.shared_values,
        )
        for entry in [attention_of(spec).cache_entry]
    }
    return decoder, KVPool([formats] * len(layout.layers(spec.num_layers, rank)), 1, CPU)


def prompt(spec):
    ints = torch.arange(ROWS)
    angles_tR = torch.linspace(0, 3, ROWS * attention_of(spec).rotated_size // 2).view(ROWS, -1)
    return Batch(
        token_ids_T=ints * 7 % spec.vocabulary.size,
        shape=StepShape(num_sequences=1, most_tokens=ROWS),
        attention=AttentionRows(
            row_starts_b=torch.tensor([0, ROWS]),
            limits_t=ints + 1,
            extents_b2=torch.tensor([[0, 1]]),
            max_rows=ROWS,
            rotations=(RowRotation(angles_tR.cos(), angles_tR.sin()),),
            views=(RowView(ints, torch.zeros(1, dtype=torch.int64)),),
        ),
    )


@torch.inference_mode()
def logits(spec, layout):
    """Hidden states handed from stage to stage."""
    batch, hidden_TH = prompt(spec), None
    for rank in range(layout.world_size):
        decoder, pool = make_stage(spec, layout, rank)
        if layout.has_embedding(rank):
            hidden_TH = decoder.embed(batch.token_ids_T)
        hidden_TH = decoder.run_layers(hidden_TH, batch, pool)
    return decoder.logits(hidden_TH)


@pytest.mark.parametrize("layout", STAGES[:3], ids=id_of)
@pytest.mark.parametrize("name", SPECS)
def test_stages_one_after_the_other_give_the_models_logits_to_the_bit(name, layout):
    whole, staged = logits(SPECS[name], Layout()), logits(SPECS[name], layout)
    assert whole.std() > 0.1
    assert torch.equal(whole, staged)


def test_a_stages_products_are_those_of_its_layers_and_of_the_head():
    places = ((Layout(), 0), (STAGES[0], 0), (STAGES[0], 1))
    products = [make_stage(TIED, layout, rank)[0].products() for layout, rank in places]
    whole, *stages = (sum(weight.outputs * weight.depth for weight in weights) for weights in products)
    assert whole == sum(stages)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["llama", "tied"])
def test_tied_instances_have_the_whole_vocabulary_each_and_do_not_meet_for_it(name, rank):
    spec, token_ids_T = SPECS[name], torch.arange(SPECS[name].vocabulary.size)
    together = SimpleNamespace(size=2, ranks=(0, 1), index=rank)  # knows no collective
    mesh = Mesh(Layout(kvp=2, ffn_replicas=2), rank, together, together, RankGroup((rank,), rank, None))
    instance, (whole, _) = make_decoder(spec, mesh), make_stage(spec, Layout(), 0)
    hidden_TH = instance.embed(token_ids_T)
    assert torch.equal(hidden_TH, whole.embed(token_ids_T))
    assert torch.equal(instance.logits(hidden_TH), whole.logits(hidden_TH))
