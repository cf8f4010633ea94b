"""Responses that are kept in memory for `previous_response_id` and `GET /v1/responses/{id}`, bounded in number, bytes
and time. What one key has stored no other key finds.

Where there is no room the key that takes most of it loses its oldest (`core.kept_by_owner`). A response is charged the
whole conversation that led to it. It shares these texts with the responses before it, so less is held than is counted.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

from splittime.api.conversation import Conversation
from splittime.core.clock import utc_text
from splittime.core.errors import NotFound
from splittime.core.kept_by_owner import KeptByOwner

ENTRY_BYTES = 512  # for what an entry takes beside its texts


class KeptResponse(NamedTuple):
    """body: the response as it was answered. conversation: with its output. num_input: the items before that."""

    body: bytes
    conversation: Conversation
    num_input: int

    @property
    def size(self) -> int:
        return ENTRY_BYTES + len(self.body) + self.conversation.size


class ResponseStore:
    """most_responses: 0 keeps none. clock: monotonic, in ns."""

    def __init__(
        self, most_responses: int, most_bytes: int, for_s: float, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._most_responses, self._most_bytes, self._for_s = most_responses, most_bytes, for_s
        self._begun_unix_s = time.time()
        self._kept = KeptByOwner[KeptResponse](most_responses, most_bytes, kept_ns=round(for_s * 1e9), clock=clock)

    @property
    def is_on(self) -> bool:
        return self._most_responses > 0

    @property
    def num_bytes(self) -> int:
        return self._kept.weight

    def put(self, tenant: str, response_id: str, body: bytes, conversation: Conversation, num_input: int = 0) -> bool:
        """Stores a response, in place of one of this id. Returns whether it is kept: one that has no room beside
        what is left of the others is not."""
        entry = KeptResponse(body, conversation, num_input)
        if not self.is_on or entry.size > self._most_bytes:
            return False
        self._kept.put(tenant, response_id, entry, entry.size)
        if self._kept.is_full:
            self._kept.drop(tenant, response_id)
        return self._kept.get(tenant, response_id) is not None

    def get(self, tenant: str, response_id: str, param: str) -> KeptResponse:
        """Returns a response of this key. Raises NotFound, which names `param`, for one that is not there: unknown,
        another key's, dropped or too old, which are all told in the same words."""
        found = self._kept.get(tenant, response_id)
        if found is None:
            raise self._not_found(response_id, param)
        return found

    def delete(self, tenant: str, response_id: str) -> None:
        """Forgets a response of this key. Raises NotFound as `get` does."""
        self.get(tenant, response_id, "response_id")
        self._kept.drop(tenant, response_id)

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
