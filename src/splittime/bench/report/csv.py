"""A run as a table of its requests: one row each, in the order of their index, under a header that does not change.

Times are in ms from the run's begin, durations in ms; a field is empty where nothing was told. A text that a
spreadsheet would take for a formula, which may be a server's, has an apostrophe before it (OWASP, "CSV injection").
"""

import csv
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TextIO

from splittime.bench.book import requests
from splittime.bench.book.records import Outcome, Run
from splittime.core.files import write_whole

FORMULA_STARTS = ("=", "+", "-", "@", "\t")
COLUMNS: dict[str, Callable[[Outcome], Any]] = {
    "index": lambda o: o.index,
    "arm": lambda o: o.arm,
    "request_id": lambda o: _text(o.request_id),
    "phase": lambda o: o.phase.value,
    "ending": lambda o: o.ending.value,
    "session": lambda o: o.session,
    "turn": lambda o: o.turn,
    "worker": lambda o: o.worker,
    "intended_ms": lambda o: _ms(o.intended_ns),
    "held_ms": lambda o: _ms(o.held_ns),
    "picked_up_ms": lambda o: _ms(o.picked_up_ns),
    "connect_ms": lambda o: _ms(o.connect_ns),
    "sent_ms": lambda o: _ms(o.sent_ns),
    "headers_ms": lambda o: _ms(o.headers_ns),
    "first_chunk_ms": lambda o: _ms(o.chunk_ns[0] if o.chunk_ns else None),
    "last_chunk_ms": lambda o: _ms(o.chunk_ns[-1] if o.chunk_ns else None),
    "end_ms": lambda o: _ms(o.end_ns),
    "response_ttft_ms": lambda o: _ms(requests.response_ttft_ns(o)),
    "service_ttft_ms": lambda o: _ms(requests.service_ttft_ns(o)),
    "response_ms": lambda o: _ms(requests.response_ns(o)),
    "service_ms": lambda o: _ms(requests.service_ns(o)),
    "tpot_ms": lambda o: _ms(requests.tpot_ns(o)),
    "max_stall_ms": lambda o: _ms(requests.max_stall_ns(o)),
    "schedule_lag_ms": lambda o: _ms(requests.schedule_lag_ns(o)),
    "chunks": lambda o: len(o.chunk_ns),
    "prompt_tokens": lambda o: o.prompt_tokens,
    "output_tokens": lambda o: o.output_tokens,
    "cached_tokens": lambda o: o.cached_tokens,
    "expected_prompt_tokens": lambda o: o.expected_prompt_tokens,
    "expected_output_tokens": lambda o: o.expected_output_tokens,
    "expected_cached_tokens": lambda o: o.expected_cached_tokens,
    "status": lambda o: o.status,
    "finish_reason": lambda o: _text(o.finish_reason),
    "error": lambda o: _text(o.error),
    "tags": lambda o: _text(" ".join(f"{key}={value}" for key, value in sorted(o.tags.items()))),
    "resent": lambda o: o.resent,
}


def _text(text: str | None) -> str | None:
    """With line ends that every reader of CSV knows."""
    text = text and text.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text and text.startswith(FORMULA_STARTS) else text


def _ms(duration_ns: float | None) -> str | None:
    """To the nanosecond, and the same text for the same number."""
    return None if duration_ns is None else f"{duration_ns / 1e6:.6f}"


def write_csv(run: Run, path: Path) -> None:
    """Write whole or not at all. Raises `ConfigError` where it cannot be written."""
    file = io.StringIO(newline="")
    write_rows(run.outcomes, file)
    write_whole(path, file.getvalue().encode("utf-8", "replace"), param="csv")


def write_rows(outcomes: Iterable[Outcome], file: TextIO) -> None:
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(COLUMNS)
    for outcome in sorted(outcomes, key=lambda o: (o.index, o.arm)):
        rows.writerow([column(outcome) for column in COLUMNS.values()])
