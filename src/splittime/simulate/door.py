"""What stands between the clients and a simulated engine: who comes when, who is admitted, who goes away.

The `Arrivals` of a loop. Admission is the server's own (`scheduler.admission`). It is asked at the instant at which a
request has come that far, and knows only what had left its queue by then, even if the loop looks later.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from splittime.core.clock import VirtualClock
from splittime.core.errors import Refused
from splittime.drive.messages import Abort, ToEngine
from splittime.scheduler.admission import Admission, Place
from splittime.simulate.trace import TracedRequest

OnRefusal = Callable[[TracedRequest, Refused, int], None]


class Door:
    """to_wake_ns: what an engine without work takes to wake up for a message."""

    def __init__(self, clock: VirtualClock, admission: Admission, to_wake_ns: int, on_refusal: OnRefusal) -> None:
        self.is_closed = False
        self._clock, self._admission, self._to_wake_ns, self._on_refusal = clock, admission, to_wake_ns, on_refusal
        self._expected: Iterator[TracedRequest] = iter(())  # in the order in which they come
        self._following: TracedRequest | None = None  # the first of these
        self._coming: list[tuple[int, bool, int, TracedRequest | ToEngine]] = []  # at one instant messages are last
        self._count = 0
        self._places: dict[str, Place] = {}  # of those in the server's queue
        self._left: deque[tuple[int, Place, bool]] = deque()  # when, whose place, and whether it was computed

    def expect(self, requests: Iterable[TracedRequest]) -> None:
        """These come, in the order of their arrivals. They are asked for when it is time for them."""
        self._expected = iter(requests)
        self._following = next(self._expected, None)

    def expect_one(self, traced: TracedRequest) -> None:
        """This one comes too; not before now."""
        self._add(traced.admitted_ns, traced)

    def abort(self, request_id: str, at_ns: int) -> None:
        self._add(at_ns, Abort(request_id))

    @property
    def next_ns(self) -> float:
        """When something comes next: a request to the server's admission, or a message to the engine."""
        while self._following is not None and not (self._coming and self._coming[0][0] < self._following.arrived_ns):
            self._take_in(self._following)
        return self._coming[0][0] if self._coming else math.inf

    def _take_in(self, traced: TracedRequest) -> None:
        """Raises ValueError if the one behind it came before it."""
        self.expect_one(traced)
        self._following = behind = next(self._expected, None)
        if behind is not None and behind.arrived_ns < traced.arrived_ns:
            names = f"{behind.request.request_id!r} comes before {traced.request.request_id!r}"
            raise ValueError(f"requests are expected in the order of their arrivals: {names}")

    def note_begun(self, request_id: str, at_ns: int) -> None:
        """A step has computed its first tokens: it has left the queue."""
        self._leave(request_id, at_ns, was_computed=True)

    def note_ended(self, request_id: str, at_ns: int) -> None:
        self._leave(request_id, at_ns, was_computed=False)

    def wait(self, timeout_s: float | None) -> bool:
        now_ns = self._clock.now_ns()
        until_ns = None if timeout_s is None else now_ns + round(timeout_s * 1e9)
        while (next_ns := self.next_ns) < math.inf and (until_ns is None or next_ns <= until_ns):
            at_ns, _, _, came = self._coming[0]
            self._clock.advance_to(at_ns)
            if not isinstance(came, TracedRequest):
                self._clock.advance(self._to_wake_ns)
                return True
            heapq.heappop(self._coming)
            self._admit(came, at_ns)
        if until_ns is None:
            self.is_closed = True
        else:
            self._clock.advance_to(until_ns)
        return False

    def take_all(self) -> Iterator[tuple[ToEngine, int]]:
        while self.next_ns <= self._clock.now_ns():
            at_ns, _, _, came = heapq.heappop(self._coming)
            if isinstance(came, TracedRequest):
                self._admit(came, at_ns)
            else:
                yield came, at_ns

    def _add(self, at_ns: int, came: TracedRequest | ToEngine) -> None:
        self._count += 1
        heapq.heappush(self._coming, (at_ns, not isinstance(came, TracedRequest), self._count, came))

    def _admit(self, traced: TracedRequest, at_ns: int) -> None:
        while self._left and self._left[0][0] <= at_ns:
            left_ns, place, was_computed = self._left.popleft()
            place.leave(left_ns) if was_computed else place.drop_one()
        request, tokens = traced.request, len(traced.request.prompt_token_ids)
        try:
            place = self._admission.enter(
                at_ns,
                count=1,
                tokens=tokens,
                deadline_ns=request.deadline_ns,
                tenant=request.tenant,
                weight=request.weight,
            )
        except Refused as refused:
            self._on_refusal(traced, refused, at_ns)
            return
        self._places[request.request_id] = place
        for due_ns, message in traced.submissions():
            self._add(due_ns, message)
        if traced.leaves_ns is not None:
            self._add(max(traced.leaves_ns, traced.received_ns), Abort(request.request_id))

    def _leave(self, request_id: str, at_ns: int, was_computed: bool) -> None:
        place = self._places.pop(request_id, None)
        if place is not None:
            self._left.append((at_ns, place, was_computed))
