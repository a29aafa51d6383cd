"""Errors of huggingface_hub and of its environment variables, as errors for users."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from longhelix.engine.hub.model import HubModel
from longhelix.errors import UserError

_DEFAULT_ENDPOINT = "https://huggingface.co"


def check_environment() -> None:
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


@contextmanager
def errors_in_words(asked: HubModel, cache: Path) -> Iterator[None]:
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
        raise UserError(incomplete(name, cache), "download_failed") from error
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


def incomplete(name: str, cache: Path) -> str:
    """Return the error for a model that is only partly in the cache, when the hub cannot send the rest."""
    return (
        f"the cache {cache} does not contain all of {name}, and the hub is offline or refuses access: check the "
        "network, HF_HUB_OFFLINE and HF_TOKEN, then run the command again"
    )
