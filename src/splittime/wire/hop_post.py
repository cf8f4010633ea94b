"""Posting hops from a thread of its own, so that what is measured never waits for who keeps it. Standard library alone.

Bounded: `MAX_QUEUED` posts wait, one is sent at a time for `TIMEOUT_S`, each once. The thread begins with the first
post, and anew in a process that was forked. When the interpreter ends, what waits has `LAST_S`.
"""

import atexit
import json
import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from typing import Any

log = logging.getLogger("splittime.trace")

MAX_QUEUED = 1024
TIMEOUT_S = 5.0
LAST_S = 2.0
PATH = "/ledger/hops"
REFUSAL_BYTES = 2048


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any) -> None:
        return None  # the key is for the address that it was given for


class HopPost:
    """`put` never waits and never raises. num_dropped: hops that could not be posted."""

    def __init__(self) -> None:
        self._url: str | None = None
        self._key: str | None = None
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._is_sending = self._is_failing = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.num_dropped = 0

    def to(self, url: str | None, key: str | None) -> None:
        """Post there from now on; None: nowhere. Raises `ValueError` for what is no http address."""
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("url is as http://127.0.0.1:8100, without a path")
        self._url, self._key = url.rstrip("/").removesuffix("/v1") if url is not None else None, key or None

    def put(self, body: dict[str, Any]) -> None:
        if self._url is None:
            return
        if self._pid != os.getpid():
            self._begin_anew()
        with self._changed:
            if len(self._waiting) < MAX_QUEUED:
                self._waiting.append(body)
                self._require_thread()
                self._changed.notify_all()
                return
        self.note_dropped(len(body["hops"]), f"{MAX_QUEUED} posts wait already")

    def note_dropped(self, count: int, why: str) -> None:
        """Count hops that are lost, and log the first of an outage."""
        if count:
            self.num_dropped += count
            if not self._is_failing:
                log.warning("hops are dropped: %s", why)
            self._is_failing = True

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits or is being sent. Returns False if that took longer than `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._is_sending), timeout_s)

    def _begin_anew(self) -> None:
        """In a forked process: no thread came along, and what waited is the parent's to post."""
        self._pid, self._thread, self._is_sending = os.getpid(), None, False
        self._waiting, self._changed = deque(), threading.Condition()

    def _require_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="splittime-hops", daemon=True)
            self._thread.start()
            atexit.register(self.flush, LAST_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                body, self._is_sending = self._waiting.popleft(), True
            self._send(body)
            with self._changed:
                self._is_sending = False
                self._changed.notify_all()

    def _send(self, body: dict[str, Any]) -> None:
        begin_s = time.monotonic()
        try:
            request = urllib.request.Request(f"{self._url}{PATH}", json.dumps(body, ensure_ascii=False).encode())
            request.add_header("Content-Type", "application/json")
            if self._key is not None:
                request.add_unredirected_header("Authorization", f"Bearer {self._key}")
            with self._opener.open(request, timeout=TIMEOUT_S):
                self._is_failing = False
        except urllib.error.HTTPError as error:
            self.note_dropped(len(body["hops"]), f"{self._url} answered {error.code}: {_words(error)}")
        except Exception as error:  # whatever it is: it is no fault of what was measured
            took_s = time.monotonic() - begin_s
            self.note_dropped(len(body["hops"]), f"{self._url} could not be asked in {took_s:.1f} s: {error}")


def _words(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(REFUSAL_BYTES))["error"]["message"])
    except Exception:  # no answer of ours
        return str(error.reason)
