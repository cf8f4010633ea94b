"""How many requests an upstream is given at once, where that is found from how long they wait there.

A cap that is too high moves the queue to the upstream, where no tenant's share is kept and nobody is refused; one that
is too low leaves it idle. What tells them apart is the wait in the upstream's own queue, and never the time that an
answer takes: that is long where answers are, and says nothing of a queue.

* A splittime upstream tells each request's wait in its account (`account_wait_ns`: in its queue for want of slots,
  blocks or tokens of a step, or thrown out again). Of `WINDOW` answers to requests that were sent since the limit last
  changed, as others tell of another limit, the median wait is judged. Beyond `queue_wait_s` there is a standing queue,
  and the limit falls by the part of the requests that it holds: their waits beside their times (Little's law, 1961), as
  TCP Vegas counts what its packets have queued (Brakmo and Peterson, 1995).
* Any other upstream tells how many wait (`/metrics`, `queue_polls`). A queue is standing if it was in none of `POLLS`
  polls empty, as in CoDel (Nichols and Jacobson, 2012); the limit falls by the fewest that were in it. Polls while more
  are in flight than may be tell of the last limit, and are not judged.

Either way it falls to half at most, and never below one. Without a standing queue it rises by one, if the limit was
reached: an upstream that is not asked for more tells nothing about more. It begins at `max_in_flight`, and never
exceeds that; an upstream that tells nothing has it for good.
"""

from statistics import median

from splittime.ledger.attempts import NestedStage
from splittime.ledger.stages import Cause, Stage

WINDOW, POLLS = 16, 3
LACKING = frozenset({Cause.BATCH_SLOTS, Cause.KV_BLOCKS, Cause.TOKEN_BUDGET, Cause.POLICY})


def account_wait_ns(stages: tuple[NestedStage, ...]) -> int:
    """Returns how long a request waited at its upstream because that had too many. A wait for the end of the step that
    runs, for a grammar or an adapter of its own, or while the server was paused is none."""
    return sum(
        stage.end_ns - stage.begin_ns
        for stage in stages
        if stage.stage is Stage.PREEMPTED or (stage.stage is Stage.QUEUE and stage.cause in LACKING)
    )


class InFlightLimit:
    """now: the limit. The upstream tells it when it is full (`note_full`) and what it hears of waits."""

    def __init__(self, most: int, queue_wait_s: float) -> None:
        self._most, self._queue_wait_ns = most, queue_wait_s * 1e9
        self.now = most
        self._changed_ns = 0
        self._was_full = False
        self._waits: list[tuple[int, int]] = []  # (wait, whole time) of the window
        self._polls: list[int] = []

    def note_full(self) -> None:
        self._was_full = True

    def note_wait(self, wait_ns: int, lasted_ns: int, sent_ns: int, now_ns: int) -> None:
        """A request is over that waited so long of its time at the upstream."""
        if sent_ns < self._changed_ns:
            return
        self._waits.append((wait_ns, lasted_ns))
        if len(self._waits) >= WINDOW:
            waits, self._waits = self._waits, []
            if median(wait for wait, _ in waits) > self._queue_wait_ns:
                held = sum(wait for wait, _ in waits) / max(1, sum(lasted for _, lasted in waits))
                self._lower(round(self.now * held), now_ns)
            else:
                self._raise(now_ns)

    def note_waiting(self, count: int, in_flight: int, now_ns: int) -> None:
        """A poll found so many waiting."""
        if in_flight > self.now:
            return
        self._polls.append(count)
        if len(self._polls) >= POLLS:
            least, self._polls = min(self._polls), []
            if least > 0:
                self._lower(least, now_ns)
            else:
                self._raise(now_ns)

    def _lower(self, excess: int, now_ns: int) -> None:
        self._set(max(1, self.now // 2, self.now - max(1, excess)), now_ns)

    def _raise(self, now_ns: int) -> None:
        if self._was_full:
            self._set(min(self._most, self.now + 1), now_ns)

    def _set(self, limit: int, now_ns: int) -> None:
        self._was_full = False
        if limit != self.now:
            self.now, self._changed_ns = limit, now_ns
            self._waits, self._polls = [], []
