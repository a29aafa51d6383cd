"""The files of a repository: those on the hub, and those in the cache on this machine."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from longhelix.engine.hub.model import INDEX, Files, HubModel
from longhelix.errors import UserError


@dataclass(frozen=True)
class Repository:
    """Files of one revision of a repository."""

    files: Files
    cached: Files  # those that are in the cache
    commit: str | None  # None if the hub is out of reach

    @property
    def is_offline(self) -> bool:
        """Whether only the cached files are known."""
        return self.commit is None


def list_files(asked: HubModel, cache: Path) -> Repository:
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
            return Repository(cached, cached, commit=None)
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
    return Repository(files, _cached(asked.name, commit), commit)


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


def has_every_shard(folder: Path) -> bool:
    """Whether the weights that the index of a model names are there. Without an index, there is nothing to miss."""
    index = folder / INDEX
    if not index.is_file():
        return True
    shards = json.loads(index.read_bytes()).get("weight_map", {}).values()
    return all((folder / shard).is_file() for shard in set(shards))
