"""One server of a simulated fleet: its life from start to end, and what it computes meanwhile."""

from typing import TYPE_CHECKING

from splittime.cluster.controller import FleetReplica, FleetState
from splittime.simulate.coarse import NEVER, CoarseReplica, CoarseRequest
from splittime.simulate.replica import Replica

if TYPE_CHECKING:
    from splittime.cluster.simulated.gateways import FleetAttempt
import heapq
from collections.abc import Callable
from typing import Any

REVISION = "r1"


class Agenda:
    """now_ns: the instant of the call that is being made. Calls of one instant are made in the order of their entry."""

    def __init__(self) -> None:
        self.now_ns = 0
        self._calls: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._calls)

    def clock(self) -> int:
        return self.now_ns

    def at(self, at_ns: float, call: Callable[..., None], *arguments: Any) -> None:
        """Have this called at `at_ns`, or now if that is over."""
        self._count += 1
        heapq.heappush(self._calls, (max(self.now_ns, round(at_ns)), self._count, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now_ns + seconds * 1e9, call, *arguments)

    def run_one(self) -> None:
        self.now_ns, _, call, arguments = heapq.heappop(self._calls)
        call(*arguments)


class FleetServer:
    """like: whose cost model it has. factor: how many times as long its steps take. capacity_tokens: what it says that
    it has room for. begun_ns: when it was started; ended_ns: when it was stopped. is_silent: its node has failed."""

    def __init__(
        self, name: str, region: int, like: Replica, factor: float, capacity_tokens: int, agenda: Agenda
    ) -> None:
        self.name, self.region, self._agenda, self._like = name, region, agenda, like
        self.state, self.begun_ns = FleetState.STARTING, agenda.now_ns
        self.ended_ns: int | None = None
        self.slept_ns = 0  # of its time
        self._asleep_since: int | None = None
        self.is_dead = self.is_silent = False
        self.known_lost = False
        self._capacity_tokens = capacity_tokens
        self._replica = CoarseReplica(like, factor)
        self._attempts: dict[CoarseRequest, FleetAttempt] = {}
        self._next_ns: float = NEVER

    @property
    def num_waiting(self) -> int:
        return len(self._replica.waiting)

    @property
    def num_running(self) -> int:
        return self._replica.num_running

    @property
    def is_empty(self) -> bool:
        return not self._attempts

    def seen(self) -> FleetReplica:
        """Returns what the controller sees of it; of one that has just failed, what was last seen."""
        state = FleetState.LOST if self.known_lost else self.state
        tokens = 0 if self.is_dead else self._replica.running_tokens + self._replica.waiting_tokens
        return FleetReplica(self.name, state, REVISION, tokens, self._capacity_tokens)

    # ---- its life

    def become(self, state: FleetState) -> None:
        now_ns = self._agenda.now_ns
        if self._asleep_since is not None:
            self.slept_ns += now_ns - self._asleep_since
        self._asleep_since = now_ns if state is FleetState.ASLEEP else None
        self.state = state

    def stop(self) -> None:
        """End it, if it has not failed already: nothing is charged for it any more."""
        self.become(FleetState.LOST)
        self.ended_ns = self._agenda.now_ns
        if not self.is_dead:
            self.die(is_silent=False)

    def die(self, *, is_silent: bool) -> None:
        """What it had is lost: clients hear of it at once, or by their time-outs where its node is silent."""
        self.is_dead, self.is_silent = True, is_silent
        lost, attempts = self._replica.fail(self._agenda.now_ns), self._attempts
        for request in lost:
            attempts[request].request.generated = request.generated
        self._attempts, self._next_ns = {}, NEVER
        for attempt in attempts.values():
            attempt.broken(is_silent=is_silent)

    # ---- its work

    def receive(self, attempt: "FleetAttempt") -> None:
        """The bytes of a request have come."""
        if self.is_dead:
            attempt.broken(is_silent=self.is_silent)
            return
        asked = attempt.request
        request = CoarseRequest(asked.prompt, asked.output, asked.blocks)
        request.generated = asked.generated
        self._attempts[request] = attempt
        approach = self._like.approach
        before_ns = approach.to_admission_ns + approach.per_prompt_token_ns * asked.prompt + approach.to_engine_ns
        self._agenda.at(self._agenda.now_ns + before_ns, self._add, request)

    def _add(self, request: CoarseRequest) -> None:
        if request in self._attempts:  # else it died meanwhile
            self._replica.add(request, self._agenda.now_ns)
            self._look_again()

    def _look_again(self) -> None:
        """Enter when its steps end, which may be sooner than it was."""
        if self._replica.next_ns != self._next_ns:
            self._next_ns = self._replica.next_ns
            if self._next_ns < NEVER:
                self._agenda.at(self._next_ns, self._turn, self._next_ns)

    def _turn(self, at_ns: float) -> None:
        if at_ns != self._next_ns:
            return  # it was cut short, or has died
        for news in self._replica.turn():
            self._tell(news.request, news.at_ns, is_end=news.is_end)
        self._look_again()

    def _tell(self, request: CoarseRequest, ready_ns: int, *, is_end: bool) -> None:
        attempt, delivery = self._attempts[request], self._like.delivery
        sent_ns = ready_ns + delivery.send_lag_ns
        if not is_end:
            attempt.request.cached = request.cached
            self._agenda.at(sent_ns + attempt.half_rtt_ns, attempt.begin)
            return
        del self._attempts[request]
        self._agenda.at(sent_ns + delivery.end_ns + attempt.half_rtt_ns, attempt.end)
