"""What vLLM's engine client does for the requests of the API process.

Two methods are watched, on the instance: `generate`, for the tokens that each answer was given, and the core client's
`add_request_async`, which names the request as the engine will. Which HTTP request they are for is in a context
variable, not guessed from ids.
"""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any

from splittime.ledger.account import Mark

if TYPE_CHECKING:
    from splittime.attach.visits import WatchedRequest

VISIT: "ContextVar[WatchedRequest | None]" = ContextVar("splittime_visit", default=None)
CALL: "ContextVar[Call | None]" = ContextVar("splittime_call", default=None)

now_ns = time.monotonic_ns
log = logging.getLogger("splittime.attach")


def watch(client: Any) -> None:
    """Have the visits know what vLLM's engine client does for them. client: an `AsyncLLM`."""
    generate, core = client.generate, client.engine_core
    add = core.add_request_async

    async def watched(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
        outputs, visit = generate(*args, **kwargs), VISIT.get()
        call = None if visit is None else Call(visit, now_ns())
        CALL.set(call)
        try:
            async for output in outputs:
                if call is not None:
                    call.take(output)
                yield output
        finally:
            await outputs.aclose()  # now: vLLM aborts what is left when its generator is closed

    async def add_request_async(request: Any) -> Any:
        visit = VISIT.get()
        if visit is not None:
            visit.hand_off(request, CALL.get())
        return await add(request)

    client.generate, core.add_request_async = watched, add_request_async


def harmless(work: Callable[..., Any]) -> Callable[..., Any]:
    """A fault of ours is logged, and costs the request its account, no more."""

    @wraps(work)
    def guarded(*args: Any) -> Any:
        try:
            return work(*args)
        except Exception:
            log.exception("a request's account is not whole")
            return None

    return guarded


class Answer:
    """One answer of a visit: what the engine knows as a request."""

    __slots__ = (
        "cache_salt",
        "done_ns",
        "finish_reason",
        "first_chunk",
        "group_id",
        "marks",
        "num_tokens",
        "prompt_ids",
        "request_id",
        "written_ns",
    )

    def __init__(self, request_id: str, group_id: str, marks: tuple[Mark, ...], cache_salt: str) -> None:
        self.request_id, self.group_id, self.marks, self.cache_salt = request_id, group_id, marks, cache_salt
        self.prompt_ids: Sequence[int] = ()
        self.num_tokens = self.first_chunk = 0
        self.done_ns: int | None = None
        self.finish_reason: str | None = None
        self.written_ns: list[int] = []


class Call:
    """One call of `generate`, which has `n` answers."""

    __slots__ = ("_visit", "answers", "asked_ns")

    def __init__(self, visit: "WatchedRequest", asked_ns: int) -> None:
        self._visit, self.asked_ns = visit, asked_ns
        self.answers: list[Answer] = []

    @harmless
    def take(self, output: Any) -> None:
        """Count what the caller is about to be given. output: vLLM's `RequestOutput`, of new tokens only."""
        for part in output.outputs:
            if part.index >= len(self.answers):
                continue
            answer = self.answers[part.index]
            count = len(part.token_ids)
            answer.num_tokens += count
            self._visit.unwritten.append((answer, count))
            if part.finish_reason is not None:
                answer.finish_reason, answer.done_ns = part.finish_reason, now_ns()
