"""Reads text files that the user specifies."""

from pathlib import Path

from longhelix.errors import UserError


def read_text(path: Path) -> str:
    """Read a UTF-8 file unchanged, including a newline at its end. Raises UserError if the file cannot be read."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give the path of a readable text file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}: convert it to UTF-8") from error
