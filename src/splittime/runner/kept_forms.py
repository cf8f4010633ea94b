"""The forms that are kept, each for who asked for it: weighed in bytes, bounded in all and of each owner."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

Form = TypeVar("Form")
MOST_BYTES, MOST_OF_OWNER_BYTES = 256 << 20, 128 << 20
MOST_FORMS = 4096
LEAST_BYTES = 4096  # of what is kept of any


class KeptForms(Generic[Form]):
    """May be used by several threads. Where the room is used up, who has most of it loses what it asked for longest
    ago: nobody's forms drive out those of others who keep less."""

    def __init__(self, most_bytes: int = MOST_BYTES, most_of_owner_bytes: int = MOST_OF_OWNER_BYTES) -> None:
        self._most_bytes, self._most_of_owner_bytes = most_bytes, most_of_owner_bytes
        self._by_owner: dict[str, OrderedDict[str, tuple[Form, int]]] = {}
        self._owner_bytes: dict[str, int] = {}
        self._lock = threading.Lock()

    def has(self, owner: str, grammar: str) -> bool:
        with self._lock:
            return grammar in self._by_owner.get(owner, ())

    def get(self, owner: str, grammar: str) -> Form | None:
        """Returns it, as the one that was asked for last."""
        with self._lock:
            own = self._by_owner.get(owner)
            found = None if own is None else own.get(grammar)
            if own is None or found is None:
                return None
            own.move_to_end(grammar)
            return found[0]

    def keep(self, owner: str, grammar: str, form: Form, num_bytes: int) -> None:
        """Keeps it; where it was kept before, its weight is new."""
        with self._lock:
            own = self._by_owner.setdefault(owner, OrderedDict())
            self._drop(owner, grammar)
            weight = max(num_bytes, 0) + len(grammar) + LEAST_BYTES
            self._by_owner.setdefault(owner, own)[grammar] = form, weight
            self._owner_bytes[owner] = self._owner_bytes.get(owner, 0) + weight
            self._make_room(owner)

    def drop(self, owner: str, grammar: str) -> None:
        with self._lock:
            self._drop(owner, grammar)

    def _make_room(self, owner: str) -> None:
        """Drops what is too much; of this owner, who has just got one, not that one alone."""
        while self._owner_bytes[owner] > self._most_of_owner_bytes and len(self._by_owner[owner]) > 1:
            self._drop(owner, next(iter(self._by_owner[owner])))
        while self.num_bytes > self._most_bytes or self.num_forms > MOST_FORMS:
            largest = max(self._owner_bytes, key=self._owner_bytes.__getitem__)
            if len(self._by_owner[largest]) == 1 and largest == owner:
                return
            self._drop(largest, next(iter(self._by_owner[largest])))

    def _drop(self, owner: str, grammar: str) -> None:
        own = self._by_owner.get(owner)
        if own is None or grammar not in own:
            return
        self._owner_bytes[owner] -= own.pop(grammar)[1]
        if not own:
            del self._by_owner[owner], self._owner_bytes[owner]

    @property
    def num_bytes(self) -> int:
        return sum(self._owner_bytes.values())

    @property
    def num_forms(self) -> int:
        return sum(map(len, self._by_owner.values()))
