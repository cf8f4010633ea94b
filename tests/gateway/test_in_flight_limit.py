"""How many an upstream is given at once: found from the wait in its queue, whatever the answers' lengths."""

import heapq
import random
from collections import deque

import pytest

from splittime.gateway.breaker import POLLS, WINDOW, InFlightLimit, account_wait_ns
from splittime.ledger.attempts import NestedStage
from splittime.ledger.stages import Cause, Stage

MS, S = 1_000_000, 1_000_000_000


class Simulated:
    """An upstream of `slots` that serves in order, under a gateway that has always more to send; a clock of its own."""

    def __init__(self, limit: InFlightLimit, slots: int, length_ns: int, jitter: float = 0.2) -> None:
        self.limit, self.slots, self.length_ns, self._jitter = limit, slots, length_ns, jitter
        self._draw, self._busy, self._queue, self.now_ns = random.Random(5), [], deque(), 0
        self.busy_ns = 0

    @property
    def in_flight(self) -> int:
        return len(self._busy) + len(self._queue)

    def run(self, num_answers: int, *, tells_waits: bool = True) -> list[int]:
        """Returns the limit after each answer."""
        seen, next_poll_ns = [], self.now_ns + S
        while len(seen) < num_answers:
            self._fill()
            end_ns, sent_ns, begin_ns = heapq.heappop(self._busy)
            while not tells_waits and next_poll_ns <= end_ns:
                self.limit.note_waiting(len(self._queue), self.in_flight + 1, next_poll_ns)
                next_poll_ns += S
            self.now_ns = end_ns
            if tells_waits:
                self.limit.note_wait(begin_ns - sent_ns, end_ns - sent_ns, sent_ns, end_ns)
            seen.append(self.limit.now)
        return seen

    def _fill(self) -> None:
        while self.in_flight < self.limit.now:
            self._queue.append(self.now_ns)
            if self.in_flight >= self.limit.now:
                self.limit.note_full()
        while self._queue and len(self._busy) < self.slots:
            lasts_ns = int(self.length_ns * self._draw.uniform(1 - self._jitter, 1 + self._jitter))
            self.busy_ns += lasts_ns
            heapq.heappush(self._busy, (self.now_ns + lasts_ns, self._queue.popleft(), self.now_ns))


@pytest.mark.parametrize("tells_waits", [True, False])
@pytest.mark.parametrize("slots", [1, 4, 16, 60])
def test_it_finds_the_upstreams_slots(slots, tells_waits):
    upstream = Simulated(InFlightLimit(128, 0.05), slots, 2 * S)
    upstream.run(3000, tells_waits=tells_waits)
    begin_ns, busy_ns = upstream.now_ns, upstream.busy_ns
    late = upstream.run(1500, tells_waits=tells_waits)
    assert slots - 2 - slots // 8 <= min(late)
    assert max(late) <= slots + 2 + slots // 8
    assert (upstream.busy_ns - busy_ns) / (upstream.now_ns - begin_ns) / slots > 0.9  # it is hardly ever idle


@pytest.mark.parametrize("tells_waits", [True, False])
def test_longer_answers_change_nothing(tells_waits):
    upstream = Simulated(InFlightLimit(12, 0.05), 16, S)
    upstream.run(200, tells_waits=tells_waits)
    upstream.length_ns = 60 * S
    assert set(upstream.run(200, tells_waits=tells_waits)) == {12}  # the most, as nobody waits there


def test_it_follows_an_upstream_that_becomes_smaller_and_larger():
    upstream = Simulated(InFlightLimit(64, 0.05), 32, S)
    upstream.run(2000)
    upstream.slots = 8
    assert upstream.run(1500)[-1] <= 10
    upstream.slots = 32
    assert upstream.run(3000)[-1] >= 26


def test_an_upstream_that_is_not_full_tells_nothing_of_more():
    limit = InFlightLimit(64, 0.05)
    for i in range(WINDOW):
        limit.note_wait(S, 2 * S, i, i)
    assert limit.now == 32
    for i in range(40 * WINDOW):
        limit.note_wait(0, S, 100 + i, 100 + i)
    assert limit.now == 32
    limit.note_full()
    for i in range(WINDOW):
        limit.note_wait(0, S, 2000 + i, 2000 + i)
    assert limit.now == 33


def test_what_was_sent_before_a_change_says_nothing_of_it():
    limit = InFlightLimit(64, 0.05)
    for i in range(WINDOW):
        limit.note_wait(S, 2 * S, 10 + i, 1000)
    for i in range(10 * WINDOW):
        limit.note_wait(S, 2 * S, 999, 2000 + i)
    assert limit.now == 32
    for _ in range(10 * POLLS):
        limit.note_waiting(40, 33, 3000)
    assert limit.now == 32


def test_it_never_falls_below_one():
    limit = InFlightLimit(4, 0.05)
    for i in range(400):
        limit.note_wait(S, S, 1000 * i, 1000 * i)
    assert limit.now == 1
    for i in range(100):
        limit.note_waiting(1000, 1, 10**9 + i)
    assert limit.now == 1


def test_it_falls_to_half_at_most_in_one_go():
    limit = InFlightLimit(64, 0.05)
    for i in range(POLLS):
        limit.note_waiting(1000, 64, i)
    assert limit.now == 32
    for i in range(WINDOW):
        limit.note_wait(99 * S, 100 * S, 1000 + i, 1000 + i)
    assert limit.now == 16


def test_which_waits_are_the_upstreams_want_of_room():
    stages = (
        NestedStage(Stage.TOKENIZE, None, 0, 5),
        NestedStage(Stage.QUEUE, Cause.BATCH_SLOTS, 5, 15),
        NestedStage(Stage.QUEUE, Cause.STEP_IN_FLIGHT, 15, 1000),
        NestedStage(Stage.QUEUE, Cause.KV_BLOCKS, 1000, 1100),
        NestedStage(Stage.DECODE, None, 1100, 2000),
        NestedStage(Stage.PREEMPTED, Cause.KV_BLOCKS, 2000, 2003),
        NestedStage(Stage.QUEUE, Cause.GRAMMAR, 2003, 3000),
    )
    assert account_wait_ns(stages) == 10 + 100 + 3
