"""The folder of saved contexts: names, manifests, and what a failure leaves."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from array import array
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from longhelix.compute.cache.context_folder import ContextFolder, context_name, tokens_checksum
from longhelix.compute.cache.saved_context import Origin, SavedContext
from longhelix.errors import UserError

pytestmark = pytest.mark.unit

TOKENS = array("i", [3, 1, 4, 1, 5])
ORIGIN = Origin("model", "rope", "float32", "float32", "float32", None, None, 4, "frequencies")


def context(name, **changes):
    saved = SavedContext(name, ORIGIN, "builtin", "2026-01-01T00:00:00+00:00", 5, 6, tokens_checksum(TOKENS), ())
    return msgspec.structs.replace(saved, **changes)


def save(folder, name, content=b"KV", replace=False):
    with folder.new(name, replace) as path:
        (path / "rank-0").write_bytes(content)
        folder.finish(path, context(name), TOKENS, replace)


@pytest.fixture
def folder(tmp_path):
    return ContextFolder(tmp_path / "contexts")


def wait_for_removals():
    for thread in threading.enumerate():
        if thread.name == "removes contexts":
            thread.join(60)


def code_of(refused):
    assert "\n" not in str(refused.value)
    return refused.value.code


def test_what_was_saved_is_there_with_its_tokens(folder):
    assert folder.names() == []
    save(folder, "b")
    save(folder, "a")
    assert folder.names() == ["a", "b"]
    assert folder.manifest("a") == context("a")
    assert folder.token_ids(folder.manifest("a")) == TOKENS
    assert (folder.at("b") / "rank-0").read_bytes() == b"KV"
    assert sorted(os.listdir(folder.path)) == ["a", "b"]
    folder.remove("a")
    assert os.listdir(folder.path) == ["b"]


def test_a_folder_that_was_renamed_is_a_context_of_the_new_name(folder):
    save(folder, "old")
    os.rename(folder.at("old"), folder.path / "new")
    assert folder.manifest("new") == context("new")


def test_a_context_is_replaced_as_a_whole_or_not_at_all(folder):
    save(folder, "a", b"first")
    with pytest.raises(UserError, match=r"already exists in .*: choose another name") as refused:
        save(folder, "a", b"second")
    assert code_of(refused) == "context_exists"
    assert (folder.at("a") / "rank-0").read_bytes() == b"first"
    save(folder, "a", b"third", replace=True)
    assert (folder.at("a") / "rank-0").read_bytes() == b"third"
    wait_for_removals()
    assert os.listdir(folder.path) == ["a"]


def test_what_a_writer_has_left_that_was_killed_is_removed_and_what_others_write_is_not(folder):
    """Here those of another process, which writes two and ends without a word."""
    leave = (
        "import os, sys; from pathlib import Path; from longhelix.compute.cache.context_folder import ContextFolder\n"
        "with ContextFolder(Path(sys.argv[1])).new('a', False) as path:\n"
        "    (path / 'rank-0').write_bytes(b'KV'); os._exit(0)"
    )
    save(folder, "kept")
    wait_for_removals()
    subprocess.run([sys.executable, "-c", leave, str(folder.path)], check=True, timeout=120)
    assert len(os.listdir(folder.path)) == 2
    with folder.new("b", replace=False) as own:
        save(ContextFolder(folder.path), "c")
        wait_for_removals()
        assert own.is_dir()
        assert sorted(os.listdir(folder.path)) == sorted([own.name, "c", "kept"])


def test_one_that_is_replaced_is_gone_before_its_files_are(folder, monkeypatch):
    save(folder, "a", b"first")
    wait_for_removals()
    may_go, removed = threading.Event(), shutil.rmtree

    def slow(*arguments, **settings):
        assert may_go.wait(60)
        removed(*arguments, **settings)

    def replaced(*arguments, **settings):
        if threading.current_thread() is threading.main_thread():
            removed(*arguments, **settings)
        else:
            slow(*arguments, **settings)

    monkeypatch.setattr(shutil, "rmtree", replaced)
    save(folder, "a", b"second", replace=True)
    assert (folder.at("a") / "rank-0").read_bytes() == b"second"
    assert len(os.listdir(folder.path)) == 2
    save(ContextFolder(folder.path), "b")  # which takes it for none that was left
    assert len(os.listdir(folder.path)) == 3
    may_go.set()
    wait_for_removals()
    assert sorted(os.listdir(folder.path)) == ["a", "b"]


def fail_half_way(folder, name, error):
    with folder.new(name, replace=True) as path:
        (path / "rank-0").write_bytes(b"half")
        raise error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), UserError("no"), KeyboardInterrupt()])
def test_whatever_fails_meanwhile_nothing_is_left(folder, error):
    save(folder, "a", b"first")
    for name in ("a", "b"):
        with pytest.raises((UserError, KeyboardInterrupt)):
            fail_half_way(folder, name, error)
    assert os.listdir(folder.path) == ["a"]
    assert (folder.at("a") / "rank-0").read_bytes() == b"first"


@pytest.mark.parametrize("failing", ["rename", "fsync"])
def test_a_disk_that_fails_at_the_end_leaves_the_old_context(folder, monkeypatch, failing):
    save(folder, "a", b"first")

    def fail(*arguments):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(UserError, match="Input/output error") as refused:
        save(folder, "a", b"second", replace=True)
    assert code_of(refused) == "disk_error"
    monkeypatch.undo()
    assert os.listdir(folder.path) == ["a"]
    assert (folder.at("a") / "rank-0").read_bytes() == b"first"


def test_all_manifests_are_read_with_one_look_at_the_folder(folder, monkeypatch):
    assert folder.manifests() == {}
    for name in ("c", "a", "b", "gone"):
        save(folder, name)
    (folder.path / "b" / "context.json").write_bytes(b"[]")
    (folder.path / "-none").mkdir()
    looks, names = [], folder.names

    def watched():
        looks.append(names())
        shutil.rmtree(folder.path / "gone")  # somebody removes it meanwhile
        return looks[-1]

    monkeypatch.setattr(folder, "names", watched)
    found = folder.manifests()
    assert looks == [["-none", "a", "b", "c", "gone"]]
    damaged = {name: found.pop(name) for name in ("-none", "b")}
    assert found == {"a": context("a"), "c": context("c")}
    assert "is not a valid manifest" in str(damaged["b"])
    assert all(isinstance(error, UserError) for error in damaged.values())


def test_manifests_that_are_none_are_refused(folder):
    save(folder, "a")
    path = folder.at("a") / "context.json"
    sound = path.read_bytes()
    for content, words in [
        (b"", "it is not a valid manifest"),
        (b"[]", "it is not a valid manifest"),
        (b'{"version": 2}', "it is not a valid manifest"),
        (
            sound.replace(b'"version":4', b'"version":7'),
            "has version 7 of the format, but this version of longhelix reads 2, 3, 4",
        ),
        (sound.replace(b"builtin", b"another"), "it has changed since it was saved"),
        (sound.replace(b'"num_tokens":5', b'"num_tokens":"x"'), "it is not a valid manifest"),
    ]:
        path.write_bytes(content)
        with pytest.raises(UserError, match=words) as refused:
            folder.manifest("a")
        assert code_of(refused) == "invalid_context"
    path.write_bytes(sound)
    (folder.at("a") / "token_ids.int32").write_bytes(TOKENS.tobytes()[::-1])
    with pytest.raises(UserError, match=r"token_ids\.int32: it has changed"):
        folder.token_ids(folder.manifest("a"))


@pytest.mark.parametrize(("kv_dtype", "is_read"), [("int4", False), ("int8", True), ("nvfp4", True)])
def test_keys_that_an_earlier_version_stored_in_another_way_are_refused(folder, kv_dtype, is_read):
    manifest = context("a", origin=msgspec.structs.replace(context("a").origin, kv_dtype=kv_dtype))
    with folder.new("a", False) as path:
        folder.finish(path, manifest, TOKENS, False)
    assert folder.manifest("a") == manifest
    path = folder.at("a") / "context.json"
    path.write_bytes(path.read_bytes().replace(b'"version":4', b'"version":3'))
    if is_read:
        assert folder.manifest("a") == manifest
        return
    with pytest.raises(UserError, match="stored KV in int4 differently: save it again") as refused:
        folder.manifest("a")
    assert code_of(refused) == "invalid_context"


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", ".a", "-a", "a/b", "a\\b", "/", "a\0b", "a\nb", "x" * 101, 1, None]
)
def test_names_that_are_none_of_a_folder_are_refused(folder, name):
    for ask in (context_name, folder.at, folder.remove, lambda name: folder.check_free(name, replace=True)):
        with pytest.raises(UserError, match="a context's name is") as refused:
            ask(name)
        assert code_of(refused) == "invalid_argument"


@pytest.mark.parametrize("name", ["a", "My paper, 2nd version", "論文", "a.b", "x" * 100])
def test_other_names_serve(folder, name):
    save(folder, name)
    assert folder.manifest(name).name == name


def test_a_name_that_is_not_there_is_refused_with_those_that_are(folder):
    with pytest.raises(UserError, match=r"there is no context 'x' in .*: the folder has no contexts") as refused:
        folder.manifest("x")
    assert code_of(refused) == "unknown_context"
    save(folder, "a")
    save(folder, "b")
    with pytest.raises(UserError, match="known contexts are a, b"):
        folder.remove("x")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "other"}, "was saved with another model \\(builtin\\)"),
        ({"dtype": "bfloat16"}, "saved with dtype float32, but dtype is now bfloat16: set dtype to float32"),
        ({"kv_dtype": "int8"}, "saved with kv_dtype float32, but kv_dtype is now int8"),
        (
            {"activation_dtype": "int8"},
            "activation_dtype None, but activation_dtype is now int8: leave activation_dtype out",
        ),
        (
            {"attention_dtype": "int8"},
            "attention_dtype None, but attention_dtype is now int8: leave attention_dtype out",
        ),
        ({"block_tokens": 8}, "saved with block_tokens 4, but block_tokens is now 8"),
        ({"rope": "other"}, "saved with other RoPE settings: set --rope-scaling to its value at that time"),
    ],
)
def test_a_context_is_refused_to_requests_of_other_kv(changes, words):
    context("a").check(ORIGIN)
    with pytest.raises(UserError, match=words) as refused:
        context("a").check(msgspec.structs.replace(ORIGIN, **changes))
    assert code_of(refused) == "context_mismatch"


def test_the_folder_is_that_of_the_users_data_unless_another_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert ContextFolder(None).path == tmp_path / "longhelix" / "contexts"
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ContextFolder(None).path == tmp_path / ".local" / "share" / "longhelix" / "contexts"
    monkeypatch.chdir(tmp_path)
    assert ContextFolder(Path("here")).path == tmp_path / "here"

    def homeless():
        raise RuntimeError

    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match="no home folder for contexts: set XDG_DATA_HOME"):
        ContextFolder(None).names()


# What the disk has, and what it is called here.
STRANGE = {
    b"not \xff UTF-8": "not \\udcff UTF-8",
    b"two\nlines": "two\\nlines",
    b"back\\slash": "back\\\\slash",
    b"-hyphen": "-hyphen",
    b" ": " ",
    b"x" * 200: "x" * 200,
    "\u202eleft".encode(): "\\u202eleft",
}


def make_strange(folder):
    folder.path.mkdir(parents=True, exist_ok=True)
    for name in STRANGE:
        os.mkdir(os.path.join(os.fsencode(folder.path), name))


def test_names_that_no_context_may_have_are_shown_and_removed(folder):
    save(folder, "sound")
    make_strange(folder)
    found = folder.manifests()
    assert set(found) == {"sound", *STRANGE.values()}
    assert found.pop("sound") == context("sound")
    for name, error in found.items():
        assert name.isprintable()
        name.encode()
        assert "has a name that is not allowed for contexts: rename it, or remove it" in str(error)
        str(error).encode()
        with pytest.raises(UserError, match="a context's name is"):
            folder.manifest(name)
        folder.remove(name)
    assert folder.names() == ["sound"]
    assert os.listdir(folder.path) == ["sound"]
    with pytest.raises(UserError, match="a context's name is"):
        folder.remove("not \\udcff UTF-8")


@pytest.mark.parametrize("name", ["\udcff", "a\ud800", "\u200b"])
def test_names_that_cannot_be_printed_are_refused(folder, name):
    with pytest.raises(UserError, match="a context's name "):
        folder.remove(name)


def test_what_is_no_folder_is_no_context_and_in_the_way_of_one(folder):
    save(folder, "sound")
    (folder.path / "file").write_text("it")
    (folder.path / "broken").symlink_to(folder.path / "nowhere")
    (folder.path / "loop").symlink_to(folder.path / "loop")
    assert folder.names() == ["sound"]
    for name in ("file", "broken", "loop"):
        for replace in (False, True):
            with pytest.raises(UserError, match="already exists and is not a folder") as refused:
                save(folder, name, replace=replace)
            assert code_of(refused) == "context_exists"
    assert sorted(os.listdir(folder.path)) == ["broken", "file", "loop", "sound"]


def test_a_link_is_removed_and_not_what_it_leads_to(folder, tmp_path):
    save(folder, "sound")
    os.rename(folder.path / "sound", tmp_path / "elsewhere")
    (folder.path / "link").symlink_to(tmp_path / "elsewhere")
    assert folder.manifest("link").name == "link"
    folder.remove("link")
    assert os.listdir(folder.path) == []
    assert (tmp_path / "elsewhere" / "context.json").exists()


@pytest.mark.parametrize("content", [b'{"a":' * 50_000, b"[" * 50_000, b'{"version":2,"x":"\xff"}', b"\0", None])
def test_manifests_of_any_kind_are_told_in_words(folder, content):
    save(folder, "sound")
    folder.path.joinpath("half").mkdir()
    path = folder.path / "half" / "context.json"
    path.mkdir() if content is None else path.write_bytes(content)
    found = folder.manifests()
    assert found["sound"] == context("sound")
    assert code_of(SimpleNamespace(value=found["half"])) == "invalid_context"
    folder.remove("half")
    assert folder.names() == ["sound"]
