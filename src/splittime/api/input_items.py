"""What a stored response had as input, as OpenAI's Responses API lists it: the conversation up to its output, the
latest item first unless asked otherwise, in pages."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from splittime.api.conversation import KeptItem
from splittime.core.errors import RequestError

MOST_ITEMS, USUAL_ITEMS = 100, 20  # of a page
ORDERS = ("desc", "asc")
QUERY: tuple[dict[str, Any], ...] = (
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS}},
    {"name": "order", "in": "query", "schema": {"enum": list(ORDERS)}},
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "An item's id: those behind it."},
)
FIELDS = tuple(each["name"] for each in QUERY)


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
