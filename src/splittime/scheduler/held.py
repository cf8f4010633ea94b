"""The held: requests that wait for something of their own, beside the queue, each with its cause.

A grammar that is compiled, an adapter that has no place yet, keys and values that are on their way: whoever waits for
one of these cannot be admitted, however much room there is, and would keep all behind it waiting if it stood in the
queue. It keeps its rank and its arrival. When it is released it joins the queue, and its wait there, which the
starvation bound counts, begins then.
"""

from collections import Counter
from collections.abc import Iterator

from splittime.ledger.stages import Cause
from splittime.scheduler.state import RequestState

CAUSES = frozenset({Cause.GRAMMAR, Cause.LORA_SLOTS, Cause.KV_TRANSFER})


class HeldSet:
    """num_tokens: that the held still have to be computed."""

    def __init__(self) -> None:
        self._states: dict[str, RequestState] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states.values())

    def __contains__(self, state: RequestState) -> bool:
        return state.request_id in self._states

    def add(self, state: RequestState, cause: Cause, now_ns: int) -> None:
        """From `now_ns` on it waits for this; it stands in no queue."""
        assert cause in CAUSES, f"{cause} is not a cause to be held for"
        if state not in self:
            self._states[state.request_id] = state
            self.num_tokens += state.num_pending
        state.account.enter(state.waiting_stage, now_ns, cause)

    def remove(self, state: RequestState) -> None:
        del self._states[state.request_id]
        self.num_tokens -= state.num_pending

    def waiting_for(self) -> Counter[Cause | None]:
        """How many are held for what."""
        return Counter(state.account.cause for state in self)

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        assert self.num_tokens == sum(state.num_pending for state in self)
        assert all(not state.pushed and not state.lease.block_ids for state in self), (
            "one that is held is elsewhere too"
        )
        assert set(self.waiting_for()) <= CAUSES
