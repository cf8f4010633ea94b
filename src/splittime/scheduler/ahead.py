"""Prompts that are computed ahead (`sampling.AHEAD`): of such a request nothing is wanted but what it leaves in the
prefix cache, for another that will come. Three rules keep it from being felt:

* It stands in no queue, and nobody waits behind it. It runs when nobody waits, one at a time, ranked behind all others.
* A step computes `AHEAD_TOKENS` of it at most, of what the others leave of the step's budget. So a step is longer by no
  more than these, and who comes waits for no more than these.
* As soon as anybody waits, or lacks a block, it gives its slot and its blocks back. What it has computed stays in the
  prefix cache while there is room, and it goes on from there.
"""

from collections.abc import Iterator

from splittime.core.errors import RequestError
from splittime.core.request import Request, adapter_name
from splittime.ledger.stages import Cause
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.state import RequestState

AHEAD_TOKENS = 64
NEEDED = ("enable_prefix_caching", "enable_chunked_prefill")


class AheadSet:
    """Who does not run now, in the order in which they came; one that was put aside goes on first."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}

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
        return min(self, key=lambda state: state.arrival, default=None)


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
