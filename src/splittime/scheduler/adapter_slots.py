"""Which adapters a step may use: at most `max_loras` have a place, and the requests of the others are held
(`lora_slots`).

An adapter has its place while a request of it is queued or runs. When the last of them has ended, the adapter that has
waited longest gets the place, with all its requests. While adapters wait, as many are closing as wait, those first that
got their place first: who comes for one of these waits too, until it is none of them any more or has a place anew. So
each adapter's turn comes after the requests that were there before it, however many newcomers the others have.
"""

from splittime.core.request import adapter_name
from splittime.scheduler.state import RequestState


class AdapterSlots:
    """Requests without an adapter need no place and are not known here."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._users: dict[str, set[str]] = {}  # ids of requests, by adapter, in the order in which these got places
        self._waiting: dict[str, dict[str, RequestState]] = {}  # by adapter, the one that has waited longest first

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the adapters that have a place, as clients name them."""
        return tuple(map(adapter_name, self._users))

    @property
    def waiting_names(self) -> tuple[str, ...]:
        """Returns those that have requests waiting for a place."""
        return tuple(map(adapter_name, self._waiting))

    def is_waiting(self, state: RequestState) -> bool:
        return state.request_id in self._waiting.get(state.request.adapter, ())

    def enter(self, state: RequestState) -> bool:
        """Returns whether it may queue. Otherwise it waits here, until `leave` of another lets it in."""
        adapter = state.request.adapter
        if not adapter or state.request_id in self._users.get(adapter, ()):
            return True
        if self._is_open(adapter):
            self._users.setdefault(adapter, set()).add(state.request_id)
            return True
        self._waiting.setdefault(adapter, {})[state.request_id] = state
        return False

    def leave(self, state: RequestState) -> list[RequestState]:
        """Forget a request, which has ended. Returns who may queue now that could not before."""
        adapter = state.request.adapter
        if not adapter:
            return []
        users, waiting = self._users.get(adapter, set()), self._waiting.get(adapter, {})
        users.discard(state.request_id)
        waiting.pop(state.request_id, None)
        if not users:
            self._users.pop(adapter, None)
        if not waiting:
            self._waiting.pop(adapter, None)
        return self._let_in()

    def _let_in(self) -> list[RequestState]:
        """Gives out the places that are free, and opens what need not close any more."""
        freed: list[RequestState] = []
        while (adapter := next(filter(self._is_open, self._waiting), None)) is not None:
            states = self._waiting.pop(adapter)
            self._users.setdefault(adapter, set()).update(states)
            freed += states.values()
        return freed

    def _is_open(self, adapter: str) -> bool:
        """Returns whether requests of it may queue now."""
        if adapter not in self._users:
            return len(self._users) < self._max_loras
        num_without_place = sum(one not in self._users for one in self._waiting)
        return adapter not in list(self._users)[:num_without_place]

    def check(self) -> None:
        """Raise AssertionError if the books disagree."""
        assert len(self._users) <= self._max_loras
        assert all(self._users.values())
        assert all(self._waiting.values())
        assert not any(map(self._is_open, self._waiting)), "somebody waits for what is free"
