"""Text files that a user names."""

from pathlib import Path

from longhelix.errors import UserError


def read_text(path: Path) -> str:
    """All of a UTF-8 file as it is, its last newline included. Raises UserError if it cannot be read or is none."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}: convert it to UTF-8") from error
