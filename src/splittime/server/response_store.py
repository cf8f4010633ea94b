"""Responses that are kept in memory for `previous_response_id` and `GET /v1/responses/{id}`, bounded in number, bytes
and time. What one key has stored no other key finds.

Where there is no room the oldest go, those of the key first that takes the largest part of what there is: whoever
stores much loses its own. A response is charged the whole conversation that led to it, of which it shares the texts
with the responses before it, so that less is held than is counted.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from splittime.api.conversation import Conversation
from splittime.core.clock import utc_text
from splittime.core.errors import NotFound

ENTRY_BYTES = 512  # for what an entry takes beside its texts


class KeptResponse(NamedTuple):
    """body: the response as it was answered. conversation: with its output. num_input: the items before that."""

    body: bytes
    conversation: Conversation
    num_input: int
    until_ns: int

    @property
    def size(self) -> int:
        return ENTRY_BYTES + len(self.body) + self.conversation.size


class Shelf:
    """What one key has stored, the oldest first."""

    def __init__(self) -> None:
        self.kept: dict[str, KeptResponse] = {}
        self.num_bytes = 0

    def add(self, response_id: str, entry: KeptResponse) -> None:
        self.kept[response_id] = entry
        self.num_bytes += entry.size

    def remove(self, response_id: str) -> None:
        entry = self.kept.pop(response_id, None)
        self.num_bytes -= 0 if entry is None else entry.size

    def drop_until(self, now_ns: int) -> None:
        while self.kept and next(iter(self.kept.values())).until_ns <= now_ns:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        self.remove(next(iter(self.kept)))


class ResponseStore:
    """most_responses: 0 keeps none. clock: monotonic, in ns."""

    def __init__(
        self, most_responses: int, most_bytes: int, for_s: float, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._most_responses, self._most_bytes, self._for_s = most_responses, most_bytes, for_s
        self._clock, self._begun_unix_s = clock, time.time()
        self._shelves: dict[str, Shelf] = {}

    @property
    def is_on(self) -> bool:
        return self._most_responses > 0

    @property
    def num_responses(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def put(self, tenant: str, response_id: str, body: bytes, conversation: Conversation, num_input: int = 0) -> bool:
        """Stores a response, in place of one of this id. Returns whether it is kept: one that has no room beside
        what is left of the others is not."""
        entry = KeptResponse(body, conversation, num_input, self._clock() + round(self._for_s * 1e9))
        if not self.is_on or entry.size > self._most_bytes:
            return False
        shelf = self._shelves.setdefault(tenant, Shelf())
        shelf.remove(response_id)
        shelf.add(response_id, entry)
        self._make_room()
        return response_id in shelf.kept

    def get(self, tenant: str, response_id: str, param: str) -> KeptResponse:
        """Returns a response of this key. Raises NotFound, which names `param`, for one that is not there: unknown,
        another key's, dropped or too old, which are all told in the same words."""
        self._drop_old()
        shelf = self._shelves.get(tenant)
        if shelf is None or response_id not in shelf.kept:
            raise self._not_found(response_id, param)
        return shelf.kept[response_id]

    def delete(self, tenant: str, response_id: str) -> None:
        """Forgets a response of this key. Raises NotFound as `get` does."""
        self.get(tenant, response_id, "response_id")
        self._shelves[tenant].remove(response_id)

    def _make_room(self) -> None:
        self._drop_old()
        while self.num_responses > self._most_responses or self.num_bytes > self._most_bytes:
            max(self._shelves.values(), key=self._part).drop_oldest()

    def _part(self, shelf: Shelf) -> float:
        """Returns which part of the room a shelf takes, of that room of which it takes more."""
        return max(len(shelf.kept) / self._most_responses, shelf.num_bytes / self._most_bytes)

    def _drop_old(self) -> None:
        now_ns = self._clock()
        for shelf in self._shelves.values():
            shelf.drop_until(now_ns)

    def _not_found(self, response_id: str, param: str) -> NotFound:
        if self.is_on:
            bounds = f"{self._most_responses} responses and {self._most_bytes} bytes, each for {self._for_s:g} s"
            empty = f"from before {utc_text(self._begun_unix_s)}, when it started with an empty store"
            hint = f"the server keeps {bounds}, and none with store false or {empty}; send the conversation as input"
        else:
            hint = "this server keeps no responses (--max-stored-responses 0); send the conversation as input"
        return NotFound(
            f"no stored response {response_id[:64]!r}",
            code="previous_response_not_found" if param == "previous_response_id" else "not_found",
            param=param,
            value=response_id[:64],
            hint=hint,
        )
