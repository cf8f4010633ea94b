"""Traces: when real users asked, and how much; no trace has the text.

Read without being told what it is:
    arrival_s,input_tokens,output_tokens[,prefix_blocks]   ours; lengths alone are enough where no times are needed
    TIMESTAMP,ContextTokens,GeneratedTokens                Azure's published header
    {"timestamp": ms, "input_length", "output_length", "hash_ids": [...]} a line   Mooncake's
    any other CSV                                          columns named by flags
Times count from the first row. `prefix_blocks`, and Mooncake's `hash_ids`, are the ids of the prompt's 512-token blocks
in order: equal ids mean equal tokens (`workload.TraceWorkload` makes them so, and prefix hits reproduce).

Reading what users bring: a file of text, plain or gzip, with errors that name file and line.
"""

import csv
import gzip
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np

from splittime.bench.distributions import Floats, LengthRows
from splittime.bench.spec import LoadSpec
from splittime.core.errors import ConfigError, NotFound

BLOCK_TOKENS = 512
MAX_TOKENS = 100_000_000
MAX_SPAN_S = 10 * 365.25 * 86_400
S_PER_UNIT = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
Blocks = tuple[int, ...]
GZIP_MAGIC = b"\x1f\x8b"
MAX_TEXT_BYTES = 2**30  # a small file may be packed from any number


class Columns(msgspec.Struct, frozen=True):
    """Which columns of a CSV to read; `time` may be None where only lengths are wanted."""

    time: str | None
    inputs: str
    outputs: str
    time_unit: str = "s"


_OURS = Columns("arrival_s", "input_tokens", "output_tokens")
_AZURE = Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_PREFIX = "prefix_blocks"


class Trace(msgspec.Struct, frozen=True):
    """Rows in the order of their times. `blocks` is None if the trace does not say."""

    path: str
    at_s: Floats | None
    rows: LengthRows
    blocks: tuple[Blocks, ...] | None = None

    def __len__(self) -> int:
        return len(self.rows.inputs)

    @property
    def mean_rate(self) -> float:
        """Arrivals a second, in the trace's own time."""
        assert self.at_s is not None
        return (len(self) - 1) / span_s if (span_s := float(self.at_s[-1])) > 0 else float(len(self))


class _Row(msgspec.Struct, frozen=True, gc=False):
    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: Blocks | None


