"""Finds dead ends of guides: texts that a guide allows, but that cannot be completed.

llguidance rejects most schemas that no value satisfies. A bounded search finds some of the others.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from longhelix.compute.runner.matchers import Matchers
from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide, TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher

_EOS = 256
_BLANKS = frozenset(b" \t\r\n")
_MOST_STEPS = 500  # bytes of all texts that one search tries
_LONGEST_TEXT = 200
_MOST_S = 0.2  # of CPU time, for guides whose every byte takes long
_FEW_BYTES = 16  # that may follow: each of them is tried
_STRUCTURE = frozenset(b'"\\{}[]():,;<>=|')  # each of them is tried where many may follow
_QUOTED = 60  # characters of a text, in a message


class DeadEnds:
    """Searches for dead ends of guides, with texts of the bytes that a vocabulary has."""

    def __init__(self, table: TokenTable) -> None:
        has = set().union(*table.tokens)
        tokens = [bytes([byte]) if byte in has else b"" for byte in range(_EOS)]
        self._matchers = Matchers(TokenTable((*tokens, b"<end>"), (_EOS,), (_EOS,)))

    def check(self, guide: Guide) -> None:
        """Raise UserError for a guide with a dead end."""
        if guide.kind in ("regex", "choice"):
            return  # llguidance allows only texts that can be completed
        for schema in _schemas(guide):
            self._check_schema(schema)
        dead_end = self._search(guide)
        if dead_end is not None:
            text = dead_end.decode(errors="replace")
            raise UserError(
                f"the guide cannot be used: after {text[-_QUOTED:]!r} no text can end, so answers would continue to "
                "their token limit; change what the guide allows there",
                "invalid_guide",
            )

    def _check_schema(self, schema: Mapping[str, Any]) -> None:
        endless = _endless(schema)
        if endless is not None:
            raise UserError(
                f"the JSON schema cannot be used: no value satisfies {endless}, which requires itself endlessly; make "
                "what it requires optional, or add an alternative such as null",
                "invalid_guide",
            )
        for patterns, names in _closed_objects(schema):
            if not self._allows_new_names(patterns, names):
                raise UserError(
                    f"the JSON schema cannot be used: patternProperties {', '.join(patterns)[:_QUOTED]} match only "
                    f"keys that properties names already ({', '.join(names)[:_QUOTED] or 'none'}), and other keys are "
                    "not allowed: leave these patterns out",
                    "invalid_guide",
                )

    def _allows_new_names(self, patterns: list[str], names: list[str]) -> bool:
        """Return whether a key of an object can match one of the patterns without being one of the names."""
        null = {"type": "null"}
        schema = {
            "type": "object",
            "properties": dict.fromkeys(names, null),
            "required": names,
            "patternProperties": dict.fromkeys(patterns, null),
            "additionalProperties": False,
        }
        matcher = self._matchers.compiled(Guide.of_schema(schema))
        prefix = "{" + "".join(f"{json.dumps(name, ensure_ascii=False)}:null," for name in names)
        if not matcher.consume_tokens(list(prefix.encode())) or matcher.is_error():
            return True  # the guide requires another form, which the search covers
        return ord('"') in _allowed(matcher)

    def _search(self, guide: Guide) -> bytes | None:
        """Try some texts that differ as much as possible. Returns a text that cannot be completed, or None."""
        start, tried, steps = self._matchers.compiled(guide), Counter[tuple[bytes, int]](), 0
        until_s = time.process_time() + _MOST_S
        while steps < _MOST_STEPS:
            matcher, text = start.deep_copy(), bytearray()
            while len(text) < _LONGEST_TEXT:
                allowed = _allowed(matcher)
                if not allowed and _is_limit(matcher):
                    return None
                if not allowed - _BLANKS and not _goes_on_after_blanks(matcher, allowed):
                    return bytes(text)
                if allowed == {_EOS} or steps >= _MOST_STEPS or time.process_time() > until_s:
                    break
                place = bytes(sorted(allowed - {_EOS}))
                options = sorted(allowed - _BLANKS - {_EOS}) or sorted(allowed & _BLANKS)
                kinds = {byte: byte if len(options) <= _FEW_BYTES or byte in _STRUCTURE else -1 for byte in options}
                byte = min(options, key=lambda byte: (tried[place, kinds[byte]], tried[place, byte + _EOS], byte))
                tried[place, kinds[byte]] += 1
                tried[place, byte + _EOS] += 1
                matcher.consume_token(byte)
                text.append(byte)
                steps += 1
            else:
                continue
            if not text or steps >= _MOST_STEPS or time.process_time() > until_s:
                return None
        return None


def _allowed(matcher: "LLMatcher") -> set[int]:
    """Return the bytes that may come next, and _EOS if the text may end. Empty at a dead end."""
    if matcher.is_error():
        return set()
    bits = int.from_bytes(matcher.compute_bitmask(), "little")
    return set() if matcher.is_error() else {place for place in range(_EOS + 1) if bits >> place & 1}


def _is_limit(matcher: "LLMatcher") -> bool:
    """Return whether the matcher has reached a limit, which does not imply a dead end."""
    return matcher.is_error() and "NoExtension" not in matcher.get_error()


def _goes_on_after_blanks(matcher: "LLMatcher", allowed: set[int]) -> bool:
    """Return whether anything other than a blank may follow after blanks, such as a line break with indentation."""
    for blank in allowed & _BLANKS:
        after = matcher.deep_copy()
        after.consume_token(blank)
        following = _allowed(after)
        if following - _BLANKS or _is_limit(after):
            return True
        if blank != ord(" ") and ord(" ") in following:
            for _ in range(64):
                after.consume_token(ord(" "))
                following = _allowed(after)
                if following - _BLANKS:
                    return True
                if ord(" ") not in following:
                    break
    return False


def _schemas(guide: Guide) -> Iterator[Mapping[str, Any]]:
    """Yield the JSON schemas of a guide, including those inside of a grammar."""
    if guide.kind == "json_schema":
        yield json.loads(guide.text)
    elif guide.kind == "grammar":
        for part in guide.text.split("%json")[1:]:
            try:
                schema, _ = json.JSONDecoder().raw_decode(part.lstrip())
            except (ValueError, RecursionError):
                continue
            if isinstance(schema, dict):
                yield schema


def _resolved(root: Any, reference: object) -> Any:
    """Resolve a reference within a schema. Returns True, which allows everything, if it does not exist."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return True
    node = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        else:
            return True
    return node


