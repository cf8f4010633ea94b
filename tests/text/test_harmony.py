"""The messages of gpt-oss: which is reasoning, which is content, and what a call is passed on as."""

import json

import llguidance
import pytest
from vocabularies import vocabulary

from splittime.text.grammars import of_choice
from splittime.text.marks import MOST_HEAD_CHARS, HarmonyParser, ReasoningPlace
from splittime.text.reasoning import HARMONY, REASONING, after_reasoning, place_behind, reasoning_of_template
from splittime.text.tool_families import FAMILIES, Tool
from splittime.text.tool_grammar import grammar_of_calls

BEFORE, WITHIN, BEHIND = ReasoningPlace
THOUGHT = "<|channel|>analysis<|message|>I am <b>.<|end|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
MARKS = REASONING[HARMONY]
CASES = [
    (BEFORE, f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>yes<|return|>", "I am <b>.", "yes"),
    (BEFORE, "<|channel|>final<|message|>yes < no", "", "yes < no"),
    (BEFORE, f"{THOUGHT}{THOUGHT}", "I am <b>.I am <b>.", ""),
    (BEFORE, f"<|start|>assistant{THOUGHT}", "I am <b>.", ""),
    (BEFORE, "<|channel|>commentary<|message|>I ask.<|end|>", "", "I ask."),
    (BEFORE, "<|channel|>analysis<|message|>so", "so", ""),
    (BEFORE, "<|channel|>ana", "", ""),
    (BEFORE, "a text", "", "a text"),
    (BEFORE, f"{THOUGHT}<|start|>assistant{CALL}{{}}", "I am <b>.", f"{CALL}{{}}"),
    (
        BEFORE,
        "<|start|>assistant to=functions.f<|channel|>analysis json<|message|>{}<|call|>",
        "",
        f"{CALL}{{}}<|call|>",
    ),
    (BEFORE, "<|channel|>" + "x" * MOST_HEAD_CHARS, "", "x" * MOST_HEAD_CHARS),
    (BEFORE, f"{CALL}no object<|call|>", "", "no object"),
    (BEFORE, f"{CALL} {{}}<|call|><|channel|>final<|message|>x", "", f"{CALL} {{}}<|call|>x"),
    (BEFORE, "<|start|><|channel|><|end|>" + "x" * MOST_HEAD_CHARS, "", "x" * MOST_HEAD_CHARS),
    (WITHIN, "so<|end|><|start|>assistant<|channel|>final<|message|>yes", "so", "yes"),
    (BEHIND, "es<|end|>", "", "es"),
]


def told_apart(place: ReasoningPlace, *texts: str, tools: tuple[str, ...] = ("f",)) -> tuple[str, str]:
    parser, found = HarmonyParser(place, tools), ["", ""]
    for piece, is_end in [*((piece, False) for piece in texts), ("", True)]:
        for index, part in enumerate(parser.push(piece, is_end=is_end)):
            found[index] += part
    return found[0], found[1]


@pytest.mark.parametrize(("place", "text", "reasoning", "content"), CASES)
def test_messages_are_told_apart_the_same_wherever_they_are_cut(place, text: str, reasoning: str, content: str) -> None:
    assert told_apart(place, text) == (reasoning, content)
    for at in range(len(text)):
        assert told_apart(place, text[:at], text[at:]) == (reasoning, content), at
    assert told_apart(place, *text) == (reasoning, content)


def test_a_call_that_nobody_reads_is_content_without_marks() -> None:
    assert told_apart(BEFORE, f"{CALL}{{}}<|call|>", tools=()) == ("", "{}")
    assert told_apart(BEFORE, f"{CALL}{{}}<|call|>".replace("functions.f", "browser.f"), tools=("g",)) == ("", "{}")


@pytest.mark.parametrize("name", ["my/tool", "browser:search"])
def test_a_call_of_what_can_be_no_function_is_content_without_marks(name: str) -> None:
    text = f'<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{"a": 1}}<|call|>'
    assert told_apart(BEFORE, text, tools=("g",)) == ("", '{"a": 1}')


def test_a_call_of_an_unknown_function_is_passed_on() -> None:
    assert told_apart(BEFORE, f"{CALL}{{}}<|call|>", tools=("g",)) == ("", f"{CALL}{{}}<|call|>")


def test_tokens_of_the_reasoning_are_counted_with_its_marks() -> None:
    parser, offset, counts = HarmonyParser(BEFORE, ()), 0, []
    end = ["<|end|>", "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "c", "d"]
    for token in ["<|channel|>", "analysis", "<|message|>", "a", "b", *end]:
        parser.note_token(offset)
        parser.push(token)
        offset += len(token)
        counts.append(parser.num_tokens)
    assert counts == [0, 0, 3, 4, 5, *[6] * 8]


def test_the_template_says_that_a_model_writes_messages() -> None:
    template = '"<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>"'
    assert reasoning_of_template(template, None) is MARKS
    assert reasoning_of_template("", "openai_gptoss") is MARKS
    assert place_behind("<|end|><|start|>assistant", MARKS) is BEFORE
    assert place_behind("<|start|>assistant<|channel|>analysis<|message|>", MARKS) is WITHIN
    assert place_behind("<|start|>assistant<|channel|>final<|message|>", MARKS) is BEHIND


TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>")


@pytest.fixture(scope="module", params=[(), TOKENS], ids=["by text", "by token"])
def words(request):
    backend, tokens = vocabulary(*request.param)
    return backend, tokens, {mark: backend.token_to_id(mark) for mark in request.param}


def allows(words, grammar: str, text: str) -> bool:
    backend, tokens, _ = words
    matcher = llguidance.LLMatcher(tokens, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = backend.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_form_is_that_of_the_final_message(words) -> None:
    form = of_choice(["yes"], "p")
    held = {place: after_reasoning(form, MARKS, place, words[2]) for place in ReasoningPlace}
    final = "<|channel|>final<|message|>"
    for text, is_allowed in (("yes", True), ("no", False)):
        assert allows(words, held[BEFORE], f"{final}{text}") is is_allowed
        assert allows(words, held[BEFORE], f"{THOUGHT}<|start|>assistant{final}{text}") is is_allowed
        assert allows(words, held[WITHIN], f"so<|end|><|start|>assistant{final}{text}") is is_allowed
    assert allows(words, held[BEHIND], "yes")
    assert not allows(words, held[BEFORE], "yes")
    assert not allows(words, held[BEFORE], f"{THOUGHT}<|start|>assistantyes")


def test_calls_come_behind_the_reasoning_or_at_once(words) -> None:
    tool, forms = Tool("f", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, False), {}
    for may_answer in (False, True):
        made = grammar_of_calls(FAMILIES["openai"], [tool], may_answer=may_answer, may_repeat=False, token_ids=words[2])
        forms[may_answer] = after_reasoning(made, MARKS, BEFORE, words[2], is_calls=True)
    for before in ("", f"{THOUGHT}<|start|>assistant"):
        for form in forms.values():
            assert allows(words, form, f'{before}{CALL}{{"a": 1}}<|call|>')
            assert not allows(words, form, f'{before}{CALL}{{"a": "x"}}<|call|>')
        assert allows(words, forms[True], f"{before}<|channel|>final<|message|>any text")
        assert not allows(words, forms[False], f"{before}<|channel|>final<|message|>any text")
    assert json.loads(forms[True])
