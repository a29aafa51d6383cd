"""A model's fingerprint: the same wherever it lies, another one for other weights or another configuration."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from builtin import builtin
from longhelix.compute.models.fingerprint import fingerprint
from longhelix.errors import UserError
from longhelix.spec.presets import load_model
from toy_model import attention_of, with_attention

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
    linear = with_attention(SPEC, rope=replace(attention_of(SPEC).rope, kind="linear", factor=2.0))
    assert fingerprint(linear, files(first)) == found[0]  # an option says so, and the model is the same


def test_files_may_be_empty_or_gone(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    assert fingerprint(SPEC, files(tmp_path / "empty")) != fingerprint(SPEC, files())
    with pytest.raises(UserError, match="cannot be read"):
        fingerprint(SPEC, files(tmp_path / "gone"))
