"""A model's fingerprint: the same wherever it lies, another one for other weights or another configuration."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from builtin import builtin
from longhelix.compute.models.fingerprint import fingerprint, rope_fingerprint
from longhelix.errors import UserError
from longhelix.spec import MLP, RopeSpec
from longhelix.spec.ffn import Activation
from longhelix.spec.presets import load_model
from longhelix.spec.quantised_modules import Modules, Quantisation, Rule, Storage
from longhelix.spec.rope import RopeScaling
from toy_model import attention_of, with_attention, with_ffns

pytestmark = pytest.mark.unit

SPEC = load_model("builtin")


def files(*paths):
    return SimpleNamespace(files=paths)


def test_a_copy_has_the_same_and_the_built_in_model_one(tmp_path):
    (path,) = builtin().files
    copy = shutil.copy(path, tmp_path / "copy.gguf")
    assert fingerprint(SPEC, builtin()) == fingerprint(SPEC, files(tmp_path / "copy.gguf"))
    with open(copy, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))
    assert fingerprint(SPEC, builtin()) != fingerprint(SPEC, files(tmp_path / "copy.gguf"))


def test_configuration_size_and_content_count(tmp_path):
    first, second = tmp_path / "1", tmp_path / "2"
    first.write_bytes(bytes(100_000))
    second.write_bytes(bytes(100_001))
    trained = tmp_path / "3"
    trained.write_bytes(b"\1".join([bytes(4000)] * 25).ljust(100_000, b"\0"))
    found = [
        fingerprint(SPEC, files(first)),
        fingerprint(replace(SPEC, rms_norm_eps=1e-6), files(first)),
        fingerprint(SPEC, files(second)),
        fingerprint(SPEC, files(trained)),
        fingerprint(SPEC, files(first, second)),
        fingerprint(SPEC, files(second, first)),
    ]
    assert len(set(found)) == len(found)
    linear = with_attention(SPEC, rope=RopeSpec(scaling=RopeScaling("linear", 2.0)))
    assert fingerprint(linear, files(first)) == found[0]  # an option says so, and the model is the same


@pytest.mark.parametrize(
    ("name", "model", "rope"),
    [
        (
            "smollm2-135m",
            "963bdd334e002edc6cbd644427f857c497179d4868bcc9b2464ff0fab2dd9bcb",
            "6fdb64e796dc5c153e7892becc1a41583b7a13c9d02bba4fc360f17cfaf1663e",
        ),
        (
            "deepseek-v3.2",
            "78ec7440e07ed68a49108de5c1b070db8877f5fde05c2bee9fe65ac2eb9347dc",
            "2c638d673ef3a2b658c36e8f30cbdc3a87c62a26ba08cf58ea71d7137c8912bd",
        ),
        (
            "gpt-oss-120b",
            "12b2e3ddbf4cd32d5875124ea0839f35c9fec13d160bdaa3170bd06e4ea1cfd8",
            "3d80ce849fdc52504ee3e5b00dc05fb26be874789340bce6441e87718213be26",
        ),
        (
            "qwen3-next-80b-a3b",
            "ad12b4ce89cab24432ab53926267b799240e0d30a05e2b8141c01a44bbefdad2",
            "36bd6cee7efcb314a4d2a07b4304990f541e5da87c8aec8ddf5d74077cbc9ea6",
        ),
    ],
)
def test_fingerprints_stay_because_saved_contexts_have_them(name, model, rope):
    spec = load_model(name)
    assert (fingerprint(spec, files()), rope_fingerprint(spec)) == (model, rope)


ACTIVATIONS = (Activation(), Activation("gelu"), Activation(gated=False))
SETTINGS = (("norms", {"value": True}), ("scores", {"cap": 50.0}), ("scores", {"sinks": True}))


def test_each_setting_of_layers_and_logits_counts():
    attention, vocabulary = attention_of(SPEC), SPEC.vocabulary
    changed = [
        with_attention(SPEC, **{name: msgspec.structs.replace(getattr(attention, name), **change)})
        for name, change in SETTINGS
    ]
    changed += [with_ffns(SPEC, MLP(1536, activation=each)) for each in ACTIVATIONS]
    changed += [
        replace(SPEC, vocabulary=replace(vocabulary, multipliers=replace(vocabulary.multipliers, **change)))
        for change in ({"rounded": True}, {"logit_cap": 30.0}, {"logits": 2.0})
    ]
    found = [fingerprint(spec, files()) for spec in (SPEC, *changed)]
    assert len(set(found)) == len(found)


def test_how_a_checkpoint_packs_its_weights_counts():
    quantisations = (
        None,
        Quantisation((Rule(Storage("fp8", "fp8-channel")),)),
        Quantisation((Rule(Storage("fp8_inverse", "fp8-channel")),)),
        Quantisation((Rule(Storage("int_quantized", "int8-channel")),)),
        Quantisation((Rule(Storage("fp8", "fp8-channel")),), Modules(endings=(".29.mlp.down_proj",))),
        Quantisation((Rule(Storage("gguf", "q8_0")),), gguf=True),
        Quantisation((Rule(Storage("gguf", "q8_0", repacked="float32")),), gguf=True),  # once became bfloat16
    )
    found = [
        fingerprint(replace(SPEC, checkpoint=replace(SPEC.checkpoint, quantisation=each)), files())
        for each in quantisations
    ]
    assert len(set(found)) == len(found)
    names = Modules(names=frozenset({"lm_head", "model.layers.30"}))  # of modules that the model does not have
    same = Quantisation((Rule(Storage("fp8", "fp8-channel")),), names)
    assert fingerprint(replace(SPEC, checkpoint=replace(SPEC.checkpoint, quantisation=same)), files()) == found[1]


def test_files_may_be_empty_or_gone(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert fingerprint(SPEC, files(tmp_path / "empty")) != fingerprint(SPEC, files())
    with pytest.raises(UserError, match="cannot be read"):
        fingerprint(SPEC, files(tmp_path / "gone"))
