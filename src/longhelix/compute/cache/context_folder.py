"""The folder of saved contexts. Each context is a folder, which exists with all of its files or not at all."""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import threading
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from longhelix.compute.cache.rank_file import damaged
from longhelix.compute.cache.saved_context import READ_VERSIONS, VERSION, SavedContext, check_version
from longhelix.errors import UserError
from longhelix.values import refused, text

_LONGEST_NAME = 100
_MANIFEST, _TOKENS = "context.json", "token_ids.int32"
_UNFINISHED = ".unfinished-"  # no context's name begins with a dot
_REMOVING = "removes contexts"  # the name of threads


class _Manifest(msgspec.Struct):
    """The contents of the file `context.json`."""

    version: int
    checksum: str  # SHA-256 of the bytes of `context`
    context: msgspec.Raw


class _Version(msgspec.Struct):
    version: int


def context_name(value: object) -> str:
    """Validate the name of a context. Raises UserError for a name that a folder cannot have."""
    name = text("a context's name", value)
    printable = bool(name.strip()) and name.isprintable()  # and so it can be encoded
    if not printable or name.startswith((".", "-")) or len(name.encode()) > _LONGEST_NAME:
        allowed = f"1 to {_LONGEST_NAME} printable bytes that do not begin with a dot or a hyphen"
        raise refused("a context's name", value, allowed)
    if "/" in name or "\\" in name:
        raise refused("a context's name", value, "a name without / and \\")
    return name


def _display_name(disk_name: str) -> str:
    """Return the name of a folder, or a unique printable form if no context may have the name."""
    return disk_name if _is_context_name(disk_name) else disk_name.encode("unicode_escape").decode()


def _is_context_name(name: str) -> bool:
    """Return whether a context may have the name."""
    try:
        context_name(name)
    except UserError:
        return False
    return True


