"""Check that public classes have names of their own, and that paths and names in docs and docstrings exist.

A path is checked if its first folder is one of ours, a name in backticks (`module.symbol`, `Class.member`) if its first
part is a module or a public class of ours, or if only another module than the first part defines the second. Everything
else belongs to other projects, or is a field of a message.
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

_DOCS = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "deploy/README.md", "benchmarks/README.md")
_TOP_FOLDERS = ("src", "docs", "tests", "benchmarks", "csrc", "examples", "deploy")
_SUFFIXES = ("py", "md", "hpp", "cpp", "toml", "html", "js", "css")
_URL = re.compile(r"\w+://\S+|\]\([^)]*\)")
_QUOTED = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(rf"(?<![\w/.~<>*{{}}$-])(?:[\w.-]+/)+[\w.-]+\.(?:{'|'.join(_SUFFIXES)})(?![\w/])")
_FOLDER = re.compile(rf"(?:{'|'.join(_TOP_FOLDERS)})(?:/[\w.-]+)+/?")
_FILE = re.compile(r"[A-Za-z]\w*\.(?:py|cpp|hpp)")
_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(.*\))?")
# A text that cites a commit cites files of another project, which has docs/ and tests/ as well.
_CITATION = re.compile(r"\bat [0-9a-f]{12}\b|github\.com/")
_SHARED_FOLDERS = ("docs", "tests")
_FILE_ENDINGS = {*_SUFFIXES, "json", "yaml", "yml", "csv", "txt", "safetensors", "gguf", "jsonl", "png", "svg"}
# Bases that add no members which docs would name. A class with any other base from elsewhere may have any member.
_KNOWN_BASES = {"ABC", "Enum", "Exception", "Generic", "NamedTuple", "Protocol", "Struct", "TypedDict", "ValueError"}


class Package:
    """What the modules of a package define.

    modules: dotted name -> what can be imported from it. defined: public functions and classes of any module.
    classes: public class -> where each class of that name is defined. members: public class -> its members.
    """

    def __init__(self, folder: Path) -> None:
        self.modules: dict[str, set[str]] = defaultdict(set)
        self.defined: set[str] = set()
        self.classes: dict[str, list[tuple[Path, int]]] = defaultdict(list)
        self.members: dict[str, set[str]] = defaultdict(set)
        self.imported: set[str] = set(sys.stdlib_module_names)
        self._bases: dict[str, set[str]] = defaultdict(set)
        for path in sorted(folder.rglob("*.py")):
            self._add_module(path, folder)

    def _add_module(self, path: Path, folder: Path) -> None:
        parts = path.relative_to(folder.parent).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        for end in range(1, len(parts)):
            self.modules[".".join(parts[:end])].add(parts[end])
        tree = ast.parse(path.read_text("utf-8"))
        self.modules[".".join(parts)] |= set(_bound(tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self.imported |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name[0] != "_":
                self.defined.add(node.name)
            if isinstance(node, ast.ClassDef):
                self._add_class(node, path)

    def _add_class(self, node: ast.ClassDef, path: Path) -> None:
        if not node.name.startswith("_"):
            self.classes[node.name].append((path, node.lineno))
        self.members[node.name] |= set(_bound(node.body)) | {
            each.attr
            for each in ast.walk(node)
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
        }
        self._bases[node.name] |= {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}

    def has_member(self, name: str, member: str) -> bool:
        """Whether a class has a member, or may have it from a base outside of the package."""
        if member in self.members[name] or member.startswith("__"):
            return True
        bases = self._bases[name] - _KNOWN_BASES - {name}
        return any(base not in self._bases or self.has_member(base, member) for base in bases)

    def has(self, module: str, names: list[str]) -> bool:
        """Whether a module has a name, a submodule's name, or a class and its member."""
        first, *rest = names
        if f"{module}.{first}" in self.modules and rest:
            return self.has(f"{module}.{first}", rest)
        if first not in self.modules[module]:
            return False
        return not rest or first not in self.classes or self.has_member(first, rest[0])

    def wrong(self, name: str, variables: Collection[str]) -> str | None:
        """Why a dotted name points at nothing; None if it exists or is not of the package."""
        first, *rest = name.split(".")
        if first in self.classes:
            return None if self.has_member(first, rest[0]) else f"class {first} has no member {rest[0]}"
        if first in variables or first in self.imported or rest[-1] in _FILE_ENDINGS:
            return None
        modules = [each for each in self.modules if each.rpartition(".")[2] == first]
        if any(self.has(module, rest) for module in modules):
            return None
        if modules:
            return f"no module {first} has {'.'.join(rest)}"
        return f"no module {first} exists, and {rest[0]} lies elsewhere" if rest[0] in self.defined else None


