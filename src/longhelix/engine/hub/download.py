"""Finds a model in the hub's cache on this machine, or downloads it there.

huggingface_hub does the work, so its environment variables apply: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE.
Only data is downloaded, never code: config, tokenizer, and safetensors weights, or the GGUF files of one model.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longhelix.engine.hub.errors import check_environment, errors_in_words, incomplete
from longhelix.engine.hub.model import CONFIG, INDEX, WEIGHTS, Files, HubModel, gguf_models
from longhelix.engine.hub.repository import has_every_shard, list_files
from longhelix.errors import UserError
from longhelix.units import size

_LISTINGS = 2  # how often one download lists the repository, if somebody pushes to it meanwhile


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
        has_weights = "config.json" in files and (WEIGHTS in files or INDEX in files)
        if asked.gguf is not None or (not has_weights and gguf_models(files)):
            return asked.wanted(files)
        if "config.json" not in files:
            raise UserError(f"{model} has no config.json: choose a repository of a model", "unknown_model")
        return [file for file in files if file in CONFIG]

    def check_cached(files: Files, missing: list[str]) -> None:
        ggufs = [file for file in missing if file.endswith(".gguf")]
        if ggufs:
            weights = size(sum(files[file] or 0 for file in ggufs))
            raise UserError(
                f"{model} is a GGUF model. Its settings and weights ({weights}) are in the same files: download it "
                f"first with longhelix download {model}",
                "unknown_model",
            )

    folder, files = _download(asked, wanted, logging.getLogger(__name__).info, check_cached)
    return str(folder / files[0] if files[0].endswith(".gguf") else folder)


def _check_no_revision(model: str, revision: str | None) -> None:
    if revision is not None:
        what = "a file or folder on this machine" if os.path.exists(model) else "not a model on the hub"
        raise UserError(f"revision is {revision!r}, but {model} is {what}: leave revision out")


def _download(
    asked: HubModel,
    wanted: Callable[[Files], list[str]],
    tell: Callable[[str], None],
    check: Callable[[Files, list[str]], None] = lambda files, missing: None,
) -> tuple[Path, list[str]]:
    """Bring the wanted files into the cache. Returns the folder of the revision, and the files.

    check: receives all files and those to download. It may raise UserError.
    """
    check_environment()
    from huggingface_hub import constants, snapshot_download  # imported here because it loads an HTTP client
    from huggingface_hub.utils import tqdm

    class TerminalBar(tqdm):
        """Progress bar that is shown only on a terminal."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, **{"disable": None} | settings)

    cache = Path(constants.HF_HUB_CACHE)
    with errors_in_words(asked, cache):
        for _ in range(_LISTINGS):
            repository = list_files(asked, cache)
            try:
                files = wanted(repository.files)
            except UserError as error:
                if repository.is_offline:
                    raise UserError(incomplete(asked.name, cache), "download_failed") from error
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
            if repository.is_offline and not has_every_shard(folder):
                raise UserError(incomplete(asked.name, cache), "download_failed")
            # The folder is named after the commit. Another commit was pushed after the listing: list its files too.
            if repository.commit in (None, folder.name):
                return folder, files
        raise UserError(
            f"revision {asked.revision} of {asked.name} changed {_LISTINGS} times during the download: run the command "
            "again, or set the revision to a commit",
            "download_failed",
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
