"""What affinity knows of prompts: who served which beginning, what everybody shares, within bounds and tenants."""

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.gateway.routing.affinity import (
    BLOCK_BYTES,
    MAX_BLOCKS,
    MAX_BODY_BYTES,
    MAX_HOLDERS,
    PrefixTable,
    salted_prompt,
)


def text_of(seed: int, blocks: float) -> bytes:
    """Longer ones of a seed begin with the shorter ones."""
    return random.Random(seed).randbytes(64 * BLOCK_BYTES)[: int(blocks * BLOCK_BYTES)]


def table(max_blocks: int = 10_000) -> PrefixTable:
    return PrefixTable(max_blocks, b"key")


def body(**fields) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "What is \u00e4?"}
ANSWERED = {"role": "assistant", "content": "A letter."}


# ---- the text


def test_the_next_turn_begins_with_the_whole_of_the_turn_before():
    tools = [{"type": "function", "function": {"name": "f"}}]
    first = salted_prompt(body(messages=[SYSTEM, ASKED], tools=tools))
    second = salted_prompt(body(messages=[SYSTEM, ASKED, ANSWERED, ASKED], tools=tools, max_tokens=3))
    assert second.text.startswith(first.text)
    assert not second.text.startswith(salted_prompt(body(messages=[SYSTEM, ASKED])).text)  # other tools come first
    assert salted_prompt(body(prompt="abcd")).text.startswith(salted_prompt(body(prompt="ab")).text)
    assert salted_prompt(body(prompt=[1, 2, 3])).text.startswith(salted_prompt(body(prompt=[1, 2])).text)


def test_how_a_message_is_written_does_not_matter():
    plain = salted_prompt(body(messages=[ASKED]))
    written = b'{"messages": [ {"content":"What is \\u00e4?", "tool_calls": null,\n "role":"user"} ]}'
    assert salted_prompt(written).text == plain.text


def test_what_cannot_be_read_is_none_and_the_salt_is_told():
    assert salted_prompt(b'{"prompt": "' + b"x" * MAX_BODY_BYTES + b'"}') is None
    assert salted_prompt(b'{"prompt": "\xff"}') is None
    assert salted_prompt(b"[]") is None
    assert salted_prompt(body(prompt="x", cache_salt="s")).salt != salted_prompt(body(prompt="x")).salt


# ---- the table


def test_it_knows_who_served_how_much_the_latest_of_equal_ones_last():
    known, text = table(), text_of(1, 6)
    shorter, longer = known.see(b"", text[: 3 * BLOCK_BYTES]), known.see(b"", text)
    known.note_served(longer.keys, "a")
    known.note_served(shorter.keys, "b")
    assert list(known.depths(longer.keys).items()) == [("b", 3), ("a", 6)]
    assert list(known.depths(shorter.keys).items()) == [("a", 3), ("b", 3)]
    known.forget(longer.keys, "a")
    assert known.depths(longer.keys) == {"b": 3}
    assert known.depths(known.see(b"", text_of(2, 6)).keys) == {}


def test_scopes_share_nothing():
    known, text = table(), text_of(1, 4)
    mine = known.see(b"mine", text)
    known.note_served(mine.keys, "a")
    theirs = known.see(b"theirs", text)
    assert not set(mine.keys) & set(theirs.keys)
    assert known.depths(theirs.keys) == {}


def test_one_conversation_is_not_everybody():
    known, whole = table(), text_of(1, 40)
    for turn in range(1, 20):
        assert known.see(b"", whole[: int(1.7 * turn * BLOCK_BYTES)]).shared == 0
    assert known.see(b"", whole[: int(1.7 * 10 * BLOCK_BYTES)]).shared == 0  # its tenth turn again


def test_what_most_conversations_begin_with_is_everybodys_and_no_more():
    known, system = table(), text_of(0, 3.5)
    seen = []
    for turn in range(1, 4):
        for chat in range(1, 31):
            seen.append(known.see(b"", system + text_of(chat, 2 * turn)).shared)
    assert seen[:3] == [0, 0, 0]  # of so few nobody can tell
    assert set(seen[4:]) == {3}


def test_short_questions_behind_a_system_prompt_are_conversations_too():
    """Their own blocks are not whole, so what they differ in is in no key."""
    known, system = table(), text_of(0, 3)
    seen = [known.see(b"", system + b"question %d" % number).shared for number in range(20)]
    assert seen[-1] == 3
    again = table()
    assert [again.see(b"", system + b"the same").shared for _ in range(20)] == [0] * 20


def test_a_beginning_that_a_third_has_is_not_everybodys():
    known = table()
    documents = [text_of(number, 4) for number in range(3)]
    seen = [known.see(b"", documents[i % 3] + text_of(100 + i, 1)).shared for i in range(90)]
    assert set(seen[6:]) == {0}


def test_what_was_everybodys_is_not_for_ever():
    known, old = table(), text_of(0, 3)
    for chat in range(100):
        known.see(b"", old + text_of(1 + chat, 1))
    assert known.see(b"", old + text_of(500, 1)).shared == 3
    for chat in range(100):
        known.see(b"", text_of(1000 + chat, 3))
    assert known.see(b"", old + text_of(500, 2)).shared == 0  # which goes on, and is not counted again
    assert known.see(b"", old + text_of(501, 1)).shared == 0


def test_a_prompt_has_so_many_blocks_at_most():
    known = table()
    seen = known.see(b"", bytes(2 * MAX_BLOCKS * BLOCK_BYTES))
    assert len(seen.keys) == MAX_BLOCKS


def test_of_a_block_so_many_holders_are_remembered():
    known, seen = table(), None
    for number in range(3 * MAX_HOLDERS):
        seen = known.see(b"", text_of(1, 1))
        known.note_served(seen.keys, f"u{number}")
    assert list(known.depths(seen.keys)) == [f"u{number}" for number in range(2 * MAX_HOLDERS, 3 * MAX_HOLDERS)]


asked = st.tuples(st.sampled_from([b"a", b"b"]), st.lists(st.integers(0, 2), max_size=6), st.integers(0, 40))


@given(st.lists(st.tuples(asked, st.sampled_from("xyz"), st.booleans()), max_size=40))
@settings(max_examples=150, deadline=None)
def test_it_stays_bounded_and_no_block_outlives_its_beginning(events):
    known, chains = table(max_blocks=9), []
    for (scope, words, rest), upstream, fails in events:
        seen = known.see(scope, b"".join(bytes([word]) * BLOCK_BYTES for word in words) + bytes(rest))
        chains.append(seen.keys)
        (known.forget if fails else known.note_served)(seen.keys, upstream)
        assert len(known) <= 9
        assert 0 <= seen.shared <= len(seen.keys)
        depths = list(known.depths(seen.keys).values())
        assert depths == sorted(depths)
        for keys in chains:
            there = [key in known for key in keys]
            assert there == sorted(there, reverse=True)
