"""The engine's part of one request's account: open (`EngineBook`), and as it is told to the API process."""

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from splittime.ledger.account import Account, Mark
from splittime.ledger.stages import Cause, Stage
from splittime.scheduler.queue import CauseLog

WAITING = (Stage.QUEUE, Stage.PREEMPTED)


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
        "account",
        "asked",
        "cached_tokens",
        "cause_log",
        "name",
        "next_cause",
        "num_preemptions",
        "recompute_until",
        "token_ready_ns",
        "token_steps",
        "waits",
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
