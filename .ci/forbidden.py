"""What no source of the package may have, and ruff has no rule for: methods and arguments, which have no module.

Ruff itself refuses exec, eval, shells and what unpickles (S102, S307, S602, S604, S605 and TID251 in pyproject.toml).
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_METHODS = {
    "recv_pyobj": "it unpickles what comes: send msgspec messages",
    "send_pyobj": "it pickles: send msgspec messages",
}
# Arguments, each with the values that it may have.
_ARGUMENTS: dict[str, tuple[tuple[object, ...], str]] = {
    "trust_remote_code": ((False,), "it runs code that comes with a model"),
    "allow_pickle": ((False,), "it unpickles arrays of objects"),
    "weights_only": ((True,), "without it weights are unpickled"),
    "shell": ((False,), "a shell reads its command as a program: give a list"),
}


def found(source: str) -> Iterator[tuple[int, str]]:
    """The lines that have any of it, and why that is refused."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(attr=name, lineno=line) | ast.Name(id=name, lineno=line) if name in _METHODS:
                yield line, f"{name}: {_METHODS[name]}"
            case ast.keyword(arg=name, value=value, lineno=line) if name in _ARGUMENTS:
                allowed, why = _ARGUMENTS[name]
                if not (isinstance(value, ast.Constant) and value.value in allowed):
                    yield line, f"{name}: {why}"
            case ast.Constant(value=name, lineno=line) if name in _METHODS or name == "trust_remote_code":
                yield line, f"{name!r}, as text: name it where it can be seen"


def main(folder: Path) -> int:
    lines = [
        f"{path}:{line}: {why}" for path in sorted(folder.rglob("*.py")) for line, why in found(path.read_text("utf-8"))
    ]
    print("\n".join(lines) or f"nothing forbidden in {folder}")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
