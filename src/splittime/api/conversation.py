"""A conversation of OpenAI's Responses API as it is kept: its items as they are listed, and the chat that they make. It
never changes: what goes on from it shares what it has, and costs what is new. Its input is listed in pages, the latest
item first unless asked otherwise."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import orjson

from splittime.api.decode import MAX_PARTS
from splittime.api.response_items import ChatMessage, Item, ItemCall, chat_messages, require_calls
from splittime.core.errors import RequestError

MOST_BODIES = 2  # as much as so many may bring: each turn has all of it rendered
ITEM_BYTES = 512  # that an item takes beside its texts, as it is listed and in the chat
MOST_ITEMS, USUAL_ITEMS = 100, 20  # of a page
ORDERS = ("desc", "asc")
QUERY: tuple[dict[str, Any], ...] = (
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS}},
    {"name": "order", "in": "query", "schema": {"enum": list(ORDERS)}},
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "An item's id: those behind it."},
)
FIELDS = tuple(each["name"] for each in QUERY)


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


def input_items(response_id: str, items: Sequence[KeptItem], query: Mapping[str, str]) -> bytes:
    """Returns a page in JSON. items: the conversation before the output, of which those of the page alone are read.
    Raises RequestError for a query that cannot be meant."""
    limit, order = _limit(query), query.get("order", ORDERS[0])
    unknown = next((name for name in query if name not in FIELDS), None)
    if unknown is not None:
        raise RequestError(f"{unknown[:64]}: a list of items takes {', '.join(FIELDS)}", param=unknown[:64])
    if order not in ORDERS:
        raise RequestError("order is asc or desc", param="order", value=order[:64], limit=list(ORDERS))
    step = -1 if order == "desc" else 1
    ids = [item.item_id or f"{response_id}_{index}" for index, item in enumerate(items)][::step]
    begin = _behind(ids, query.get("after"))
    shown = zip(items[::step][begin : begin + limit], ids[begin : begin + limit], strict=True)
    page = [_listed(orjson.loads(item.body), item_id) for item, item_id in shown]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return orjson.dumps({"object": "list", "data": page, **ends, "has_more": len(ids) - begin > limit})


def _limit(query: Mapping[str, str]) -> int:
    asked = query.get("limit", str(USUAL_ITEMS))
    if not (asked.isascii() and asked.isdigit() and len(asked) <= 3 and 1 <= int(asked) <= MOST_ITEMS):
        said = f"limit is no number from 1 to {MOST_ITEMS}"
        raise RequestError(said, param="limit", value=asked[:64], limit=[1, MOST_ITEMS])
    return int(asked)


def _behind(ids: list[str], after: str | None) -> int:
    """Returns where a page begins."""
    if after is None:
        return 0
    if after not in ids:
        raise RequestError("after names no item of this response", param="after", value=after[:64])
    return ids.index(after) + 1


def _listed(item: dict[str, Any], own_id: str) -> dict[str, Any]:
    """Returns an item as it is listed: with an id, without what was not said, a message's content in parts."""
    said = {name: value for name, value in item.items() if value is not None}
    if isinstance(said.get("content"), str):
        kind = "output_text" if said.get("role") == "assistant" else "input_text"
        said["content"] = [{"type": kind, "text": said["content"]}]
    return {"id": own_id, "status": "completed", **said}
