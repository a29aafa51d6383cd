"""Models on the Hugging Face Hub: finds `ORG/NAME` in the hub's cache on this machine, or downloads it there.

huggingface_hub does the work, so its environment variables apply: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
Only data is downloaded, never code: config, tokenizer, and safetensors weights, or the GGUF files of one model.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from longhelix.errors import UserError
from longhelix.units import size

Files = Mapping[str, int | None]  # path in the repository to size in bytes, None if the hub does not say

_CONFIG = ("config.json", "hf_quant_config.json")
_PATTERNS = (
    *_CONFIG,
    "*.safetensors",
    "model.safetensors.index.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)
_WEIGHTS, _INDEX, _SUFFIX = "model.safetensors", "model.safetensors.index.json", ".safetensors"
_TEMPLATES = "additional_chat_templates/"
# Copies of the same weights in the format of their publisher, such as Mistral's.
_SECOND_COPIES = "consolidated*.safetensors"
_GGUF_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)
# Other files of repositories with GGUF models: image encoders, and statistics for quantisation.
_NO_MODELS = ("mmproj", "imatrix")
_GGUF_DEFAULT = "Q4_K_M"  # as in llama.cpp
_DEFAULT_ENDPOINT = "https://huggingface.co"
_LISTINGS = 2  # how often one download lists the repository, if somebody pushes to it meanwhile


@dataclass(frozen=True)
class HubModel:
    """Model on the hub, as a user names it.

    That is ORG/NAME, or for a GGUF model ORG/NAME/FILE.gguf, ORG/NAME:FILE.gguf or ORG/NAME:QUANTISATION.
    """

    name: str  # ORG/NAME
    gguf: str | None  # name of the GGUF file, or its quantisation such as Q4_K_M
    revision: str  # branch, tag or commit
    local: str  # what the user may have meant on this machine: "folder ORG/NAME" or "file ORG/NAME/FILE.gguf"

    @classmethod
    def of(cls, model: str, revision: str | None = None) -> HubModel | None:
        """Parse a model name.

        Returns None if it has another form, if a file or folder of that name exists, or if ORG/NAME/FILE.gguf begins
        with the name of a folder.
        """
        part = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
        match = re.fullmatch(rf"({part}/{part})(?::([A-Za-z0-9._/-]+)|/([A-Za-z0-9._/-]+\.gguf))?", model)
        if match is None or os.path.exists(model) or re.search(r"--|\.\.|[.-](/|$)|\.git$", match[1]):
            return None
        if match[3] is None:
            return cls(match[1], match[2], revision or "main", f"folder {match[1]}")
        if os.path.isdir(model.partition("/")[0]):
            return None
        return cls(match[1], match[3], revision or "main", f"file {model}")

    def wanted(self, files: Files) -> list[str]:
        """Return which of a repository's files to download. Raises UserError if it has no model that can run."""
        ggufs = _gguf_models(files)
        if self.gguf is not None:
            return self._parts(self._chosen(ggufs, self.gguf), files)
        if "config.json" in files and (_WEIGHTS in files or _INDEX in files):
            if "tokenizer.json" not in files:
                raise UserError(
                    f"{self.name} has no tokenizer.json, which longhelix needs: choose a repository that has one",
                    "invalid_checkpoint",
                )
            is_single = _WEIGHTS in files
            wanted = (file for file in files if _is_wanted(file))
            return [file for file in wanted if file == _WEIGHTS or not (is_single and file.endswith(_SUFFIX))]
        if ggufs:
            usual = _of_quantisation(ggufs, _GGUF_DEFAULT)
            return self._parts(self._chosen(usual, _GGUF_DEFAULT) if usual else ggufs[0], files)
        raise UserError(
            f"{self.name} has no config.json and safetensors weights: choose a repository of a model that has both, "
            "or a GGUF file",
            "invalid_checkpoint",
        )

    def _chosen(self, ggufs: list[str], asked: str) -> str:
        """Return the GGUF file that has the given name, or the only one of the given quantisation."""
        match = _GGUF_PART.fullmatch(asked)
        first = f"{match[1]}-00001-of-{match[3]}.gguf" if match else asked
        if first in ggufs:
            return first
        found = _of_quantisation(ggufs, asked)
        found = [file for file in found if not _GGUF_PART.fullmatch(file)] or found
        if not found:
            advice = f"choose one of {', '.join(ggufs)}" if ggufs else f"leave out {asked}"
            which = f"{self.name} has no GGUF file for {asked}"
            if self.local.startswith("file"):
                which = f"there is no {self.local} on this machine, and on the hub {which}"
            raise UserError(f"{which}: {advice}", "invalid_checkpoint")
        if len(found) > 1:
            raise UserError(
                f"{self.name} has {len(found)} GGUF files for {asked}: choose one of {', '.join(found)}",
                "invalid_checkpoint",
            )
        return found[0]

    def _parts(self, file: str, files: Files) -> list[str]:
        """Return all parts of the model that a GGUF file is the first part of, in order."""
        match = _GGUF_PART.fullmatch(file)
        if match is None:
            return [file]
        parts = [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]
        missing = [part for part in parts if part not in files]
        if missing:
            raise UserError(
                f"{self.name} has no {missing[0]}, which is one of the {len(parts)} parts of a split model: choose "
                "another file",
                "invalid_checkpoint",
            )
        return parts


