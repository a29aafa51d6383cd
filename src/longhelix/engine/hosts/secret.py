"""The secret that all hosts of a cluster share, and the CURVE keys that follow from it."""

import hashlib
import os
import stat
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import zmq
from zmq.utils import z85

from longhelix.errors import UserError

VARIABLE = "LONGHELIX_CLUSTER_SECRET"
_LEAST_BYTES = 16


@dataclass(frozen=True)
class Key:
    """A CURVE key pair, in Z85."""

    public: bytes
    secret: bytes


@dataclass(frozen=True)
class Keys:
    """Keys of a cluster. All followers have the same key, because all hosts have the same secret."""

    first: Key  # of the first host
    followers: Key


def read_secret(file: Path | None) -> str | None:
    """Return the secret in a file, or that of the environment. None if there is neither.

    Raises:
        UserError: the file cannot be read, all users of this host can read it, or the secret is too short.
    """
    if file is None:
        secret, where = os.environ.get(VARIABLE), VARIABLE
        secret = None if secret is None else secret.strip()
    else:
        where = f"the cluster secret file {file}"
        try:
            secret, is_exposed = file.read_text().strip(), _is_exposed(file)
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UserError(f"{where} cannot be read ({reason}): correct --cluster-secret-file") from error
        if is_exposed:
            raise UserError(f"all users of this host can read {where}: run chmod 600 {file}")
    if secret is not None and len(secret.encode()) < _LEAST_BYTES:
        raise UserError(
            f"{where} has {len(secret.encode())} bytes: use a random secret of at least {_LEAST_BYTES}, such as the "
            "output of openssl rand -hex 32"
        )
    return secret


def _is_exposed(file: Path) -> bool:
    """Whether all users of this host can read a file.

    Secrets of containers often have such a mode, but their file systems are read-only and belong to one container.
    """
    return bool(file.stat().st_mode & stat.S_IROTH) and not os.statvfs(file).f_flag & os.ST_RDONLY


@cache
def keys_of(secret: str) -> Keys:
    """Derive the keys of a cluster from its secret."""
    return Keys(_key(secret, "first host"), _key(secret, "followers"))


def _key(secret: str, owner: str) -> Key:
    salt = f"longhelix cluster: {owner}".encode()
    own = z85.encode(hashlib.scrypt(secret.encode(), salt=salt, n=2**14, r=8, p=1, dklen=32))
    return Key(zmq.curve_public(own), own)
