"""One answer of the mock server: the declared `Timings`, what is asked, when each chunk is due, and its bytes."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from splittime.core.errors import ConfigError

if TYPE_CHECKING:
    from splittime.bench.mock_server import MockConnection, MockServer


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """What is declared, in ns.

    tokens_per_chunk: so many tokens are written as one event, when the last of them is due.
    buffer_chunks: events are held back until so many have gathered. nagle_every: each N-th chunk waits 40 ms more.
    freezes: (begin, length) counted from the first request: nothing goes on, not even a wait.
    error_rate: share of requests that are answered 500. break_rate: share whose stream breaks off halfway, with an
        error event; both drawn from `seed`.
    slots: at most so many at a time, the rest in a queue; None: no limit.
    """

    ttft_ns: int = 50_000_000
    ttft_per_token_ns: int = 0
    itl_ns: int = 10_000_000
    tokens_per_chunk: int = 1
    buffer_chunks: int = 1
    nagle_every: int = 0
    freezes: tuple[tuple[int, int], ...] = ()
    error_rate: float = 0.0
    break_rate: float = 0.0
    slots: int | None = None
    seed: int = 0

    def validate(self) -> None:
        for name in ("ttft_ns", "ttft_per_token_ns", "itl_ns", "nagle_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be below 0", param=name, value=getattr(self, name), limit=0)
        for name in ("tokens_per_chunk", "buffer_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", param=name, value=getattr(self, name), limit=1)
        for name in ("error_rate", "break_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is a share of requests", param=name, value=getattr(self, name), limit=1)
        if self.slots is not None and self.slots < 1:
            raise ConfigError("slots must be at least 1", param="slots", value=self.slots, limit=1)


def after(begin_ns: int, duration_ns: int, freezes: Sequence[tuple[int, int]]) -> int:
    """The instant at which so much time has passed since `begin_ns` outside all freezes (absolute, in order)."""
    at_ns = begin_ns
    for freeze_ns, length_ns in freezes:
        if freeze_ns + length_ns <= at_ns:
            continue
        if at_ns + duration_ns < freeze_ns:
            break
        duration_ns -= max(0, freeze_ns - at_ns)
        at_ns = freeze_ns + length_ns
    return at_ns + duration_ns


now_ns = time.monotonic_ns
MODEL = "mock"
TOKEN_TEXT = " tick"
NAGLE_STEP_NS = 40_000_000


class MockRequest(msgspec.Struct):
    """What it reads of a request's body."""

    prompt: Any = None
    messages: list[Any] | None = None
    max_tokens: int = 16
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool = False

    @property
    def output_tokens(self) -> int:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def prompt_tokens(self) -> int:
        if isinstance(self.prompt, list):
            return len(self.prompt)
        text = self.prompt if isinstance(self.prompt, str) else " ".join(str(m) for m in self.messages or ())
        return len(text.split())

    @property
    def includes_usage(self) -> bool:
        return bool((self.stream_options or {}).get("include_usage"))


class Answering:
    """One answer while it is written."""

    def __init__(self, connection: "MockConnection", server: "MockServer", asked: MockRequest, request_id: str) -> None:
        self._connection, self._server, self._asked = connection, server, asked
        self._id = f"cmpl-{request_id or 'mock'}"
        self._is_error, self._breaks = server.misfortune()
        self._entry: Any = None
        self._admitted_ns = 0
        self._written = 0  # tokens
        self._chunks = 0
        self._held: list[bytes] = []
        self._usual = b""  # the event that all chunks but the last are
        self._delay_ns = 0
        self._is_over = False

    def begin(self, admitted_ns: int) -> None:
        self._admitted_ns = admitted_ns
        self._next()

    def abandon(self) -> None:
        """The client is gone."""
        if not self._is_over:
            self._is_over = True
            if self._entry is not None:
                self._entry.cancel()
            self._server.leave(self)

    def _due_ns(self) -> int:
        """When the next chunk is due: with the last of its tokens."""
        timings, asked = self._server.timings, self._asked
        last = min(self._written + timings.tokens_per_chunk, asked.output_tokens)
        if not asked.stream:
            last = asked.output_tokens
        work_ns = timings.ttft_ns + asked.prompt_tokens * timings.ttft_per_token_ns + max(0, last - 1) * timings.itl_ns
        return after(self._admitted_ns, work_ns, self._server.freezes) + self._delay_ns

    def _next(self) -> None:
        if self._server.timings.nagle_every and self._chunks % self._server.timings.nagle_every == 1:
            self._delay_ns = NAGLE_STEP_NS
        else:
            self._delay_ns = 0
        due_ns = self._due_ns()
        self._entry = self._server.alarm.call_at(due_ns, lambda: self._write(due_ns))

    def _write(self, due_ns: int) -> None:
        if self._is_error:
            self._fail()
        elif not self._asked.stream:
            self._connection.answer(200, self._whole())
            self._end()
        else:
            self._stream(due_ns)

    def _fail(self) -> None:
        error = {"message": "the mock server was told to fail", "type": "server_error", "code": "declared"}
        self._connection.answer(500, {"error": error})
        self._end()

    def _stream(self, due_ns: int) -> None:
        asked, timings = self._asked, self._server.timings
        count = min(timings.tokens_per_chunk, asked.output_tokens - self._written)
        is_last = self._written + count >= asked.output_tokens
        if self._breaks and self._written + count > asked.output_tokens // 2:
            broken = b'data: {"error":{"message":"the mock server was told to break off"}}\n\n'
            self._connection.write(broken, is_last=True)
            self._end()
            return
        is_usual = not is_last and count == timings.tokens_per_chunk
        self._usual = self._usual or self._event(timings.tokens_per_chunk, is_last=False)
        self._held.append(self._usual if is_usual else self._event(count, is_last))
        self._written += count
        self._chunks += 1
        if is_last or len(self._held) >= timings.buffer_chunks:
            self._connection.write(b"".join(self._held) + (self._closing() if is_last else b""), is_last)
            self._server.lateness_ns.append(now_ns() - due_ns)
            self._held.clear()
        if is_last:
            self._end()
        else:
            self._next()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._connection.is_answered(self)
            self._server.leave(self)

    # ---- what is written

    def _event(self, count: int, is_last: bool) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_last else None}
        text = TOKEN_TEXT * count
        if self._asked.messages is not None:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        if self._asked.return_token_ids:
            choice["token_ids"] = [7] * count
        return b"data: " + msgspec.json.encode({"id": self._id, "model": MODEL, "choices": [choice]}) + b"\n\n"

    def _closing(self) -> bytes:
        if not self._asked.includes_usage:
            return b"data: [DONE]\n\n"
        last = {"id": self._id, "model": MODEL, "choices": [], "usage": self._usage(self._written)}
        return b"data: " + msgspec.json.encode(last) + b"\n\ndata: [DONE]\n\n"

    def _whole(self) -> dict[str, Any]:
        count = self._asked.output_tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "text": TOKEN_TEXT * count}
        if self._asked.messages is not None:
            choice["message"] = {"role": "assistant", "content": choice.pop("text")}
        return {"id": self._id, "model": MODEL, "choices": [choice], "usage": self._usage(count)}

    def _usage(self, output_tokens: int) -> dict[str, Any]:
        prompt_tokens = self._asked.prompt_tokens
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": prompt_tokens + output_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