def _gguf_models(files: Files) -> list[str]:
    """Return the GGUF models of a repository, sorted. The first part stands for a split model."""
    found = []
    for file in sorted(files):
        match = _GGUF_PART.fullmatch(file)
        is_model = file.endswith(".gguf") and not any(word in file.lower() for word in _NO_MODELS)
        if is_model and (match is None or int(match[2]) == 1):
            found.append(file)
    return found


def _of_quantisation(ggufs: list[str], name: str) -> list[str]:
    """Return the GGUF models with this quantisation, or another end of a name, in any case."""
    stem = name[: -len(".gguf")] if name.lower().endswith(".gguf") else name
    ending = re.compile(rf"(^|[-._/]){re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.gguf\Z", re.IGNORECASE)
    return [file for file in ggufs if ending.search(file)]


def find(model: str, revision: str | None = None, tell: Callable[[str], None] | None = None) -> str:
    """Return the path of a model. Downloads a model of the hub that is not in the cache.

    Args:
        model: "builtin", a path, or a hub ID (`HubModel`). An existing path is used even if it looks like a hub ID.
        revision: branch, tag or commit of the hub ID; "main" if None.
        tell: receives one line before a download. None logs it.

    Raises:
        UserError: the repository, the revision or a file does not exist or is not accessible, the hub cannot be
            reached, or the disk is full.
    """
    asked = HubModel.of(model, revision)
    if asked is None:
        _check_no_revision(model, revision)
        return model
    folder, files = _download(asked, asked.wanted, tell or logging.getLogger(__name__).info)
    return str(folder / files[0] if files[0].endswith(".gguf") else folder)


def find_config(model: str, revision: str | None = None) -> str:
    """Return the path of a folder with a model's config.json, which is downloaded without weights for a hub ID.

    For a GGUF model that is in the cache, this is the path of the file. Any other name is returned as it is. Raises
    UserError as `find` does, and for a GGUF model that is not in the cache, because its weights are in the same file.
    """
    asked = HubModel.of(model, revision)
    if asked is None:
        _check_no_revision(model, revision)
        return model

    def wanted(files: Files) -> list[str]:
        has_weights = "config.json" in files and (_WEIGHTS in files or _INDEX in files)
        if asked.gguf is not None or (not has_weights and _gguf_models(files)):
            return asked.wanted(files)
        if "config.json" not in files:
            raise UserError(f"{model} has no config.json: choose a repository of a model", "unknown_model")
        return [file for file in files if file in _CONFIG]

    def check_cached(files: Files, missing: list[str]) -> None:
        ggufs = [file for file in missing if file.endswith(".gguf")]
        if ggufs:
            weights = size(sum(files[file] or 0 for file in ggufs))
            raise UserError(
                f"{model} is a GGUF model, whose settings and weights ({weights}) are in the same files: download it "
                f"first with longhelix download {model}",
                "unknown_model",
            )

    folder, files = _download(asked, wanted, logging.getLogger(__name__).info, check_cached)
    return str(folder / files[0] if files[0].endswith(".gguf") else folder)


