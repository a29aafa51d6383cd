"""Read request traces, in longhelix's own format or in the formats of published traces."""

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import msgspec

from longhelix.errors import UserError
from longhelix.scheduler.request import MOST_TOKENS, ServiceLevel
from longhelix.simulate.arrival import Arrival
from longhelix.values import items, real, refused, shown, whole

_MOST_HASHES = 2**24  # maximum number of hash ids of one prompt


@dataclass(frozen=True)
class _Format:
    """The columns of a trace format and their units."""

    name: str
    arrival: str
    prompt: str
    output: str
    per_second: float = 1.0  # number of arrival time units per second
    hash_tokens: int = 1  # number of prompt tokens per hash id

    @property
    def required(self) -> tuple[str, str, str]:
        return self.arrival, self.prompt, self.output


_OWN = _Format("longhelix", "arrival_s", "prompt_tokens", "output_tokens")
_OWN_OPTIONAL = ("prefix_id", "prefix_tokens", "client", "priority", "ttft_slo_s", "tbt_slo_s", "session", "think_s")
_AZURE = _Format("Azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST_GPT = _Format("BurstGPT", "Timestamp", "Request tokens", "Response tokens")
_VIDUR = _Format("Vidur", "arrived_at", "num_prefill_tokens", "num_decode_tokens")
# hash_ids identify the KV blocks of a prompt (arXiv 2407.00079). Blocks with equal ids have equal tokens.
_MOONCAKE = _Format("Mooncake", "timestamp", "input_length", "output_length", per_second=1e3, hash_tokens=512)
# Bailian has the columns of Mooncake, in other units. Only Bailian also has the column `chat_id`.
_BAILIAN = _Format("Bailian", "timestamp", "input_length", "output_length", hash_tokens=16)
_FORMATS = (_OWN, _AZURE, _BURST_GPT, _VIDUR, _MOONCAKE)

Record = Mapping[str, Any]


@dataclass(frozen=True)
class _Numbered:
    line: int
    record: Record


def read_csv(lines: Iterable[str], service: ServiceLevel) -> list[Arrival]:
    """Read the requests of a CSV file with a header, sorted by arrival. The first request arrives at 0.

    Args:
        lines: The text of the file.
        service: Service level of every request, unless the request's own columns override it.

    Raises:
        UserError: The header is unknown, or a line is not a valid request.
    """
    rows = csv.reader(_unmarked(lines))
    header = [name.strip() for name in next(filter(_has_text, rows), [])]
    found = _format(header)
    if found is None:
        columns = "; ".join(f"{','.join(each.required)} ({each.name})" for each in _FORMATS)
        raise _no_header(header, f"start with a header such as {columns}")
    repeated = next((name for name in header if header.count(name) > 1), None)
    if repeated is not None:
        raise _no_header(header, f"name the column {shown(repeated)} only once")
    return _Reader(found, service).read(_csv_records(rows, header, found))


def read_jsonl(lines: Iterable[str], service: ServiceLevel) -> list[Arrival]:
    """Read the requests of a file with one JSON object per line. In all other respects, it works like `read_csv`."""
    records = list(_json_records(_unmarked(lines)))
    found = _format(records[0].record) if records else None
    return _Reader(found or _OWN, service).read(records)


def _unmarked(lines: Iterable[str]) -> Iterator[str]:
    """Remove the byte order mark that some editors write before the first line."""
    for number, line in enumerate(lines):
        yield line if number else line.removeprefix("\ufeff")


def _format(names: Iterable[str]) -> _Format | None:
    """Return the format with the most required columns among `names`; None if `names` has no required column."""
    given = set(names)
    best = max(_FORMATS, key=lambda each: len(given.intersection(each.required)))
    if not given.intersection(best.required):
        return None
    return _BAILIAN if best is _MOONCAKE and "chat_id" in given else best


def _has_text(row: list[str]) -> bool:
    return len(row) > 1 or bool("".join(row).strip())


def _csv_records(rows: Any, header: list[str], found: _Format) -> Iterator[_Numbered]:
    for row in filter(_has_text, rows):
        if len(row) != len(header):
            raise _no_request(rows.line_num, f"it has {len(row)} columns, but the header has {len(header)}", found)
        yield _Numbered(rows.line_num, {name: value for name, value in zip(header, row, strict=True) if value.strip()})


def _json_records(lines: Iterable[str]) -> Iterator[_Numbered]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            raise _no_request(number, f"it is not JSON ({error})") from error
        if not isinstance(record, dict):
            raise _no_request(number, "it is not a JSON object")
        yield _Numbered(number, record)


def _no_header(header: list[str], instead: str) -> UserError:
    return UserError(f"the first line of the trace is {shown(','.join(header))}: {instead}", "invalid_trace")


def _no_request(line: int, why: str, found: _Format | None = None) -> UserError:
    form = "" if found is None else f" in {found.name}'s format"
    return UserError(f"line {line} of the trace is not a request{form}: {why}", "invalid_trace")


@dataclass(frozen=True)
class _Reader:
    """Reads the records of one trace in order."""

    format: _Format
    service: ServiceLevel
    pieces: dict[object, int] = field(default_factory=dict)  # piece number of each hash id or prefix id read
    arrived_s: dict[str, float] = field(default_factory=dict)  # arrival time of the last request read of each session

    def read(self, records: Iterable[_Numbered]) -> list[Arrival]:
        arrivals = []
        for numbered in records:
            try:
                arrivals.append(self._arrival(numbered.record))
            except UserError as error:
                raise _no_request(numbered.line, str(error), self.format) from error
        if not arrivals:
            raise UserError("the trace has no requests: add at least one", "invalid_trace")
        arrivals.sort(key=lambda arrival: arrival.arrival_s)
        first_s = arrivals[0].arrival_s
        return [msgspec.structs.replace(arrival, arrival_s=arrival.arrival_s - first_s) for arrival in arrivals]

    def _arrival(self, record: Record) -> Arrival:
        arrival, prompt, output = self.format.required
        is_turn = self.format is _MOONCAKE and ("session_id" in record or "delay" in record)
        for name in self.format.required:
            if record.get(name) is None and not (is_turn and name == arrival):
                raise UserError(f"{name} is missing")
        prompt_tokens = _tokens(prompt, record[prompt], 1, MOST_TOKENS)
        # The step that ends a prompt also produces the first token of the answer.
        output_tokens = max(_tokens(output, record[output], 0, MOST_TOKENS), 1)
        if self.format is _OWN:
            return self._own(record, prompt_tokens, output_tokens)
        if self.format is _AZURE:
            return Arrival(_timestamp_s(record[arrival]), prompt_tokens, output_tokens, self.service)
        arrival_s, session, think_s = self._turn(record) if is_turn else (self._seconds(record, arrival), "", 0.0)
        pieces = self._hashed(record.get("hash_ids"))
        return Arrival(
            arrival_s=arrival_s,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            service=self.service,
            pieces=pieces,
            piece_tokens=self.format.hash_tokens,
            session=session,
            think_s=think_s,
        )

    def _turn(self, record: Record) -> tuple[float, str, float]:
        """Return a request's arrival time, its session, and its delay after the session's previous request."""
        session, delay_s = _name("session_id", record), self._seconds(record, "delay")
        before_s = self.arrived_s.get(session)
        if record.get(self.format.arrival) is not None:
            arrival_s = self._seconds(record, self.format.arrival)
        else:
            arrival_s = before_s or 0.0
        if before_s is None:  # the delay of a session's first request is added to its arrival time
            arrival_s, delay_s = arrival_s + delay_s, 0.0
        if session:
            self.arrived_s[session] = arrival_s
        return arrival_s, session, delay_s

    def _own(self, record: Record, prompt_tokens: int, output_tokens: int) -> Arrival:
        known = (*_OWN.required, *_OWN_OPTIONAL)
        for name in record:
            if name not in known:
                raise UserError(f"{shown(name)} is not known: use {', '.join(known)}")
        pieces, piece_tokens = self._prefix(record, prompt_tokens)
        arrival_s, think_s = self._seconds(record, _OWN.arrival), self._seconds(record, "think_s")
        session = _name("session", record)
        if think_s and not session:
            raise UserError("think_s is set, but session is not: set session, or leave out think_s")
        level = _service(record, self.service)
        return Arrival(
            arrival_s=arrival_s,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            service=level,
            pieces=pieces,
            piece_tokens=piece_tokens,
            session=session,
            think_s=think_s,
        )

    def _prefix(self, record: Record, prompt_tokens: int) -> tuple[tuple[int, ...], int]:
        """Return the piece that prompts with this prefix id share, and the length of the piece.

        If the record has no `prefix_tokens`, the piece is the whole prompt.
        """
        prefix_id, tokens = _name("prefix_id", record), record.get("prefix_tokens")
        if not prefix_id:
            if tokens is not None:
                raise UserError("prefix_tokens is set, but prefix_id is not: set prefix_id, or leave out prefix_tokens")
            return (), 1
        shared = prompt_tokens if tokens is None else _tokens("prefix_tokens", tokens, 1, prompt_tokens)
        return (self._piece(prefix_id),), shared

    def _hashed(self, hash_ids: object) -> tuple[int, ...]:
        given = () if hash_ids is None else items("hash_ids", hash_ids, _MOST_HASHES, "integers")
        return tuple(self._piece(whole("a hash id", hash_id, 0, 2**64 - 1)) for hash_id in given)

    def _piece(self, name: object) -> int:
        """Return the number of a named piece of a prompt. Each name has a different number."""
        return self.pieces.setdefault(name, len(self.pieces))

    def _seconds(self, record: Record, name: str) -> float:
        """Return a time field in seconds; 0 if the record does not have the field."""
        given = record.get(name)
        if given is None:
            return 0.0
        return real(name, _number(given), lambda number: 0 <= number < 1e15, "a number from 0") / self.format.per_second


def _service(record: Record, service: ServiceLevel) -> ServiceLevel:
    levels = ("priority", "ttft_slo_s", "tbt_slo_s")
    said = {name: _number(record[name]) for name in levels if record.get(name) is not None}
    if client := _name("client", record):
        said["client"] = client
    return replace(service, **said) if said else service


def _name(field: str, record: Record) -> str:
    """Return the value of a field as a string; empty if the record does not have the field."""
    given = record.get(field, "")
    if given is None:
        return ""
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise refused(field, given, "a string or an integer")
    return str(given)


def _tokens(name: str, value: object, least: int, most: int) -> int:
    """Return a number of tokens. Accepts floats such as 374.0, which some tools write."""
    number = _number(value)
    return whole(name, int(number) if isinstance(number, float) and number.is_integer() else number, least, most)


def _number(value: object) -> Any:
    """Parse a CSV value as a number. Returns the value unchanged if it is not a number."""
    if not isinstance(value, str) or "_" in value:
        return value
    for convert in (int, float):
        try:
            return convert(value)
        except ValueError:
            pass
    return value


def _timestamp_s(value: object) -> float:
    try:
        moment = datetime.fromisoformat(str(value).strip())
    except ValueError as error:
        raise UserError(f"TIMESTAMP is {shown(value)}: set it to a date and a time") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
