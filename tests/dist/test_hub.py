"""Models on the hub, from a small hub on loopback: as a user names them, and everything that can go wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hub import COMMIT, Hub
from oracle import FAMILIES, make_oracle, save_tokenizer_files

pytestmark = pytest.mark.dist

FIND = """
import sys
from longhelix.engine.hub.download import find
from longhelix.errors import UserError
try:
    print(find(*sys.argv[1:], tell=lambda line: print(line, file=sys.stderr)))
except UserError as error:
    print(error)
    sys.exit(2)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A repository with what publishers put beside the files that are needed."""
    oracle = make_oracle(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))
    save_tokenizer_files(oracle.path)
    (oracle.path / "modeling_toy.py").write_text("raise SystemExit('code of a repository ran')")
    (oracle.path / "pytorch_model.bin").write_bytes(b"a pickle")
    (oracle.path / "original").mkdir()
    shutil.copy(oracle.path / "model.safetensors", oracle.path / "original" / "model.safetensors")
    shutil.copy(oracle.path / "model.safetensors", oracle.path / "consolidated.safetensors")
    return oracle


@pytest.fixture
def hub(model, tmp_path):
    mute = tmp_path / "mute"
    shutil.copytree(model.path, mute, ignore=shutil.ignore_patterns("tokenizer.json"))
    repositories = {"toys/llama": model.path, "toys/gated": model.path, "toys/mute": mute}
    with Hub(repositories, gated={"toys/gated"}).serve() as found:
        yield found


@pytest.fixture
def python(hub, tmp_path):
    """Runs Python with this hub and a cache of its own. Returns its exit status, output and errors."""

    def run(*arguments, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")} | variables
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, done.stdout.strip(), done.stderr

    return run


@pytest.fixture
def find(python):
    return lambda *arguments, **variables: python("-c", FIND, *arguments, **variables)


def files_below(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_hub_id_is_downloaded_once_without_code_and_answers(python, hub, model):
    asked = "-m", "longhelix", "generate", "toys/llama", "--prompt", "w1 w2 w3", "--max-new-tokens", "4", "--json"
    status, out, err = python(*asked)
    assert status == 0, err
    assert "downloading toys/llama (" in err
    sent = {name.removeprefix("toys/llama/") for name in hub.downloads}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= sent
    assert not {"modeling_toy.py", "pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors"} & sent
    hub.downloads.clear()
    again = python(*asked)
    assert (again[0], hub.downloads) == (0, [])
    assert "downloading" not in again[2]
    local = python("-m", "longhelix", "generate", model.path, *asked[4:])
    tokens = [json.loads(answer)["token_ids"] for answer in (out, again[1], local[1])]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len(tokens[0]) == 4


def test_a_plan_reads_the_config_alone(python, hub):
    status, out, err = python(
        "-m", "longhelix", "plan", "toys/llama", "--system", "h100", "--context", "1k", "--max-gpus", "1"
    )
    assert status == 0, err
    assert out.startswith("toys/llama on h100: ")
    assert hub.downloads == ["toys/llama/config.json"]


def test_a_plans_commands_name_the_revision(python, tmp_path):
    asked = "-m", "longhelix", "plan", "toys/llama", "--system", "h100", "--context", "1k", "--max-gpus", "1"
    assert python(*asked, "--revision", COMMIT, "--out", tmp_path / "out")[0] == 0
    first = (tmp_path / "out" / "commands.txt").read_text().splitlines()[0]
    assert first == f"# The plan is for revision {COMMIT} of toys/llama: add --revision to a command."


def test_a_folder_of_the_same_name_wins(find, hub, tmp_path):
    (tmp_path / "toys" / "llama").mkdir(parents=True)
    assert find("toys/llama")[:2] == (0, "toys/llama")
    assert hub.downloads == []


def test_revisions_and_the_cache_without_the_hub(find, hub):
    status, out, err = find("toys/llama", "nightly")
    words = "toys/llama has no revision nightly: set the revision to a branch, a tag or a commit"
    assert (status, out, err) == (2, words, "")
    status, path, err = find("toys/llama", COMMIT)
    assert (status, path.endswith(COMMIT)) == (0, True), err
    assert find("toys/llama", COMMIT, HF_HUB_OFFLINE="1")[:2] == (0, path)
    assert find("toys/llama", COMMIT, HF_ENDPOINT="http://127.0.0.1:9")[:2] == (0, path)
    assert (
        "revision is 'main', but /tmp is a file or folder on this machine: leave revision out"
        in find("/tmp", "main")[1]
    )


MISTAKES = {
    "missing": (
        ("toys/lama",),
        {},
        "neither a folder toys/lama on this machine nor a repository toys/lama at ",
    ),
    "gated": (("toys/gated",), {}, "access to toys/gated must be granted by its owner: request it at "),
    "wrong token": (("toys/gated",), {"HF_TOKEN": "hf_other"}, "access to toys/gated must be granted"),
    "offline": (
        ("toys/llama",),
        {"HF_HUB_OFFLINE": "1"},
        "HF_HUB_OFFLINE is set: unset it, or give the path",
    ),
    "no hub": (("toys/llama",), {"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
    "no URL": (("toys/llama",), {"HF_ENDPOINT": "hub.local"}, "HF_ENDPOINT is 'hub.local': set it to a URL such as "),
    "half a URL": (("toys/llama",), {"HF_ENDPOINT": "http://[::1"}, "HF_ENDPOINT is 'http://[::1': set it to a URL"),
    "no port": (("toys/llama",), {"HF_ENDPOINT": "http://hub:x"}, "HF_ENDPOINT is 'http://hub:x': set it to a URL"),
    "no number": (
        ("toys/llama",),
        {"HF_HUB_DOWNLOAD_TIMEOUT": "soon"},
        "literal for int() with base 10: 'soon'): set the variables whose names begin with HF_HUB_ to valid values",
    ),
    "odd token": (("toys/gated",), {"HF_TOKEN": "hf_schlüssel"}, "HF_TOKEN has characters that no token has"),
    "no cache": (
        ("toys/llama",),
        {"HF_HOME": "/dev/null"},
        "the cache /dev/null/hub cannot be used (Not a directory: /dev/null/token): set HF_HOME to a folder that",
    ),
    "a file as cache": (
        ("toys/llama",),
        {"HF_HUB_CACHE": "/dev/null"},
        "the cache /dev/null cannot be used (Not a directory: /dev/null",
    ),
    "no tokenizer": (("toys/mute",), {}, "toys/mute has no tokenizer.json, which longhelix needs: choose a repository"),
    "no GGUF": (("toys/llama:Q4_K_M",), {}, "toys/llama has no GGUF file for Q4_K_M: leave out Q4_K_M"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_sentence_and_leave_no_files(find, hub, tmp_path, mistake):
    arguments, variables, words = MISTAKES[mistake]
    status, out, err = find(*arguments, **variables)
    assert (status, len(out.splitlines()), err) == (2, 1, "")
    assert words in out
    assert not {name for name in files_below(tmp_path) if "snapshots" in name or "blobs" in name}


def test_a_commit_that_is_pushed_after_the_listing_is_downloaded_whole(find, hub, model, tmp_path):
    """It has a file that the listing of the commit before does not have."""
    pushed = tmp_path / "pushed"
    shutil.copytree(model.path, pushed)
    (pushed / "chat_template.jinja").write_text("{{ messages[0].content }}")
    hub.pushed = [pushed]
    status, path, err = find("toys/llama")
    assert (status, path.endswith(COMMIT[::-1])) == (0, True), err
    assert "chat_template.jinja" in files_below(Path(path))
    assert find("toys/llama", HF_HUB_OFFLINE="1")[:2] == (0, path)


def test_a_repository_that_changes_again_and_again_is_given_up(find, hub, model):
    hub.pushed = [model.path] * 4
    status, out, _ = find("toys/llama")
    words = (
        "revision main of toys/llama changed 2 times during the download: run the command again, or set the revision"
    )
    assert (status, out.startswith(words)) == (2, True), out


def test_a_gated_repository_opens_with_the_token(find, hub):
    assert find("toys/gated", HF_TOKEN=hub.token)[0] == 0


def test_a_download_that_is_cut_ends_in_one_sentence_and_continues(find, hub, model, tmp_path):
    hub.cut_after = 1000
    status, out, err = find("toys/llama")
    assert (status, len(out.splitlines())) == (2, 1), err
    assert "the download of toys/llama from " in out
    assert "run the command again to continue" in out
    assert "cache" in find("toys/llama", HF_HUB_OFFLINE="1")[1]  # a part of a model is not taken for the model
    hub.cut_after = None
    hub.downloads.clear()
    status, path, _ = find("toys/llama")
    assert (status, hub.downloads) == (0, ["toys/llama/model.safetensors"])
    weights = model.path / "model.safetensors"
    assert (tmp_path / path / "model.safetensors").read_bytes() == weights.read_bytes()


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a full disk needs the right to mount a file system")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_told_before_the_download(find, hub, small_disk):
    status, out, err = find("toys/llama", HF_HOME=str(small_disk))
    assert (status, err) == (2, "")
    assert out.startswith("toys/llama needs ")
    assert out.endswith("free: make room, or set HF_HOME to a folder on another disk")
    assert hub.downloads == []
    assert not files_below(small_disk)


@pytest.fixture
def ggufs(hub, tmp_path):
    """A repository with GGUF models, one of which is split."""
    folder = tmp_path / "ggufs"
    (folder / "Q6_K").mkdir(parents=True)
    names = ["toy-BF16.gguf", "toy-Q8_0.gguf", "mmproj-toy-Q8_0.gguf", "toy-imatrix.gguf"]
    names += [f"Q6_K/big-Q6_K-0000{part}-of-00003.gguf" for part in (1, 2, 3)]
    for name in names:
        (folder / name).write_bytes(b"GGUF" + name.encode())
    hub.repositories["toys/ggufs"] = folder
    return folder


def test_gguf_files_are_chosen_by_name_or_quantisation(find, hub, ggufs):
    for asked in (":Q8_0", ":q8_0", ":toy-Q8_0.gguf", "/toy-Q8_0.gguf"):
        status, path, err = find(f"toys/ggufs{asked}")
        assert (status, path.endswith("/toy-Q8_0.gguf")) == (0, True), err
    assert hub.downloads == ["toys/ggufs/toy-Q8_0.gguf"]
    assert find("toys/ggufs:Q8_0", HF_HUB_OFFLINE="1")[1].endswith("/toy-Q8_0.gguf")
    known = "choose one of Q6_K/big-Q6_K-00001-of-00003.gguf, toy-BF16.gguf, toy-Q8_0.gguf"
    assert find("toys/ggufs:Q5_0")[1] == f"toys/ggufs has no GGUF file for Q5_0: {known}"
    (ggufs / "other-q8_0.gguf").write_bytes(b"GGUF")
    known = "choose one of other-q8_0.gguf, toy-Q8_0.gguf"
    assert find("toys/ggufs:Q8_0")[1] == f"toys/ggufs has 2 GGUF files for Q8_0: {known}"


def test_a_mistyped_path_of_a_gguf_file_is_read_as_both(find, hub, ggufs, tmp_path):
    status, out, _ = find("toys/missing/toy-Q8_0.gguf")
    words = "there is neither a file toys/missing/toy-Q8_0.gguf on this machine nor a repository toys/missing at "
    assert (status, out.startswith(words)) == (2, True), out
    words = "there is no file toys/ggufs/mine.gguf on this machine, and on the hub toys/ggufs has no GGUF file for mine"
    assert find("toys/ggufs/mine.gguf")[1].startswith(words)
    words = "there is no file toys/other/mine.gguf, the cache "
    assert find("toys/other/mine.gguf", HF_HUB_OFFLINE="1")[1].startswith(words)
    (tmp_path / "toys").mkdir()
    local = "toys/ggufs/toy-Q8_0.gguf", "./toys/ggufs/toy-Q8_0.gguf", str(tmp_path / "toys/x.gguf"), "../a/b/x.gguf"
    for path in local:
        # Without asking the hub. Whoever opens it says that there is no such file.
        assert find(path, HF_ENDPOINT="http://127.0.0.1:9")[:2] == (0, path)
    assert find("toys/ggufs:toy-Q8_0.gguf")[1].endswith("/toy-Q8_0.gguf")


def test_without_a_quantisation_a_gguf_repository_gives_q4_k_m_or_its_first_model(find, hub, ggufs):
    (ggufs / "Q6_K" / "big-Q6_K-00001-of-00003.gguf").unlink()
    assert find("toys/ggufs")[1].endswith("/toy-BF16.gguf")
    (ggufs / "toy-Q4_K_M.gguf").write_bytes(b"GGUF")
    assert find("toys/ggufs")[1].endswith("/toy-Q4_K_M.gguf")


def test_all_parts_of_a_split_model_are_downloaded(find, hub, ggufs):
    first, *others = sorted(path.name for path in (ggufs / "Q6_K").iterdir())
    for asked in (":Q6_K", f":Q6_K/{first}", f"/Q6_K/{others[1]}"):
        status, path, err = find(f"toys/ggufs{asked}")
        assert (status, path.endswith(f"/Q6_K/{first}")) == (0, True), err
    assert sorted(hub.downloads) == [f"toys/ggufs/Q6_K/{name}" for name in (first, *others)]
    (ggufs / "Q6_K" / others[0]).unlink()
    words = f"toys/ggufs has no Q6_K/{others[0]}, which is one of the 3 parts of a split model: choose another file"
    assert find("toys/ggufs:Q6_K")[1] == words


def test_a_plan_for_a_gguf_model_needs_it_in_the_cache(python, hub, ggufs):
    """Its settings are in the same files as its weights, which may be large."""
    asked = "-m", "longhelix", "plan", "toys/ggufs:Q8_0", "--system", "h100", "--context", "1k", "--max-gpus", "1"
    status, _, err = python(*asked)
    assert (status, hub.downloads) == (2, [])
    assert "download it first with longhelix download toys/ggufs:Q8_0" in err
