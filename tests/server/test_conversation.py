"""A conversation that is kept: in turns it is the chat that it is at once, and no turn looks at what was before."""

import json
from copy import deepcopy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.api.response_items import ItemMessage, chat_messages, instructed, items_of
from splittime.api.responses import MOST_BODIES, Conversation
from splittime.core.errors import RequestError

from .test_responses import post, start

KINDS = ["system", "user", "assistant", "reasoning", "call", "output"]
MADE = {
    "reasoning": {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}]},
    "call": {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    "output": {"type": "function_call_output", "call_id": "c", "output": "o"},
}


@given(st.lists(st.sampled_from(KINDS), max_size=12), st.lists(st.integers(0, 14), min_size=2, max_size=2).map(sorted))
def test_a_conversation_in_turns_is_the_same_chat(kinds: list[str], cuts: list[int]) -> None:
    if "output" in kinds:
        kinds.insert(kinds.index("output"), "call")
    items = items_of([MADE.get(kind, {"role": kind, "content": f"{n}"}) for n, kind in enumerate(kinds)])
    told = Conversation()
    for part in (items[: cuts[0]], items[cuts[0] : cuts[1]], items[cuts[1] :]):
        before, told = (told, deepcopy(told.messages)), told.gone_on(part)
        assert before[0].messages == before[1]  # what it goes on from stays as it was
    assert instructed(told.messages, "one") == in_one_message("one", items)
    assert instructed(told.messages, None) == chat_messages(None, items)
    assert [json.loads(each.body)["type"] for each in told.items] == [item.type for item in items]


def in_one_message(instructions: str, items: list) -> list[dict]:
    """Returns the chat of instructions that are an item themselves."""
    return chat_messages(None, [ItemMessage(role="system", content=instructions), *items])


def test_an_output_may_be_of_a_call_of_any_turn() -> None:
    other = MADE["call"] | {"call_id": "d"}
    told = Conversation().gone_on(items_of([MADE["call"]])).gone_on(items_of([other])).gone_on(items_of("x"))
    assert told.gone_on(items_of([MADE["output"]])).messages[-1]["tool_call_id"] == "c"
    with pytest.raises(RequestError, match="has the id 'e'"):
        told.gone_on(items_of([MADE["output"] | {"call_id": "e"}]))


def test_a_turn_looks_at_no_earlier_message_but_the_last() -> None:
    earlier = Conversation().gone_on(
        items_of([{"role": role, "content": "x"} for role in ("user", "assistant", "user")])
    )
    later = earlier.gone_on(items_of([{"role": "assistant", "content": "y"}]))
    assert [one is other for one, other in zip(earlier.messages, later.messages, strict=False)] == [True, True, False]
    assert later.items[:3] == earlier.items
    assert later.num_bytes == earlier.num_bytes + len(later.items[3].body)


def test_a_conversation_is_no_larger_than_some_bodies() -> None:
    small, limit = start("ok", max_body_bytes=600), MOST_BODIES * 600
    try:
        answer, ids, num_bytes = None, {}, 0
        while not answer:
            status, _, told = post(small, {"input": "y" * 400, **ids})
            answer = told.get("error")
            if status == 200:
                ids = {"previous_response_id": told["id"]}
                kept = small.service.responses.get(small.service.keys.tenants[0].name, told["id"], "").conversation
                assert num_bytes < kept.num_bytes
                num_bytes = kept.num_bytes
        assert (status, answer["code"], answer["param"], answer["limit"]) == (413, "body_too_large", "input", limit)
        assert limit - 700 < num_bytes <= limit + 700
    finally:
        small.stop()


def test_a_conversation_has_as_many_items_as_a_body_may(monkeypatch) -> None:
    monkeypatch.setattr("splittime.api.responses.MAX_PARTS", 3)
    two = Conversation().gone_on(items_of([{"role": "user", "content": "x"}] * 2))
    assert len(two.gone_on(items_of("z")).items) == 3
    with pytest.raises(RequestError, match="more than 3 items"):
        two.gone_on(items_of([{"role": "user", "content": "x"}] * 2))
