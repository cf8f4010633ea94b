"""What a template would leave out is put so that it writes it; what it leaves out still is told."""

import json

import pytest

from splittime.core.errors import RequestError
from splittime.text.chat_forms import MOST_LEFT_OUT, _into_user, _joined, _one_by_one, left_out, with_arguments_read
from splittime.text.tokenizer import ChatTemplate

SAID = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
CALL = "({{ c.function.name }} {{ c.function.arguments | tojson }} {{ c.id }})"
CALLS = f"{{% for c in m.tool_calls or () %}}{CALL}{{% endfor %}}"
WITH_CALLS = SAID.replace("{% endfor %}", CALLS + "{% endfor %}")
ALTERNATE = (
    "{% for m in messages %}"
    "{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('no') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
ONE_CALL = WITH_CALLS.replace(
    CALLS, "{% if (m.tool_calls or ()) | length > 1 %}{{ raise_exception('no') }}{% endif %}" + CALLS
)
EITHER = WITH_CALLS.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}")
NINE = WITH_CALLS.replace("({{", "{% if c.id | length != 9 %}{{ raise_exception('no') }}{% endif %}({{")
AS_TEXT = WITH_CALLS.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '' }}")
FIRST_SYSTEM = SAID.replace("<{{", "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}<{{")


def turn(role: str, content: str, **more) -> dict:
    return {"role": role, "content": content, **more}


def call(name: str, call_id: str = "c00000001", **arguments) -> dict:
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


SYSTEM, USER, ANSWER, ASKS = turn("system", "S"), turn("user", "U"), turn("assistant", "A"), turn("user", "V")
LATE = turn("system", "late")
CALLED, GAVE = turn("assistant", "", tool_calls=[call("f", a=1)]), turn("tool", "R", tool_call_id="c00000001", name="f")
BOTH = turn("assistant", "T", tool_calls=[call("f", a=1), call("g", "c00000002")])
AND_GAVE = turn("tool", "Q", tool_call_id="c00000002", name="g")


@pytest.mark.parametrize(
    ("template", "chat", "written"),
    [
        (SAID, [SYSTEM, USER, ANSWER, SYSTEM, USER, USER], "<system>S<user>U<assistant>A<system>S<user>U<user>U"),
        (WITH_CALLS, [USER, CALLED, GAVE], '<user>U<assistant>(f {"a": 1} c00000001)<tool>R'),
        (SAID, [turn("developer", "D"), USER], "<system>D<user>U"),
        (ALTERNATE, [turn("developer", "D"), USER], "<user>D\n\nU"),
        (ALTERNATE, [SYSTEM, turn("developer", "D"), USER], "<user>S\n\nD\n\nU"),
        (FIRST_SYSTEM, [SYSTEM, USER, ANSWER, LATE, ASKS], "<system>S<user>U<assistant>A<user>late<user>V"),
        (ALTERNATE, [SYSTEM, USER, ANSWER, SYSTEM, ASKS], "<user>S\n\nU<assistant>A<user>S\n\nV"),
        (ALTERNATE, [USER, ASKS, ANSWER, ANSWER, USER], "<user>U\n\nV<assistant>A\n\nA<user>U"),
        (
            ALTERNATE,
            [USER, CALLED, GAVE, ASKS],
            '<user>U<assistant><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
            "<user><tool_response>\nR\n</tool_response>\n\nV",
        ),
        (
            SAID,
            [USER, CALLED, GAVE],
            '<user>U<assistant><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><tool>R',
        ),
        (AS_TEXT, [USER, CALLED, GAVE], '<user>U<assistant>(f {"a": 1} c00000001)<tool>R'),
        (
            ONE_CALL,
            [USER, BOTH, AND_GAVE, GAVE, ASKS],
            '<user>U<assistant>T(f {"a": 1} c00000001)<tool>R<assistant>(g {} c00000002)<tool>Q<user>V',
        ),
        (
            EITHER,
            [USER, turn("assistant", "T", tool_calls=[call("f")]), GAVE],
            "<user>U<assistant>T<assistant>(f {} c00000001)<tool>R",
        ),
        ("{{ raise_exception('never') if messages | length > 1 }}U", [USER], "U"),
    ],
)
def test_a_template_is_told_what_it_writes(template: str, chat: list[dict], written: str) -> None:
    told = ChatTemplate(template, {})
    assert told.render(chat) == told.render(chat) == written
    assert left_out(chat, None, written) == ()


KNOWS = WITH_CALLS.replace(
    "<{{",
    "{% if m.role == 'user' and loop.previtem and loop.previtem.role == 'tool' %}"
    "{{ raise_exception('no') }}{% endif %}<{{",
)


def test_a_conversation_that_is_written_whole_is_as_it_came() -> None:
    """Though there are others of its form that the template refuses."""
    chat = [USER, CALLED, GAVE, ANSWER, ASKS]
    assert ChatTemplate(KNOWS, {}).render(chat) == ChatTemplate(WITH_CALLS, {}).render(chat)
    assert "<tool_response>" in ChatTemplate(KNOWS, {}).render([USER, CALLED, GAVE, ASKS])