def _check_no_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        what = "a file or folder on this machine" if os.path.exists(model) else "not a model on the hub"
        raise UserError(f"revision is {revision!r}, but {model} is {what}: leave revision out")


def _is_wanted(file: str) -> bool:
    if "/" in file:
        return file.startswith(_TEMPLATES) and file.endswith(".jinja")
    return any(fnmatch(file, pattern) for pattern in _PATTERNS) and not fnmatch(file, _SECOND_COPIES)


def _download(
    asked: HubModel,
    wanted: Callable[[Files], list[str]],
    tell: Callable[[str], None],
    check: Callable[[Files, list[str]], None] = lambda files, missing: None,
) -> tuple[Path, list[str]]:
    """Bring the wanted files into the cache. Returns the folder of the revision, and the files.

    check: receives all files and those to download. It may raise UserError.
    """
    _check_environment()
    from huggingface_hub import constants, snapshot_download  # imported here because it loads an HTTP client
    from huggingface_hub.utils import tqdm

    class TerminalBar(tqdm):
        """Progress bar that is shown only on a terminal."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{"disable": None} | settings)

    cache = Path(constants.HF_HUB_CACHE)
    with _errors_in_words(asked, cache):
        for _ in range(_LISTINGS):
            repository = _repository(asked, cache)
            try:
                files = wanted(repository.files)
            except UserError as error:
                if repository.is_offline:
                    raise UserError(_in_part(asked.name, cache), "download_failed") from error
                raise
            missing = [file for file in files if file not in repository.cached]
            check(repository.files, missing)
            missing_bytes = sum(repository.files[file] or 0 for file in missing)
            if missing_bytes:
                _check_space(asked, missing_bytes, cache)
                tell(f"downloading {asked.name} ({size(missing_bytes)}) to {cache}")
            folder = Path(
                snapshot_download(
                    asked.name,
                    revision=asked.revision,
                    allow_patterns=[re.sub(r"([*?[])", r"[\1]", file) for file in files],
                    local_files_only=repository.is_offline,
                    library_name="longhelix",
                    tqdm_class=TerminalBar,
                )
            )
            if repository.is_offline and not _has_every_shard(folder):
                raise UserError(_in_part(asked.name, cache), "download_failed")
            # The folder is named after the commit. Another commit was pushed after the listing: list its files too.
            if repository.commit in (None, folder.name):
                return folder, files
        raise UserError(
            f"revision {asked.revision} of {asked.name} changed {_LISTINGS} times during the download: run the command "
            "again, or set the revision to a commit",
            "download_failed",
        )


def _check_environment() -> None:
    """Check the variables that huggingface_hub reads when it is imported. Raises UserError."""
    endpoint, token = os.environ.get("HF_ENDPOINT", _DEFAULT_ENDPOINT), os.environ.get("HF_TOKEN", "")
    try:
        parts = urlsplit(endpoint)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UserError(f"HF_ENDPOINT is {endpoint!r}: set it to a URL such as {_DEFAULT_ENDPOINT}, or unset it")
    if not token.isascii():
        raise UserError("HF_TOKEN has characters that no token has: copy it again from the hub's settings")
    try:
        import huggingface_hub.constants  # noqa: F401
    except ValueError as error:
        raise UserError(
            f"huggingface_hub cannot read the environment ({error}): set the variables whose names begin with HF_HUB_ "
            "to valid values, or unset them"
        ) from error


def _has_every_shard(folder: Path) -> bool:
    """Whether the weights that the index of a model names are there. Without an index, there is nothing to miss."""
    index = folder / _INDEX
    if not index.is_file():
        return True
    shards = json.loads(index.read_bytes()).get("weight_map", {}).values()
    return all((folder / shard).is_file() for shard in set(shards))


@dataclass(frozen=True)
class _Repository:
    """Files of one revision of a repository."""

    files: Files
    cached: Files  # those that are in the cache
    commit: str | None  # None if the hub is out of reach

    @property
    def is_offline(self) -> bool:
        """Whether only the cached files are known."""
        return self.commit is None


def _repository(asked: HubModel, cache: Path) -> _Repository:
    """List a repository's files. Uses the cache if the hub does not answer."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled, RevisionNotFoundError

    try:
        listed = HfApi().model_info(asked.name, revision=asked.revision, files_metadata=True)
    except RevisionNotFoundError:
        raise
    except (HTTPError, OfflineModeIsEnabled) as error:
        cached = _cached(asked.name, asked.revision)
        if cached:
            return _Repository(cached, cached, commit=None)
        if isinstance(error, HfHubHTTPError):
            raise
        why, what = (
            ("HF_HUB_OFFLINE is set", "unset it")
            if isinstance(error, OfflineModeIsEnabled)
            else (f"{constants.ENDPOINT} cannot be reached ({error})", "check the network")
        )
        raise UserError(
            f"there is no {asked.local}, the cache {cache} does not contain that model, and {why}: {what}, or "
            "give the path of a model",
            "download_failed",
        ) from error
    files = {file.rfilename: file.size for file in listed.siblings or ()}
    commit = str(listed.sha)
    return _Repository(files, _cached(asked.name, commit), commit)