class ContextFolder:
    """Saved contexts by name. Methods raise UserError if a context is missing or damaged, or cannot be written.

    Args:
        folder: The folder. None: a folder in the user's data directory, after the XDG base directory specification.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._has_cleaned_up = False  # after processes that ended while they saved

    @cached_property
    def path(self) -> Path:
        """The absolute path of the folder. Ranks may have another working directory."""
        if self._folder is not None:
            return self._folder.absolute()
        try:
            data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
        except RuntimeError as error:  # there is no home
            raise UserError(
                "this user has no home folder for contexts: set XDG_DATA_HOME, or --contexts-dir"
            ) from error
        return data.absolute() / "longhelix" / "contexts"

    def names(self) -> list[str]:
        """Sorted names of all folders, including damaged contexts and folders with other names (`_display_name`)."""
        return sorted(self._folders())

    def _folders(self) -> dict[str, str]:
        """Return the names of folders on disk, by displayed name."""
        try:
            return {_display_name(entry.name): entry.name for entry in os.scandir(self.path) if _is_context(entry)}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise disk_error(f"the folder of contexts {self.path} cannot be read", error) from error

    def at(self, name: str) -> Path:
        """Return the folder of an existing context."""
        if context_name(name) not in self.names():
            known = f"known contexts are {', '.join(self.names())}" if self.names() else "the folder has no contexts"
            raise UserError(f"there is no context {name!r} in {self.path}: {known}", "unknown_context")
        return self.path / name

    def to_remove(self, name: str) -> Path:
        """Return the folder with a displayed name, even if no context may have the name."""
        disk_name = self._folders().get(name) if isinstance(name, str) else None
        return self.at(name) if disk_name is None else self.path / disk_name

    def manifest(self, name: str) -> SavedContext:
        return self._manifest(name, self.at(name) / _MANIFEST)

    def manifests(self) -> dict[str, SavedContext | UserError]:
        """Return the manifests of all contexts by name, or the error of a damaged or invalid context."""
        manifests: dict[str, SavedContext | UserError] = {}
        for name in self.names():
            if not _is_context_name(name):
                manifests[name] = UserError(
                    f"the folder '{name}' has a name that is not allowed for contexts: rename it, or remove it",
                    "invalid_context",
                )
                continue
            try:
                manifests[name] = self._manifest(name, self.path / name / _MANIFEST)
            except UserError as error:
                if (self.path / name).is_dir():  # or it was removed meanwhile
                    manifests[name] = error
        return manifests

    def _manifest(self, name: str, path: Path) -> SavedContext:
        data = _read(path)
        try:
            version = msgspec.json.decode(data, type=_Version).version
        except (msgspec.MsgspecError, RecursionError) as error:
            raise damaged(path, "it is not a valid manifest") from error
        if version not in READ_VERSIONS:
            raise UserError(
                f"context {name!r} has version {version} of the format, but this version of longhelix reads "
                f"{', '.join(map(str, READ_VERSIONS))}: save it again",
                "invalid_context",
            )
        try:
            manifest = msgspec.json.decode(data, type=_Manifest)
            context = msgspec.json.decode(manifest.context, type=SavedContext)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise damaged(path, "it is not a valid manifest") from error
        if _sha256(bytes(manifest.context)) != manifest.checksum:
            raise damaged(path, "it has changed since it was saved")
        context = msgspec.structs.replace(context, name=name)  # a folder may be renamed
        check_version(version, context)
        return context

    def token_ids(self, context: SavedContext) -> "array[int]":
        path = self.at(context.name) / _TOKENS
        data = _read(path)
        if len(data) != 4 * context.num_tokens or _sha256(data) != context.tokens_checksum:
            raise damaged(path, "it has changed since it was saved")
        return array("i", data)

    def remove(self, name: str) -> None:
        with _disk_errors_in_words(f"context {name!r} cannot be removed"), self._removed(self.to_remove(name)):
            pass

    @contextmanager
    def _removed(self, path: Path, later: bool = False) -> Iterator[None]:
        """Remove a context, and restore it if the body fails.

        Args:
            later: Delete the files on a separate thread.
        """
        removed, lock = self.path / f"{_UNFINISHED}{secrets.token_hex(8)}", _lock(path)
        try:
            os.rename(path, removed)
            try:
                yield
            except BaseException:
                os.rename(removed, path)
                raise
        except BaseException:
            os.close(lock)
            raise
        if later:
            threading.Thread(target=_remove, args=(removed, lock), name=_REMOVING).start()
        else:
            _remove(removed, lock)

    def check_free(self, name: str, replace: bool) -> None:
        if context_name(name) in self.names() and not replace:
            raise UserError(
                f"a context {name!r} already exists in {self.path}: choose another name, or set replace",
                "context_exists",
            )
        if name not in self.names() and os.path.lexists(self.path / name):
            raise UserError(
                f"{self.path / name} already exists and is not a folder: choose another name, or remove it",
                "context_exists",
            )

    @contextmanager
    def new(self, name: str, replace: bool) -> Iterator[Path]:
        """Create a folder for the files of a context. It is deleted unless `finish` makes it the context's folder."""
        self.check_free(name, replace)
        with _disk_errors_in_words(f"context {name!r} cannot be saved in {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
            if not self._has_cleaned_up:
                self._has_cleaned_up = True
                unfinished = list(self.path.glob(f"{_UNFINISHED}*"))  # before there is one of its own
                threading.Thread(target=_remove_abandoned, args=(unfinished,), name=_REMOVING).start()
            folder, lock = _unfinished(self.path)
            try:
                yield folder
            finally:
                _remove(folder, lock)

    def finish(self, folder: Path, context: SavedContext, token_ids: "array[int]", replace: bool) -> None:
        """Turn a folder with the ranks' files into a context, in one atomic step. Raises OSError."""
        encoded = msgspec.json.encode(context)
        _write(folder / _TOKENS, token_ids.tobytes())
        _write(folder / _MANIFEST, msgspec.json.encode(_Manifest(VERSION, _sha256(encoded), msgspec.Raw(encoded))))
        _sync(folder)
        self.check_free(context.name, replace)
        path = self.path / context.name
        with self._removed(path, later=True) if context.name in self.names() else nullcontext():
            os.rename(folder, path)
        _sync(self.path)


def _unfinished(path: Path) -> tuple[Path, int]:
    """Create a folder in `path`. Returns it and its lock."""
    while True:
        folder = Path(mkdtemp(prefix=_UNFINISHED, dir=path))
        with suppress(FileNotFoundError):
            lock = _lock(folder)
            if folder.exists():
                return folder, lock
            os.close(lock)
        # Another process considered it abandoned before it was locked.


def _lock(folder: Path) -> int:
    """Lock a folder that is written or removed, and return its descriptor.

    While the descriptor is open, other processes do not consider the folder abandoned. The system releases the lock
    when the process ends. Without support for locks, other processes never remove the folder.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _is_context(entry: "os.DirEntry[str]") -> bool:
    """Whether an entry is a finished folder. Unreadable entries, such as links into protected folders, are not."""
    try:
        return entry.is_dir() and not entry.name.startswith(".")
    except OSError:
        return False


def _remove(folder: Path, lock: int) -> None:
    if folder.is_symlink():  # the target of a link is not ours
        folder.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_abandoned(folders: list[Path]) -> None:
    """Remove the folders of writers that have ended."""
    for folder in folders:
        with suppress(OSError):  # it is being written, or already removed
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def tokens_checksum(token_ids: "array[int]") -> str:
    return _sha256(token_ids.tobytes())


def disk_error(what: str, error: OSError) -> UserError:
    """Turn an OSError of a disk into a UserError."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"{what}: the disk is full, or the file exceeds the limit on file sizes; make room, or choose another "
            "--contexts-dir",
            "disk_full",
        )
    return UserError(f"{what}: {error.strerror or error}", "disk_error")


@contextmanager
def _disk_errors_in_words(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise disk_error(what, error) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
