"""A conversation of OpenAI's Responses API as it is kept: its items as they are listed, and the chat that they make. It
never changes: what goes on from it shares what it has, and costs what is new."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from splittime.api.decode import MAX_PARTS
from splittime.api.response_items import ChatMessage, Item, ItemCall, chat_messages, require_calls
from splittime.core.errors import RequestError

MOST_BODIES = 2  # as much as so many may bring: each turn has all of it rendered
ITEM_BYTES = 512  # that an item takes beside its texts, as it is listed and in the chat


class KeptItem(NamedTuple):
    """An item in JSON. item_id: "" for one that has none."""

    body: bytes
    item_id: str


class Conversation(NamedTuple):
    """messages: of the chat without instructions, which are those of one response alone. called: the ids of the calls
    that each part of it makes. num_bytes: of its items in JSON."""

    items: tuple[KeptItem, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    called: tuple[frozenset[str], ...] = ()
    num_bytes: int = 0

    @property
    def size(self) -> int:
        """Returns the bytes that it takes in memory, where its texts are twice."""
        return 2 * self.num_bytes + ITEM_BYTES * len(self.items)

    def gone_on(self, items: Sequence[Item]) -> "Conversation":
        """Returns it with these items behind it. Raises `RequestError` for an output of a call that it does not make,
        and for more items than a body may have."""
        if len(self.items) + len(items) > MAX_PARTS:
            raise _too_large(f"{MAX_PARTS} items", MAX_PARTS)
        require_calls(items, self.called)
        kept = [KeptItem(msgspec.json.encode(item), item.id or "") for item in items]
        called = frozenset(item.call_id for item in items if isinstance(item, ItemCall))
        return Conversation(
            (*self.items, *kept),
            tuple(chat_messages(None, items, self.messages)),
            (*self.called, called) if called else self.called,
            self.num_bytes + sum(len(each.body) for each in kept),
        )

    def require_at_most(self, max_bytes: int) -> None:
        """Raises `RequestError` for more than that of items in JSON."""
        if self.num_bytes > max_bytes:
            raise _too_large(f"{max_bytes} bytes", max_bytes)


def _too_large(what: str, limit: int) -> RequestError:
    said, hint = f"the conversation has more than {what}", "begin another, with what matters of this one as input"
    return RequestError(said, code="body_too_large", status=413, param="input", limit=limit, hint=hint)