@pytest.mark.parametrize(
    ("ids", "results", "written"),
    [
        ("ab", "ba", "f r2 g r1"),
        ((None, None), (None, None), "f r1 g r2"),
        ("aa", "aa", "f r1 g r2"),
        ("ab", "a", None),
    ],
)
def test_a_result_stands_behind_its_call(ids: tuple, results: tuple, written: str | None) -> None:
    calls = [
        {key: value for key, value in call(name, each).items() if value} for name, each in zip("fg", ids, strict=True)
    ]
    gave = [turn("tool", f"r{number}", tool_call_id=each) for number, each in enumerate(results, 1)]
    before = [USER, turn("assistant", "", tool_calls=[call("f", "x")]), turn("tool", "r1", tool_call_id="x")]
    chat = [*before, turn("assistant", "", tool_calls=calls, reasoning_content="hm"), *gave]
    told = _one_by_one(chat)
    assert told[: len(before)] == before
    flat = [each["content"] or each["tool_calls"][0]["function"]["name"] for each in told[len(before) :]]
    assert " ".join(flat) == written if written else told == chat
    assert sum(each.get("reasoning_content") == "hm" for each in told) == 1


def test_what_is_joined_keeps_names_and_thoughts_and_order() -> None:
    thinks = [turn("assistant", text, reasoning_content=thought) for text, thought in (("A", "a"), ("", "b"))]
    assert _joined("assistant", thinks) == [turn("assistant", "A", reasoning_content="a\n\nb")]
    named = [turn("user", "U", name="alice"), turn("user", "V", name="bob")]
    assert _joined("user", named) == named
    assert _into_user([USER, ANSWER, turn("developer", "D"), ASKS]) == [USER, ANSWER, turn("developer", "D"), ASKS]


def test_ids_that_a_template_refuses_are_others_of_its_form() -> None:
    chat = [
        USER,
        turn("assistant", "", tool_calls=[call("f", "call_1234567890")]),
        turn("tool", "R", tool_call_id="call_1234567890"),
    ]
    (own,) = {word for word in ChatTemplate(NINE, {}).render(chat).replace(")", " ").split() if len(word) == 9}
    assert own.isalnum()
    assert "call_1234567890" in ChatTemplate(WITH_CALLS, {}).render(chat)


def test_what_no_way_saves_is_the_templates_own_refusal() -> None:
    refuses = ChatTemplate(SAID + "{% if messages | length > 2 %}{{ raise_exception('too long') }}{% endif %}", {})
    with pytest.raises(RequestError, match="too long"):
        refuses.render([SYSTEM, USER, CALLED, GAVE])


def test_long_conversations_are_looked_through_once() -> None:
    """A quadratic way would take minutes."""
    chat = [turn("tool", f'result {number} "é\n' * 20, tool_call_id="x") for number in range(4000)]
    written = "".join(json.dumps(each["content"], ensure_ascii=False) for each in chat)
    assert left_out(chat, None, written) == ()
    assert len(left_out(chat, None, written[: len(written) // 2])) == MOST_LEFT_OUT
    assert len(_joined("tool", _one_by_one([turn("assistant", "", tool_calls=[call("f")] * 2), *chat]))) == 2


@pytest.mark.parametrize(("template", "is_known"), [(SAID, False), (SAID + "{# 'observer' #}", True)])
def test_a_role_that_nobody_knows_is_refused_by_its_place(template: str, is_known: bool) -> None:
    chat = [USER, turn("observer", "O")]
    if is_known:
        assert ChatTemplate(template, {}).render(chat) == "<user>U<observer>O"
        return
    with pytest.raises(RequestError, match=r"messages\[1\] has the role 'observer'") as caught:
        ChatTemplate(template, {}).render(chat)
    assert caught.value.info.param == "messages[1].role"


def test_what_is_left_out_is_told_by_its_place() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    thought = turn("assistant", 'say "é"\n  twice', reasoning_content="hm, so")
    chat = [USER, thought, CALLED]
    assert left_out(chat, tools, f"U f {json.dumps(thought['content'])} hm,  so") == ()
    assert left_out(chat, None, "U") == (
        "the model's chat template leaves out the reasoning of messages[1]",
        "the model's chat template leaves out the text of messages[1]",
        "the model's chat template leaves out the call of f in messages[2]",
    )
    assert left_out([USER], tools, "U") == (
        "the model's chat template leaves out the tools: the model was offered none",
    )
    assert left_out([turn("assistant", "<think>no</think> yes")], None, "yes") == ()
    wrote = turn("assistant", "", tool_calls=[call("f", path="a", text='é "\n'), call("f", path="b")])
    assert left_out([wrote], None, r'f {"path": "a", "text": "é \"\n"} f {"path": "b"}') == ()
    assert left_out([wrote], None, "f a e")[0].endswith("the call of f in messages[0]")
    assert len(left_out([turn("user", f"{n} text") for n in range(9)], None, "")) == MOST_LEFT_OUT


def test_a_tool_has_no_description_but_where_the_template_needs_one() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert ChatTemplate("{{ tools | tojson }}", {}).render([USER], tools=tools) == json.dumps(tools)
    assert ChatTemplate("{{ tools[0].function.description + '.' }}", {}).render([USER], tools=tools) == "."


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        *[("", {}), ('{"a": 1', {}), ('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("3", 3), ('"b"', "b")],
        *[("[" * 100_000, {}), ('{"a": 1' + "0" * 30 + "}", {"a": 10**30})],
    ],
)
def test_arguments_of_an_earlier_call_become_an_object_or_the_text_that_a_template_wants(arguments, read) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    for template, expected in (
        ("{{ call['function']['arguments'] | tojson }}", read),
        ("{{ '(' + call['arguments'] + ')' }}", read if isinstance(read, str) else json.dumps(read).replace(" ", "")),
    ):
        (user, answer) = with_arguments_read([turn("user", "x"), turn("assistant", "", tool_calls=[call])], template)
        assert user == turn("user", "x")
        assert answer["tool_calls"] == [{"id": "c", "function": {"name": "f", "arguments": expected}}]