class _Mooncake(msgspec.Struct, frozen=True):
    """A line of Mooncake's JSONL; other fields of it are its own business."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: Blocks | None = None


def read_trace(spec: LoadSpec) -> Trace:
    """Raises `ConfigError` that names the file, and the line or the columns."""
    assert spec.trace is not None
    return _read(spec.trace, spec, "trace", needs_times=spec.arrival_kind == "trace" and not spec.is_closed)


def read_lengths(spec: LoadSpec) -> LengthRows:
    assert spec.lengths_file is not None
    return _read(spec.lengths_file, spec, "lengths_file", needs_times=False).rows.scaled(spec.length_scale)


def _read(path: str, spec: LoadSpec, param: str, needs_times: bool) -> Trace:
    text = read_text(path, param)
    if text.lstrip().startswith("{"):
        found, has_times = list(_mooncake_rows(path, text, param)), True
    else:
        found, has_times = _csv_rows(path, text, spec, param)
    if not found:
        raise bad_file(path, "there is no request in it", param)
    if needs_times and not has_times:
        hint = "Name it with --time-column, or say when with --rate or --concurrency."
        raise bad_file(path, "there is no column of times", param, hint)
    return _trace(path, found, has_times, param)


def _trace(path: str, found: list[_Row], has_times: bool, param: str) -> Trace:
    found = sorted(found, key=lambda row: row.at_s)
    span_s = found[-1].at_s - found[0].at_s
    if not span_s <= MAX_SPAN_S:
        why = f"its times span {span_s:.3g} s; {MAX_SPAN_S:.3g} s (ten years) is the most"
        raise bad_file(path, why, param, "Is --time-unit right?")
    at_s = np.array([row.at_s for row in found]) - found[0].at_s if has_times else None
    rows = LengthRows(np.array([row.input_tokens for row in found]), np.array([row.output_tokens for row in found]))
    blocks = tuple(row.blocks for row in found if row.blocks is not None)
    return Trace(path, at_s, rows, blocks if len(blocks) == len(found) else None)


def _mooncake_rows(path: str, text: str, param: str) -> Iterable[_Row]:
    decoder = msgspec.json.Decoder(_Mooncake)
    for number, line in lines(text):
        try:
            row = decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            hint = "A line is {timestamp (ms), input_length, output_length, hash_ids}."
            raise bad_line(path, number, str(error), param, hint) from error
        lengths = (_length(row.input_length), _length(row.output_length))
        if None in lengths:
            raise bad_line(path, number, f"lengths are 0 to {MAX_TOKENS}", param)
        yield _Row(row.timestamp / 1e3, row.input_length, row.output_length, row.hash_ids)


def _csv_rows(path: str, text: str, spec: LoadSpec, param: str) -> tuple[list[_Row], bool]:
    reader = csv.DictReader(text.split("\n"))
    try:
        header = reader.fieldnames or []
    except csv.Error as error:
        raise bad_file(path, f"is no CSV: {error}", param) from error
    columns = _columns(path, header, spec, param)
    read_time = _time_reader(columns)
    try:
        return [_csv_row(row, columns, read_time) for row in reader], columns.time is not None
    except (TypeError, ValueError, OverflowError, csv.Error) as error:
        raise bad_line(path, reader.line_num, str(error), param) from error


def _csv_row(row: dict[str, str], columns: Columns, read_time: Callable[[str], float]) -> _Row:
    lengths = [_length(float(row[name])) for name in (columns.inputs, columns.outputs)]
    if lengths[0] is None or lengths[1] is None:
        raise ValueError(f"lengths are whole numbers from 0 to {MAX_TOKENS}")
    at_s = read_time(row[columns.time]) if columns.time is not None else 0.0
    if _PREFIX in row and row[_PREFIX] is None:
        raise ValueError(f"no {_PREFIX}")
    blocks = parse_blocks(row[_PREFIX]) if _PREFIX in row else None
    return _Row(at_s, lengths[0], lengths[1], blocks)


def _length(value: float) -> int | None:
    return int(value) if 0 <= value <= MAX_TOKENS and value == int(value) else None


def _columns(path: str, header: Iterable[str], spec: LoadSpec, param: str) -> Columns:
    """By name if named, else the first known form whose lengths are there."""
    names = set(header)
    known = next((one for one in (_OURS, _AZURE) if {one.inputs, one.outputs} <= names), _OURS)
    time = spec.time_column or (known.time if known.time in names else None)
    chosen = Columns(time, spec.input_column or known.inputs, spec.output_column or known.outputs, spec.time_unit)
    missing = [one for one in (chosen.time, chosen.inputs, chosen.outputs) if one is not None and one not in names]
    if missing:
        hint = "Name its columns with --time-column, --input-column and --output-column."
        raise bad_file(path, f"no column {missing[0]!r} among {', '.join(sorted(names)) or 'none'}", param, hint)
    return chosen


def _time_reader(columns: Columns) -> Callable[[str], float]:
    """Numbers in the named unit, or dates; `arrival_s` is in seconds by its name."""
    scale = 1.0 if columns.time == _OURS.time else S_PER_UNIT[columns.time_unit]

    def read(text: str) -> float:
        try:
            value = float(text) * scale
        except ValueError:
            date = datetime.fromisoformat(text.strip())
            value = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
        if not np.isfinite(value):
            raise ValueError(f"{text!r} is no time")
        return value

    return read


def parse_blocks(text: str) -> Blocks:
    """`0 14-16` is (0, 14, 15, 16)."""
    ids: list[int] = []
    for part in text.split():
        first, dash, last = part.partition("-")
        begin, end = int(first), int(last if dash else first)
        if not 0 <= begin <= end or end - begin > MAX_TOKENS // BLOCK_TOKENS:
            raise ValueError(f"{part!r} is no range of blocks")
        ids.extend(range(begin, end + 1))
        if len(ids) > MAX_TOKENS // BLOCK_TOKENS:
            raise ValueError(f"more than {MAX_TOKENS // BLOCK_TOKENS:,} blocks")
    return tuple(ids)


def read_text(path: str, param: str) -> str:
    """Raises `NotFound` for no file and `ConfigError` for one that is no text."""
    file = Path(path)
    if not file.is_file():
        raise NotFound(f"no file at {path}", param=param, value=path)
    try:
        with file.open("rb") as plain:
            is_packed = plain.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        with gzip.open(file) if is_packed else file.open("rb") as opened:
            data = opened.read(MAX_TEXT_BYTES + 1)
        if len(data) > MAX_TEXT_BYTES:
            hint = "Take a part of it."
            what = f"{path} holds more than {MAX_TEXT_BYTES:,} bytes"
            raise ConfigError(what, param=param, value=path, limit=MAX_TEXT_BYTES, hint=hint)
        return data.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise ConfigError(f"cannot read {path}: {error}", param=param, value=path) from error


def lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1 as editors do; only a line feed ends one."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, line


def bad_line(path: str, number: int, why: str, param: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"{path}, line {number}: {why}", param=param, value=path, hint=hint)


def bad_file(path: str, why: str, param: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"{path}: {why}", param=param, value=path, hint=hint)
