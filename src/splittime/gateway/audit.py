"""The audit log: who asked for what and how it ended, written off the request path by a thread of its own.

    {"at":"2026-11-27T06:41:02.123456Z","kind":"request",...}

A request hands over a small record and goes on; the queue of records is bounded, and what it does not hold is dropped,
counted, and told by the next line that is written (`kind: dropped`). A line has names, counts and codes; the prompt
only where the config says so, headers and keys never.
"""

import contextlib
import fcntl
import json
import logging
import os
import queue
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from splittime.core.errors import ConfigError
from splittime.gateway.config import AuditConfig
from splittime.ledger.account import ClosedAccount

log = logging.getLogger("splittime.gateway")

CLOSE_S = 5.0
BATCH = 256
MAX_PROMPT_BYTES = 64 * 1024
MAX_LINE_BYTES = 8 * 2**20
BEGIN = b'{"at":'


class AuditRecord(NamedTuple):
    at: datetime
    kind: str
    fields: Callable[[], dict[str, Any]]


class AuditLog:
    """Goes on with its file. Raises `ConfigError` for one that it cannot go on with."""

    def __init__(self, config: AuditConfig) -> None:
        self._config = config
        self._queue: queue.Queue[AuditRecord | None] = queue.Queue(config.max_queue)
        self._lock = threading.Lock()
        self.num_dropped = self.num_lines = self._untold = 0
        self._is_broken = False
        self._file, torn = _opened(Path(config.file))
        if torn:
            self.note("torn", {"bytes": torn})
        self._thread = threading.Thread(target=self._write, name="audit", daemon=True)
        self._thread.start()

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        self.put(AuditRecord(datetime.now(UTC), kind, lambda: fields))

    def note_request(self, account: ClosedAccount, body: bytes | None) -> None:
        """body: what was passed on. It is kept only where the config says so."""
        kept = body[:MAX_PROMPT_BYTES] if body is not None and self._config.prompts else None
        cut = body is not None and kept is not None and len(body) > len(kept)
        self.put(AuditRecord(datetime.now(UTC), "request", lambda: _of_request(account, kept, cut)))

    def put(self, record: AuditRecord) -> None:
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._drop(1)

    def _drop(self, count: int) -> None:
        with self._lock:
            self.num_dropped += count
            self._untold += count

    def stats(self) -> dict[str, Any]:
        return {"file": self._config.file, "lines": self.num_lines, "dropped": self.num_dropped}

    def close(self) -> None:
        """Write what is queued, within some seconds."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._file.close()

    # ---- the thread

    def _write(self) -> None:
        is_open = True
        while is_open:
            batch = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < BATCH:
                    batch.append(self._queue.get_nowait())
            is_open = None not in batch
            self._write_batch([record for record in batch if record is not None])

    def _write_batch(self, batch: list[AuditRecord]) -> None:
        """Whole or not at all: what a full disk took of it is taken off the file again."""
        with self._lock:
            untold, self._untold = self._untold, 0
        if untold:
            batch = [AuditRecord(datetime.now(UTC), "dropped", lambda: {"dropped": untold}), *batch]
        if not batch:
            return
        begin = self._file.tell()
        try:
            left = memoryview(b"".join(map(_line, batch)))
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self._take_off(begin, error)
            self._drop(len(batch) - bool(untold))
            with self._lock:
                self._untold += untold
            return
        self.num_lines, self._is_broken = self.num_lines + len(batch), False

    def _take_off(self, begin: int, error: OSError) -> None:
        if not self._is_broken:
            self._is_broken = True
            log.error("lines of the audit log cannot be written, and are counted as dropped: %s", error)
        with contextlib.suppress(OSError):
            self._file.truncate(begin)
            self._file.seek(begin)


def _line(record: AuditRecord) -> bytes:
    told = {"at": record.at.isoformat().replace("+00:00", "Z"), "kind": record.kind, **record.fields()}
    return json.dumps(told, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


def _of_request(account: ClosedAccount, body: bytes | None, is_cut: bool) -> dict[str, Any]:
    told = {
        "request_id": account.request_id,
        "tenant": account.tenant,
        "config": account.config_version,
        "endpoint": account.endpoint,
        "model": account.model,
        "upstreams": [attempt.upstream for attempt in account.attempts],
        "finish_reason": account.finish_reason,
        "error": None if account.error is None else account.error.code,
        "prompt_tokens": account.prompt_tokens,
        "output_tokens": account.output_tokens,
        "duration_ns": account.end_ns - account.start_ns,
    }
    if body is not None:
        told |= {"body": body.decode("utf-8", "replace"), "body_is_cut": is_cut}
    return told


def _opened(path: Path) -> tuple[BinaryIO, int]:
    """Returns the file there, at its end, and how many bytes of a line that was not finished were cut."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two that write would cut each other's lines
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LINE_BYTES))
        tail = file.read(MAX_LINE_BYTES)
        whole, _, torn = tail.rpartition(b"\n")
        last = whole.rpartition(b"\n")[2]
        is_log = _is_line(last) if last else torn.startswith(BEGIN[: len(torn)])
        if not is_log:
            raise ValueError("it has something else")
    except (OSError, ValueError, RecursionError) as error:
        hint = "give another file, and keep this one"
        message = f"audit.file: cannot go on with {path}: {error}"
        raise ConfigError(message, param="audit.file", value=str(path), hint=hint) from error
    if torn:
        file.truncate(size - len(torn))
    file.seek(size - len(torn))
    return file, len(torn)


def _is_line(text: bytes) -> bool:
    told = json.loads(text)
    return isinstance(told, dict) and "kind" in told
