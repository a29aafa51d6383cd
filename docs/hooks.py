"""mkdocs hook: fills pages with text from the code. The text cannot drift from what runs.

A line `{{ reference: NAME }}` becomes the output of the function NAME in `_REFERENCES`, and a line
`{{ code: FILE SYMBOL ... }}` becomes the source of these classes and functions of a file of this repository.
"""

import ast
import inspect
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest.mock import MagicMock, patch

_ROOT = Path(__file__).parent.parent
_MARK = re.compile(r"^\{\{ (reference|code): (.+) \}\}$", re.MULTILINE)
_ENGINE = "Engine"  # the group of options that many commands share


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace the marks of a page. Raises KeyError for a reference or symbol that does not exist."""
    return _MARK.sub(_filled, markdown)


def _filled(mark: re.Match[str]) -> str:
    if mark[1] == "reference":
        return _REFERENCES[mark[2]]()
    path, *symbols = mark[2].split()
    return _code(path, symbols)


def _code(path: str, symbols: list[str]) -> str:
    """The source of top-level classes and functions, as one block."""
    text = (_ROOT / path).read_text(encoding="utf-8")
    found = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    sources = [ast.get_source_segment(text, found[symbol]) for symbol in symbols]
    return f'```python title="{path}"\n' + "\n\n\n".join(filter(None, sources)) + "\n```"


def _table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _prose(text: str) -> str:
    """Text of the code as one line of Markdown, in which nothing is taken for HTML or a link."""
    return " ".join(text.split()).replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*")


# Command line


def _commands(app: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name in app:
        if not name.startswith("-"):
            yield (*path, name), app[name]
            yield from _commands(app[name], (*path, name))


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " ".join(f"`{choice}`" for choice in get_args(hint))
    arguments = [each for each in get_args(hint) if each not in (types.NoneType, Ellipsis)]
    if arguments:
        return ", ".join(dict.fromkeys(map(_type_name, arguments)))
    return {bool: "flag", int: "integer", float: "number", str: "text", Path: "path"}.get(hint, "")


def _options(command: Any) -> dict[str, list[list[str]]]:
    """Rows of options by the group that `--help-all` shows them in."""
    from longhelix.cli.help import RARE

    groups: dict[str, list[list[str]]] = {}
    for option in command.assemble_argument_collection(parse_docstring=True):
        if not option.parse or not option.show or option.children or "*" in option.names:
            continue
        group = option.parameter.group[0].name.removesuffix(RARE) if option.parameter.group else "Parameters"
        says, default = option.parameter.help or "", option.field_info.default
        if option.required:
            says += " Required."
        elif option.parameter.show_default is not False and default not in (None, inspect.Parameter.empty, ()):
            show = option.parameter.show_default
            says += f" [default: {show(default) if callable(show) else default}]"
        names = " ".join(f"`{name}`" for name in option.names)
        groups.setdefault(group, []).append([names, _type_name(option.hint), _prose(says)])
    return groups


def _command_line() -> str:
    from longhelix.cli.main import app

    parts, engine, in_engine = [], {}, {}
    for path, command in _commands(app):
        shown = "longhelix " + " ".join(path)
        summary, _, more = inspect.cleandoc(command.help or "").partition("\n\n")
        parts.append(f"## `{shown}`\n\n{_prose(summary)}\n")
        details = more.partition("Parameters\n-----")[0].strip()
        if details:
            parts.append(_prose(details) + "\n")
        if any(command[name].help for name in command if not name.startswith("-")):
            parts.append("It has commands of its own, which follow.\n")
            continue
        for group, rows in _options(command).items():
            if group == _ENGINE:
                engine |= {row[0]: row for row in rows}
                in_engine[shown] = [row[0] for row in rows]
                parts.append(
                    f"Engine options: {', '.join(in_engine[shown])}; see [Engine options](#engine-options).\n"
                    if len(rows) < 12
                    else "All [engine options](#engine-options).\n"
                )
                continue
            parts.append(f"**{group}**\n\n" + _table(["option", "value", "meaning"], rows) + "\n")
    whole = "## Engine options\n\n" + _table(["option", "value", "meaning"], list(engine.values())) + "\n"
    return whole + "\n" + "\n".join(parts)


# HTTP


def _application() -> Any:
    """The server's OpenAPI description. No engine runs: routes only need the model's name and settings."""
    from longhelix.serve import app, live

    serving, admission = MagicMock(), MagicMock()
    serving.model, serving.created_s, serving.max_model_len = "MODEL", 0, 1
    with patch.object(live, "server_description"), patch.object(app, "CallMiddleware", lambda app, **_: app):
        gate = app.build(serving, admission)
    return gate.openapi()


def _schema(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(map(_schema, schema[key])))
    if "enum" in schema or "const" in schema:
        return " ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"list of {_schema(schema.get('items', {})) or 'anything'}"
    return {"null": "null", "object": "object"}.get(schema.get("type", ""), str(schema.get("type", "any")))


def _http() -> str:
    api = _application()
    parts = ["## Endpoints\n"]
    rows = []
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            says = _prose(route.get("description", ""))
            statuses = " ".join(sorted(route["responses"]))
            rows.append([f"`{method.upper()} {path}`", says, _schema(body) if body else "", statuses])
    parts.append(_table(["endpoint", "what it does", "body", "statuses"], rows) + "\n")
    schemas = {name: each for name, each in api["components"]["schemas"].items() if each.get("properties")}
    bodies = [name for name in sorted(schemas) if name.endswith("Body")]
    answers = [name for name in sorted(schemas) if not name.endswith(("Body", "ValidationError"))]
    parts.append("## Request bodies\n")
    for name in (*bodies, *answers):
        if answers and name == answers[0]:
            parts.append("## Parts of requests and responses\n")
        schema = schemas[name]
        required = schema.get("required", ())
        rows = []
        for each, about in schema["properties"].items():
            default = "required" if each in required else f"`{about['default']}`" if "default" in about else ""
            rows.append([f"`{each}`", _schema(about), default, _prose(about.get("description", ""))])
        said = any(row[3] for row in rows)
        headings = ["field", "type", "default", "meaning"]
        text = _prose(schema.get("description", ""))
        table = _table(headings[: 3 + said], [row[: 3 + said] for row in rows])
        parts.append(f"### {name} {{ #{name.lower()} }}\n\n{text}\n\n{table}\n")
    return "\n".join(parts)


def _metrics() -> str:
    from prometheus_client.metrics import MetricWrapperBase

    from longhelix.serve import metrics
    from longhelix.spec.layout import Layout

    driver, config = MagicMock(), MagicMock()
    config.layout, config.scheduler.cache.windows = Layout(kvp=2), ()
    registry = MagicMock()  # notes what registers itself
    with patch.object(metrics, "CollectorRegistry", lambda: registry):
        metrics.Metrics(driver, config, "MODEL")
    rows = []
    for (collector,), _ in registry.register.call_args_list:
        if not isinstance(collector, MetricWrapperBase):
            continue  # the process's own metrics
        for family in collector.describe():
            ending = "_total" if family.type == "counter" else ""
            labels = " ".join(f"`{label}`" for label in collector._labelnames)
            rows.append([f"`{family.name}{ending}`", family.type, labels, _prose(family.documentation)])
    return _table(["metric", "type", "labels", "meaning"], rows)


# Configuration and support


def _engine_settings() -> str:
    from longhelix.engine.options import EngineOptions

    rows = []
    for setting in fields(EngineOptions):
        flag = setting.metadata["flag"] or setting.name.replace("_", "-")
        choices = getattr(setting.metadata["check"], "known", ())
        values = " ".join(f"`{choice}`" for choice in choices)
        rows.append(
            [
                f"`{setting.name}`",
                f"`--{flag}`",
                f"`{setting.default}`",
                _prose(setting.metadata["documentation"]) + (f" Values: {values}" if values else ""),
            ]
        )
    return _table(["Python, YAML", "option", "default", "meaning"], rows)


def _variables() -> str:
    from longhelix.cli.main import app

    names = sorted(
        {
            "LONGHELIX_" + name[2:].upper().replace("-", "_")
            for option in app["serve"].assemble_argument_collection()
            for name in option.names[:1]
            if name.startswith("--") and name != "--config"
        }
    )
    return ", ".join(f"`{name}`" for name in names) + "."


def _families() -> str:
    from longhelix.spec import FAMILIES, read_hf_config
    from longhelix.spec.missing_parts import missing_parts

    sizes = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 8, "intermediate_size": 4096}
    sizes |= {"num_key_value_heads": 4, "vocab_size": 200_000, "num_experts_per_tok": 2}
    whole = {"text_config": sizes, "vision_config": {"out_hidden_size": 2048, "deepstack_visual_indexes": []}}
    rows = []
    for name in sorted(FAMILIES):
        missing = missing_parts(read_hf_config({"model_type": name, **sizes, **whole}))
        rows.append([f"`{name}`", f"no: {', '.join(missing)}" if missing else "yes"])
    return _table(["`model_type` in config.json", "the engine runs it"], rows)


def _presets() -> str:
    parts = []
    for kind in ("models", "systems"):
        names = sorted(path.stem for path in (_ROOT / "src/longhelix/spec/presets" / kind).iterdir())
        parts.append(f"Presets of {kind}: {', '.join(f'`{name}`' for name in names)}.")
    return "\n\n".join(parts)


def _formats() -> str:
    from longhelix.spec import DTYPES, KV_DTYPES, WEIGHT_DTYPES

    known = list(dict.fromkeys((*DTYPES, *WEIGHT_DTYPES, *KV_DTYPES)))
    rows = [
        [f"`{dtype}`", *("yes" if dtype in each else "no" for each in (DTYPES, WEIGHT_DTYPES, KV_DTYPES))]
        for dtype in known
    ]
    return _table(["dtype", "activations", "weights", "KV cache"], rows)


def _packed_formats() -> str:
    from longhelix.spec import FORMATS

    codes = {"e4m3": "float of 8 bits", "e2m1": "float of 4 bits", "int8": "integer", "uint4": "integer"}
    rows = []
    for format in FORMATS.values():
        scales = format.weight_scales
        # float16 takes as many bytes as bfloat16. GGUF files have a table of their own.
        if format.codes is None or format.codes.scale == "float16" or format.codes.superblock:
            continue
        shared = "an output" if scales.numbers is None else f"{scales.numbers} inputs of an output"
        zero_points = " and a zero point of 8 bits" if format.codes.zero_points else ""
        vector_bits = scales.vector_bits + (scales.bits if scales.numbers is None else 0)
        rows.append(
            [
                f"`{format.name}`",
                f"{codes[format.codes.element]} (`{format.codes.element}`)",
                f"a scale of {scales.scale_bits} bits{zero_points} for {shared}",
                f"{format.weight_bytes:.4g}",
                f"{vector_bits // 8}",
            ]
        )
    return _table(["format", "number", "scales in memory", "bytes per weight", "more bytes per output"], rows)


_REFERENCES: dict[str, Callable[[], str]] = {
    "command-line": _command_line,
    "http": _http,
    "metrics": _metrics,
    "engine-settings": _engine_settings,
    "variables": _variables,
    "families": _families,
    "presets": _presets,
    "formats": _formats,
    "packed-formats": _packed_formats,
}