def _cached(name: str, revision: str) -> Files:
    """Return the files of a revision that are in the cache, with their sizes."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    with suppress(CacheNotFound):
        for repository in scan_cache_dir().repos:
            if (repository.repo_type, repository.repo_id) == ("model", name):
                for snapshot in repository.revisions:
                    if revision in (snapshot.commit_hash, *snapshot.refs):
                        folder = snapshot.snapshot_path
                        return {str(file.file_path.relative_to(folder)): file.size_on_disk for file in snapshot.files}
    return {}


def _in_part(name: str, cache: Path) -> str:
    return (
        f"the cache {cache} does not contain all of {name}, and the hub is offline or refuses access: check the "
        "network, HF_HUB_OFFLINE and HF_TOKEN, then run the command again"
    )


def _check_space(asked: HubModel, missing_bytes: int, cache: Path) -> None:
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    if missing_bytes > free_bytes:
        raise UserError(
            f"{asked.name} needs {size(missing_bytes)}, but the disk of {cache} has {size(free_bytes)} free: make "
            "room, or set HF_HOME to a folder on another disk",
            "disk_full",
        )


@contextmanager
def _errors_in_words(asked: HubModel, cache: Path) -> Iterator[None]:
    """Turn the errors of huggingface_hub into UserErrors."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import logging as hub_logging

    name, hub = asked.name, constants.ENDPOINT
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()  # it warns of each attempt, and the last error says the same
    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError as error:
        raise UserError(
            f"access to {name} must be granted by its owner: request it at {hub}/{name}, then set HF_TOKEN to a token "
            "of your account",
            "download_failed",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"there is neither a {asked.local} on this machine nor a repository {name} at {hub}: check the name, and "
            "set HF_TOKEN if the repository is private",
            "download_failed",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{name} has no revision {asked.revision}: set the revision to a branch, a tag or a commit",
            "download_failed",
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(_in_part(name, cache), "download_failed") from error
    except errors.HfHubHTTPError as error:
        raise UserError(
            f"{hub} refused to send {name} with status {error.response.status_code}: try again later", "download_failed"
        ) from error
    except (errors.HTTPError, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk of {cache} became full during the download of {name}: make room and run the command again, "
                "or set HF_HOME to a folder on another disk",
                "disk_full",
            ) from error
        if isinstance(error, OSError) and error.filename is not None:  # a file's error, not the network's
            raise UserError(
                f"the cache {cache} cannot be used ({error.strerror}: {error.filename}): set HF_HOME to a folder that "
                "you can read and write",
                "download_failed",
            ) from error
        raise UserError(
            f"the download of {name} from {hub} to {cache} failed ({' '.join(str(error).split())}): check the network "
            "and the folder, then run the command again to continue",
            "download_failed",
        ) from error
    finally:
        hub_logging.set_verbosity(verbosity)
