"""Prompts that are computed ahead (`sampling.AHEAD`): of such a request nothing is wanted but what it leaves in the
prefix cache, for another that will come. Three rules keep it from being felt:

* It stands in no queue, and nobody waits behind it. It is computed when nobody waits, one at a time, ranked behind all
  others. Of several tenants the one goes next whose turn was longest ago.
* A step computes `AHEAD_TOKENS` of it at most, of what the others leave of the step's budget. So a step is longer by no
  more than these, and who comes waits for no more than these.
* As soon as anybody lacks a slot or a block, it gives its own back, which is no preemption. What it has computed stays
  in the prefix cache while there is room, and it goes on from there.
"""

from collections.abc import Iterator

from splittime.core.errors import RequestError
from splittime.core.request import Request, adapter_name
from splittime.ledger.stages import Cause
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.state import RequestState

AHEAD_TOKENS = 64
MOST_TENANTS = 1024  # whose last turns are remembered
NEEDED = ("enable_prefix_caching", "enable_chunked_prefill")


class AheadSet:
    """Who does not run now. Tenants are told apart by their key."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self._turns: dict[str, int] = {}  # of tenants, the latest last
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __contains__(self, state: RequestState) -> bool:
        return state.request_id in self._states

    def add(self, state: RequestState, now_ns: int) -> None:
        """From `now_ns` on it waits until nobody else does."""
        self._states[state.request_id] = state
        state.account.enter(state.waiting_stage, now_ns, Cause.POLICY)

    def remove(self, state: RequestState) -> None:
        del self._states[state.request_id]

    def first(self) -> RequestState | None:
        """Returns who goes next: who was put aside, or else of the tenant whose turn was longest ago."""
        return min(self, key=self._place, default=None)

    def begin(self, state: RequestState) -> None:
        """Take it out: it runs now, which is its tenant's turn."""
        self.remove(state)
        self._num_turns += 1
        self._turns.pop(state.request.tenant, None)
        self._turns[state.request.tenant] = self._num_turns
        if len(self._turns) > MOST_TENANTS:
            del self._turns[next(iter(self._turns))]

    def _place(self, state: RequestState) -> tuple[bool, int, int]:
        is_new = state.num_cached_tokens is None
        return is_new, self._turns.get(state.request.tenant, 0), state.arrival


def check_ahead(request: Request, config: SchedulerConfig) -> None:
    """Raises RequestError where nothing would be left of a prompt that is computed ahead, where it would not be cut,
    and for one with an adapter, for whose place others may wait."""
    if request.adapter:
        words = "a prompt is computed ahead for the model itself, not with an adapter"
        raise RequestError(words, param="model", value=adapter_name(request.adapter), hint="name the model")
    for name in NEEDED:
        if not getattr(config, name):
            hint = f"serve with --{name.replace('_', '-')}, or send the request itself"
            raise RequestError(
                f"a prompt is computed ahead only with {name}", code=f"no_{name}", value=False, hint=hint
            )
