"""Traces of requests as they are published: longhelix's own columns, Azure's and Mooncake's."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from zlib import crc32

import msgspec

from longhelix.errors import UserError
from longhelix.request import MOST_TOKENS, ServiceLevel
from longhelix.simulate.arrival import Arrival
from longhelix.values import items, real, shown, whole

# Mooncake's hash_ids name the KV blocks of a prompt (arXiv 2407.00079): equal ids, equal tokens.
_MOONCAKE_PIECE_TOKENS = 512
_MOST_PIECES = 2**24
_REQUIRED = {
    "longhelix": ("arrival_s", "prompt_tokens", "output_tokens"),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "mooncake": ("timestamp", "input_length", "output_length"),
}
_OPTIONAL = ("prefix_id", "prefix_tokens", "client", "priority", "ttft_slo_s", "tbt_slo_s", "session", "think_s")

Record = Mapping[str, Any]


@dataclass(frozen=True)
class _Numbered:
    line: int
    record: Record


def read_csv(lines: Iterable[str], service: ServiceLevel) -> list[Arrival]:
    """The requests of a CSV file with a header, by time of arrival; the first arrives at 0.

    service: of requests whose columns do not say another. Raises UserError for lines that are no requests.
    """
    rows = csv.reader(lines)
    header = [name.strip().removeprefix("\ufeff") for name in next(rows, [])]
    kind = _kind(header)
    if kind is None:
        columns = "; ".join(",".join(names) for names in _REQUIRED.values())
        raise UserError(f"the trace's first line is {shown(','.join(header))}: begin with columns such as {columns}")
    return _sorted(kind, _csv_records(rows, header), service)


def read_jsonl(lines: Iterable[str], service: ServiceLevel) -> list[Arrival]:
    """The requests of a file with a JSON object in each line; otherwise as `read_csv`."""
    records = list(_json_records(lines))
    kind = _kind(records[0].record) if records else "longhelix"
    return _sorted(kind or "longhelix", records, service)


def _kind(names: Iterable[str]) -> str | None:
    given = set(names)
    return next((kind for kind, required in _REQUIRED.items() if given.issuperset(required)), None)


def _csv_records(rows: Any, header: list[str]) -> Iterator[_Numbered]:
    for row in rows:
        if not row:
            continue
        if len(row) != len(header):
            raise _no_request(rows.line_num, f"it has {len(row)} columns, and the header {len(header)}")
        yield _Numbered(rows.line_num, {name: value for name, value in zip(header, row, strict=True) if value != ""})


def _json_records(lines: Iterable[str]) -> Iterator[_Numbered]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise _no_request(number, f"it is not JSON ({error})") from error
        if not isinstance(record, dict):
            raise _no_request(number, "it is not a JSON object")
        yield _Numbered(number, record)


def _sorted(kind: str, records: Iterable[_Numbered], service: ServiceLevel) -> list[Arrival]:
    arrivals = []
    for numbered in records:
        try:
            arrivals.append(_arrival(kind, numbered.record, service))
        except UserError as error:
            raise _no_request(numbered.line, str(error)) from error
    if not arrivals:
        raise UserError("the trace has no requests: give at least one")
    arrivals.sort(key=lambda arrival: arrival.arrival_s)
    first_s = arrivals[0].arrival_s
    return [msgspec.structs.replace(arrival, arrival_s=arrival.arrival_s - first_s) for arrival in arrivals]


def _no_request(line: int, why: str) -> UserError:
    return UserError(f"line {line} of the trace is not a request: {why}", "invalid_trace")


def _arrival(kind: str, record: Record, service: ServiceLevel) -> Arrival:
    missing = [name for name in _REQUIRED[kind] if record.get(name) is None]
    if missing:
        raise UserError(f"{missing[0]} is missing")
    arrival, prompt, output = _REQUIRED[kind]
    prompt_tokens = whole(prompt, _number(record[prompt]), 1, MOST_TOKENS)
    output_tokens = whole(output, _number(record[output]), 1, MOST_TOKENS)
    match kind:
        case "azure":
            return Arrival(_timestamp_s(record[arrival]), prompt_tokens, output_tokens, service)
        case "mooncake":
            pieces = _pieces(record.get("hash_ids", ()))
            arrival_s = _seconds(arrival, record[arrival]) / 1e3
            return Arrival(arrival_s, prompt_tokens, output_tokens, service, pieces, _MOONCAKE_PIECE_TOKENS)
    for name in record:
        if name not in (*_REQUIRED[kind], *_OPTIONAL):
            raise UserError(f"{shown(name)} is not known: use {', '.join((*_REQUIRED[kind], *_OPTIONAL))}")
    pieces, piece_tokens = _prefix(record, prompt_tokens)
    arrival_s = _seconds(arrival, record[arrival])
    session, think_s = str(record.get("session", "")), _seconds("think_s", record.get("think_s", 0.0))
    if think_s and not session:
        raise UserError("think_s is of a session: give it one")
    level = _service(record, service)
    return Arrival(arrival_s, prompt_tokens, output_tokens, level, pieces, piece_tokens, session, think_s)


def _prefix(record: Record, prompt_tokens: int) -> tuple[tuple[int, ...], int]:
    """The one piece that prompts of a prefix id share: their first `prefix_tokens`, or all of the shorter prompt."""
    if record.get("prefix_id") is None:
        if record.get("prefix_tokens") is not None:
            raise UserError("prefix_tokens is given without a prefix_id: give both, or leave it out")
        return (), 1
    tokens = whole("prefix_tokens", _number(record.get("prefix_tokens", prompt_tokens)), 1, prompt_tokens)
    return (crc32(str(record["prefix_id"]).encode("utf-8", "surrogatepass")),), tokens


def _pieces(hash_ids: object) -> tuple[int, ...]:
    given = items("hash_ids", hash_ids, _MOST_PIECES, "whole numbers")
    return tuple(whole("a hash id", hash_id, 0, 2**63 - 1) for hash_id in given)


def _service(record: Record, service: ServiceLevel) -> ServiceLevel:
    said = {name: _number(record[name]) for name in ("priority", "ttft_slo_s", "tbt_slo_s") if name in record}
    if record.get("client") is not None:
        said["client"] = str(record["client"])
    return replace(service, **said) if said else service


def _seconds(name: str, value: object) -> float:
    return real(name, _number(value), lambda number: 0 <= number < 1e15, "a number from 0")


def _number(value: object) -> Any:
    """The number that a text of CSV is, or the value itself."""
    if not isinstance(value, str):
        return value
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            pass
    return value


def _timestamp_s(value: object) -> float:
    try:
        moment = datetime.fromisoformat(str(value))
    except ValueError as error:
        raise UserError(f"TIMESTAMP is {shown(value)}: give a date and a time") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