def _bound(body: list[ast.stmt]) -> Iterator[str]:
    """The names that statements bind, those under `if` and `try` too."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            yield from (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
            for inner in ("body", "orelse", "finalbody"):
                yield from _bound(getattr(node, inner, []))


def _variables(tree: ast.Module) -> set[str]:
    """The variables, parameters and fields of a file: a dotted name that begins with one is no module's."""
    found = {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    stored = (ast.Store, ast.Del)
    found |= {each.id for each in ast.walk(tree) if isinstance(each, ast.Name) and isinstance(each.ctx, stored)}
    return found | {
        each.attr for each in ast.walk(tree) if isinstance(each, ast.Attribute) and isinstance(each.ctx, stored)
    }


def _strings(tree: ast.Module) -> set[str]:
    """String constants that are one word: fields of messages and keys of files."""
    constants = (each.value for each in ast.walk(tree) if isinstance(each, ast.Constant))
    return {value.rstrip(".") for value in constants if isinstance(value, str) and value.rstrip(".").isidentifier()}


def _texts(source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The lines of a file's docstrings and comments."""
    lines = source.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from enumerate(lines[node.lineno - 1 : node.end_lineno], node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _missing_paths(line: str, roots: list[Path], folders: Collection[str], files: Collection[str]) -> Iterator[str]:
    """Paths in a line that exist under none of the roots, and names in backticks that no file has."""
    for quoted in _QUOTED.findall(line):
        if _FILE.fullmatch(quoted) and quoted not in files:
            yield f"`{quoted}` is the name of no file"
    line = _URL.sub("", line)
    found = {match.group() for match in _PATH.finditer(line)}
    found |= {quoted for quoted in _QUOTED.findall(line) if _FOLDER.fullmatch(quoted)}
    for path in sorted(found):
        if path.partition("/")[0] in folders and not any((root / path).exists() for root in roots):
            yield f"{path} does not exist"


def _wrong_names(line: str, package: Package, variables: Collection[str]) -> Iterator[str]:
    for quoted in _QUOTED.findall(line):
        match = _NAME.fullmatch(quoted)
        why = package.wrong(match.group(1), variables) if match else None
        if why is not None:
            yield f"`{quoted}`: {why}"


def shared_names(package: Package) -> Iterator[str]:
    """Public classes that have the name of another."""
    for name, places in sorted(package.classes.items()):
        for path, line in places[1:]:
            other, other_line = places[0]
            yield f"{path}:{line}: the public class {name} shares its name with {other}:{other_line}"


def wrong_references(repository: Path, package: Package) -> Iterator[str]:
    """Paths and names in docs, docstrings and comments that do not exist."""
    home = repository / "src" / "longhelix"
    folders = {*_TOP_FOLDERS, ".", "..", *(path.name for path in home.rglob("*") if path.is_dir())}
    files = {path.name for folder in _TOP_FOLDERS for path in (repository / folder).rglob("*.*")}
    fields: set[str] = set()
    for path in sorted(home.rglob("*.py")):
        source = path.read_text("utf-8")
        tree = ast.parse(source)
        fields |= _strings(tree)
        variables = _variables(tree) | _strings(tree)
        roots, own = [repository, home, path.parent], _own_folders(folders, source)
        for number, line in _texts(source, tree):
            for why in (*_missing_paths(line, roots, own, files), *_wrong_names(line, package, variables)):
                yield f"{path}:{number}: {why}"
    for path in sorted({path for pattern in _DOCS for path in repository.glob(pattern)}):
        roots = [repository, home, path.parent]
        for number, line, paragraph in _doc_lines(path.read_text("utf-8")):
            own = _own_folders(folders, paragraph)
            for why in (*_missing_paths(line, roots, own, files), *_wrong_names(line, package, fields)):
                yield f"{path}:{number}: {why}"


def _doc_lines(text: str) -> Iterator[tuple[int, str, str]]:
    """Each line of a document with its number and its paragraph."""
    first = 1
    for paragraph in text.split("\n\n"):
        lines = paragraph.split("\n")
        yield from ((number, line, paragraph) for number, line in enumerate(lines, first))
        first += len(lines) + 1


def _own_folders(folders: Collection[str], text: str) -> Collection[str]:
    """The folders that a text means as the repository's own."""
    return set(folders) - set(_SHARED_FOLDERS) if _CITATION.search(text) else folders


def main(repository: Path) -> int:
    package = Package(repository / "src" / "longhelix")
    lines = [*shared_names(package), *wrong_references(repository, package)]
    print("\n".join(lines).replace(f"{repository}/", "") or "class names are unique; paths and names in docs exist")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1]))
