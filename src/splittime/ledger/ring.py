"""The latest records of a kind, bounded in number and in bytes: what a record takes is told by its length, since a long
answer's account has three numbers for each of its tokens."""

from collections import deque
from collections.abc import Iterator, Reversible
from typing import Generic, TypeVar

from splittime.ledger.account import ClosedAccount
from splittime.ledger.hops import Hop
from splittime.ledger.steps import StepRecord

ACCOUNT_BYTES, STEP_BYTES, HOP_BYTES = 1200, 800, 1024  # of one without tokens or rows; an account's places by id too
TOKEN_BYTES = 40  # of one of its numbers: the number, and its place in a tuple
INTERVAL_BYTES, PROMPT_PART_BYTES = 120, 190
ATTEMPT_BYTES, PART_BYTES = 700, 180  # one of its own, and of an upstream that was looked at, or a nested stage
ROW_BYTES, NAME_BYTES = 130, 60  # of a step: its numbers, and what a name takes beside its letters

Record = TypeVar("Record", ClosedAccount, StepRecord)


def weight_bytes(record: ClosedAccount | StepRecord | Hop) -> int:
    """Returns what a record takes in memory, roughly."""
    if isinstance(record, ClosedAccount):
        numbers = len(record.token_steps) + len(record.token_ready_ns) + len(record.token_written_ns)
        parts = INTERVAL_BYTES * len(record.intervals) + PROMPT_PART_BYTES * len(record.prompt_parts)
        texts = len(record.prefixes) + len(record.answer_prefixes)
        attempts = sum(ATTEMPT_BYTES + PART_BYTES * (len(a.considered) + len(a.nested)) for a in record.attempts)
        return ACCOUNT_BYTES + TOKEN_BYTES * numbers + parts + attempts + texts
    if isinstance(record, StepRecord):
        chances = sum([len(told) for _, told in record.told_drafts if not isinstance(told, int)])
        comings = [coming for coming in record.told_comings if not isinstance(coming, int)]
        named = (record.rows, record.verified, record.told_drafts, record.late_rows, comings)
        of_rows = sum([ROW_BYTES + len(row[0]) for rows in named for row in rows])
        of_rows += TOKEN_BYTES * (len(record.told_comings) - len(comings))
        victims = sum(NAME_BYTES + len(name) for name in record.victims)
        return STEP_BYTES + of_rows + TOKEN_BYTES * chances + victims
    return HOP_BYTES


class Ring(Generic[Record], Reversible[Record]):
    """The latest one stays, however large it is."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._records: deque[Record] = deque()
        self._weights: deque[int] = deque()  # of each, found once: a full ring lets one go for each that comes
        self.num_bytes = 0

    def add(self, record: Record) -> list[Record]:
        """Returns those that had to go, oldest first."""
        self._records.append(record)
        self._weights.append(weight_bytes(record))
        self.num_bytes += self._weights[-1]
        gone: list[Record] = []
        while len(self._records) > 1 and (len(self._records) > self._most or self.num_bytes > self._most_bytes):
            gone.append(self._records.popleft())
            self.num_bytes -= self._weights.popleft()
        return gone

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)

    def __reversed__(self) -> Iterator[Record]:
        return reversed(self._records)