def _children(root: Any, node: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the nested schemas that the value or a part of it may have to satisfy."""
    for name in ("properties", "patternProperties"):
        if isinstance(node.get(name), dict):
            yield from node[name].values()
    for name in ("prefixItems", "allOf", "anyOf", "oneOf"):
        if isinstance(node.get(name), list):
            yield from node[name]
    yield from (node.get(name, True) for name in ("items", "additionalProperties"))
    if "$ref" in node:
        yield _resolved(root, node["$ref"])


def _nodes(root: Any) -> list[dict[str, Any]]:
    """Return all schemas that a part of a value may have to satisfy."""
    nodes: dict[int, dict[str, Any]] = {}
    pending = [root]
    while pending:
        node = pending.pop()
        if isinstance(node, dict) and id(node) not in nodes:
            nodes[id(node)] = node
            pending += _children(root, node)
    return list(nodes.values())


def _endless(root: Any) -> str | None:
    """Return the description of a schema that only infinite values satisfy, or None."""
    finite: set[int] = set()  # ids of schemas that a finite value satisfies, or that llguidance rejects

    def is_finite(node: Any) -> bool:
        return not isinstance(node, dict) or id(node) in finite

    pending = _nodes(root)[::-1]  # parts mostly before schemas that contain them
    while pending:
        unresolved = []
        for node in pending:
            if all(map(is_finite, _required_parts(root, node, is_finite))):
                finite.add(id(node))
            else:
                unresolved.append(node)
        if len(unresolved) == len(pending):
            definitions = root.get("$defs", root.get("definitions"))
            names = [name for name, inner in (definitions or {}).items() if any(inner is node for node in unresolved)]
            if names:
                return f"the definition {names[0]!r}"
            return "it" if any(root is node for node in unresolved) else "a part of it"
        pending = unresolved
    return None


def _required_parts(root: Any, node: Mapping[str, Any], is_finite: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield the schemas of parts that every value must have. Of alternatives, prefers one that is finite."""
    if "$ref" in node:
        yield _resolved(root, node["$ref"])
    if isinstance(node.get("allOf"), list):
        yield from node["allOf"]
    for name in ("anyOf", "oneOf"):
        options = node.get(name)
        if isinstance(options, list) and options:
            yield next(filter(is_finite, options), options[0])
    if node.get("type") in ("object", ["object"]) and isinstance(node.get("required"), list):
        properties = node.get("properties", {})
        for name in node["required"]:
            if isinstance(name, str) and isinstance(properties, dict):
                other_schema = True if "patternProperties" in node else node.get("additionalProperties", True)
                yield properties.get(name, other_schema)
    least = node.get("minItems", 0)
    if node.get("type") in ("array", ["array"]) and isinstance(least, int) and least > 0:
        first = node.get("prefixItems", [])
        if isinstance(first, list):
            yield from first[:least]
            if least > len(first):
                yield node.get("items", True)


def _closed_objects(root: Any) -> Iterator[tuple[list[str], list[str]]]:
    """Yield patterns and property names of each schema with patternProperties that allows no other keys."""
    for node in _nodes(root):
        merged, pending = list[Mapping[str, Any]](), [node]
        while pending:
            part = pending.pop()
            if isinstance(part, dict) and all(part is not other for other in merged):
                merged.append(part)
                pending += part["allOf"] if isinstance(part.get("allOf"), list) else []
                pending += [_resolved(root, part["$ref"])] if "$ref" in part else []
        patterns, names = dict[str, None](), dict[str, None]()
        for part in merged:
            patterns |= dict.fromkeys(_names(part.get("patternProperties")))
            names |= dict.fromkeys([*_names(part.get("properties")), *_names(part.get("required"))])
        if patterns and any(part.get("additionalProperties") is False for part in merged):
            yield list(patterns), list(names)


def _names(container: object) -> list[str]:
    """Return the names in a list or dict. Schemas from users may have any value there, which counts as empty."""
    return [name for name in container if isinstance(name, str)] if isinstance(container, (dict, list)) else []
