"""The engine's part of one request's account: open (`EngineBook`), and as it is told to the API process.

The name that the books have for a request: its id, or of a long one the beginning, and a hash of all of it.

vLLM sets no limit to the id that a client gives (`X-Request-Id`, or `request_id` in a body), and the record of each
step repeats the ids of its rows: a million characters over 8,000 steps would be gigabytes. The engine's process and
the API process each call `name_of` where an id comes into their books, and so does who is asked for an account.
"""

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from splittime.ledger.account import Account, Mark
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.store import ID_PREFIXES
from splittime.scheduler.state import CauseLog

MOST_CHARACTERS = 128  # behind the prefix of a response's id
HASH_BYTES = 16
WAITING = (Stage.QUEUE, Stage.PREEMPTED)


def name_of(given: str) -> str:
    """Returns the name; of a name, itself. A prefix is kept, so that an account is found by either id of its request.

    An id may hold half of a character's two codes, which no encoder takes: the name has a `?` instead."""
    prefix = next((each for each in ID_PREFIXES if given.startswith(each)), "")
    own = given[len(prefix) :].encode("utf-8", "replace").decode()
    if len(own) <= MOST_CHARACTERS:
        return prefix + own
    digest = blake2b(own.encode(), digest_size=HASH_BYTES).hexdigest()
    return f"{prefix}{own[: MOST_CHARACTERS - len(digest) - 2]}..{digest}"


class AskedRequest(NamedTuple):
    """A request as the engine took it in. client: whose API process. answer_ids: they grow."""

    request_id: str
    client: int
    prompt_tokens: int
    max_tokens: int
    priority: int = 0
    computes_prompt: bool = False
    answer_ids: Iterable[int] = ()


class EndedBook(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The engine's part of a request's account, which has ended there at `ended_ns`."""

    request_id: str
    marks: list[Mark]
    ended_ns: int
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    token_steps: list[int]
    token_ready_ns: list[int]
    num_preemptions: int
    max_tokens: int
    priority: int
    computes_prompt: bool
    answer_ids: list[int]


class FirstTokenBook(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the engine's part says when the first token is there."""

    request_id: str
    marks: list[Mark]


class EngineBook:
    """The engine's part of one request's account, while it is open there. name: as the books have it.
    recompute_until: as in `scheduler.state.RequestState`. waits: in `engine_books.EngineQueue`."""

    __slots__ = (
        *("account", "asked", "cached_tokens", "cause_log", "name", "next_cause", "num_preemptions"),
        *("recompute_until", "token_ready_ns", "token_steps", "waits"),
    )

    def __init__(self, asked: AskedRequest, name: str, received_ns: int, cause: Cause) -> None:
        self.asked, self.name = asked, name
        self.account = Account(name, received_ns, Stage.QUEUE)
        self.account.marks[0] = Mark(Stage.QUEUE, cause, received_ns)
        self.account.cause = cause
        self.cause_log: CauseLog | None = None
        self.next_cause = 0
        self.waits = False
        self.cached_tokens: int | None = None
        self.num_preemptions = self.recompute_until = 0
        self.token_steps: list[int] = []
        self.token_ready_ns: list[int] = []

    @property
    def waiting_stage(self) -> Stage:
        return Stage.PREEMPTED if self.num_preemptions else Stage.QUEUE

    def wait(self, cause: Cause | None, now_ns: int) -> None:
        self.account.enter(self.waiting_stage, now_ns, cause)

    def stall(self, cause: Cause | None, now_ns: int) -> None:
        self.account.enter(Stage.DECODE_STALL if self.token_steps else Stage.PREFILL_STALL, now_ns, cause)

    def compute(self, start: int, now_ns: int) -> None:
        """Notes that it has a row which begins at this position."""
        if start < self.recompute_until:
            self.account.enter(Stage.RECOMPUTE, now_ns)
        elif self.account.stage is Stage.DECODE_STALL:
            self.account.enter(Stage.DECODE, now_ns)
        else:
            self.account.enter(Stage.PREFILL, now_ns)

    def ended(self, reason: str, now_ns: int) -> EndedBook:
        """Closes the book."""
        self.account.enter(Stage.DELIVER, now_ns)
        return EndedBook(
            self.name,
            self.account.marks[:-1],
            now_ns,
            reason,
            self.asked.prompt_tokens,
            self.cached_tokens or 0,
            self.token_steps,
            self.token_ready_ns,
            self.num_preemptions,
            self.asked.max_tokens,
            self.asked.priority,
            self.asked.computes_prompt,
            list(self.asked.answer_ids),
        )


class Answer:
    """One answer of a visit: what the engine knows as a request."""

    __slots__ = (
        *("cache_salt", "done_ns", "finish_reason", "first_chunk", "group_id", "marks", "num_tokens", "prompt_ids"),
        *("request_id", "written_ns"),
    )

    def __init__(self, request_id: str, group_id: str, marks: tuple[Mark, ...], cache_salt: str) -> None:
        self.request_id, self.group_id, self.marks, self.cache_salt = request_id, group_id, marks, cache_salt
        self.prompt_ids: Sequence[int] = ()
        self.num_tokens = self.first_chunk = 0
        self.done_ns: int | None = None
        self.finish_reason: str | None = None
        self.written_ns: list[int] = []
