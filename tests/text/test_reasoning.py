"""Reasoning told from content: wherever the text is cut into pieces, wherever the answer begins, and under a form."""

import json

import llguidance
import pytest
from vocabularies import vocabulary

from splittime.core.errors import ConfigError
from splittime.text.grammars import of_choice, of_json_schema, of_lark, of_regex
from splittime.text.marks import ReasoningPlace
from splittime.text.reasoning import (
    REASONING,
    ReasoningParser,
    after_reasoning,
    check_reasoning_parser,
    place_behind,
    place_within,
    reasoning_of_template,
)

THINK = REASONING["think"]
BEFORE, WITHIN, BEHIND = ReasoningPlace
CASES = [
    (BEFORE, "<think>\nwhy <b> not\n\n</think>\n\nyes </think> no\n", "why <b> not", "yes </think> no\n"),
    (BEFORE, "\n<think>a</think>b", "a", "b"),
    (BEFORE, "<thinking>a</think>", "", "<thinking>a</think>"),
    (BEFORE, " plain <think>a</think>", "", " plain <think>a</think>"),
    (BEFORE, "<think></think>\n\n", "", ""),
    (BEFORE, "<think>\n\n</think>\n\n{}", "", "{}"),
    (BEFORE, "<think>a\n\n", "a", ""),
    (BEFORE, "<think>a\n</thin", "a\n</thin", ""),
    (BEFORE, "<thi", "", "<thi"),
    (BEFORE, "", "", ""),
    (WITHIN, "a\nb</think>c", "a\nb", "c"),
    (WITHIN, "\n<think>\na</think>c", "a", "c"),
    (WITHIN, "a < b </ c", "a < b </ c", ""),
    (WITHIN, "</think>c", "", "c"),
    (WITHIN, "é</think>\n \nc", "é", " \nc"),
    (BEHIND, "<think>a</think>\nb", "", "<think>a</think>\nb"),
]


def told_apart(place: ReasoningPlace, *texts: str) -> tuple[str, str]:
    parser, found = ReasoningParser(THINK, place), ["", ""]
    for piece, is_end in [*((piece, False) for piece in texts), ("", True)]:
        for index, part in enumerate(parser.push(piece, is_end=is_end)):
            found[index] += part
    return found[0], found[1]


@pytest.mark.parametrize(("place", "text", "reasoning", "content"), CASES)
def test_an_answer_is_told_apart_the_same_wherever_it_is_cut(place, text: str, reasoning: str, content: str) -> None:
    assert told_apart(place, text) == (reasoning, content)
    for at in range(len(text)):
        assert told_apart(place, text[:at], text[at:]) == (reasoning, content), at
    assert told_apart(place, *text) == (reasoning, content)


@pytest.mark.parametrize(
    ("place", "tokens", "counts"),
    [
        (BEFORE, ["<thi", "nk>", "a", "\n</think", ">\n\nb", "c"], [0, 2, 3, 4, 5, 5]),
        (WITHIN, ["a", "", "</think>", "b"], [1, 2, 3, 3]),
        (BEFORE, ["a", "b"], [0, 0]),
        (BEHIND, ["a", "b"], [0, 0]),
    ],
)
def test_tokens_of_the_reasoning_are_counted_with_its_marks(place, tokens: list[str], counts: list[int]) -> None:
    parser, offset, found = ReasoningParser(THINK, place), 0, []
    for token in tokens:
        parser.note_token(offset)
        parser.push(token)
        offset += len(token)
        found.append(parser.num_tokens)
    assert found == counts


def test_a_text_that_comes_late_changes_no_count() -> None:
    """Stop strings hold a text back, while its tokens are noted."""
    parser = ReasoningParser(THINK, WITHIN)
    for offset in (0, 1, 9, 10):
        parser.note_token(offset)
    parser.push("a</think>bc")
    assert parser.num_tokens == 2


def test_the_prompts_end_says_where_an_answer_begins() -> None:
    assert place_behind("<|assistant|>\n", THINK) is BEFORE
    assert place_behind("<|assistant|>\n<think>\n", THINK) is WITHIN
    assert place_behind("<|assistant|><think>\n\n</think>\n\n", THINK) is BEHIND
    assert place_behind("what is <think>?<|end|>", THINK) is BEFORE
    assert place_within("<think>\nso", THINK) is WITHIN
    assert place_within("<think>\nso</think>it", THINK) is BEHIND
    assert place_within("it", THINK) is BEHIND


def test_who_reasons_is_said_by_the_template_or_the_setting() -> None:
    assert reasoning_of_template("{{ m.content.split('</think>')[-1] }}", None) is THINK
    assert reasoning_of_template("{{ m.content }}", None) is None
    assert reasoning_of_template("{{ m.content }}", "deepseek_r1") is THINK
    assert reasoning_of_template("</think>", "none") is None
    check_reasoning_parser("qwen3")
    with pytest.raises(ConfigError, match="granite") as refused:
        check_reasoning_parser("granite")
    assert "think" in str(refused.value.info.hint)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMS = [
    (of_json_schema(SCHEMA, "p"), '{"a": 12}', '{"a": "x"}'),
    (of_regex("<t[a-z]+> ", "p"), "<thing> ", "<t> "),
    (of_choice(["yes", "<thing"], "p"), "<thing", "<think"),
    (of_lark('start: "a" b\nb: /[0-9]+/', "p"), "a12", "ab"),
]


@pytest.fixture(scope="module", params=[(), ("<think>", "</think>")], ids=["by text", "by token"])
def words(request):
    backend, tokens = vocabulary(*request.param)
    return backend, tokens, {mark: backend.token_to_id(mark) for mark in request.param}


@pytest.mark.parametrize(("form", "right", "wrong"), FORMS)
def test_a_form_is_that_of_what_follows_the_reasoning(words, form: str, right: str, wrong: str) -> None:
    backend, tokens, ids = words

    def allows(place: ReasoningPlace, text: str, *, letter_by_letter: bool = False) -> bool:
        matcher = llguidance.LLMatcher(tokens, after_reasoning(form, THINK, place, ids), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        texts = text if letter_by_letter else [text]
        found = [token for each in texts for token in backend.encode(each, add_special_tokens=False).ids]
        return matcher.try_consume_tokens(found) == len(found) and matcher.is_accepting()

    thought = 'so {"a": "x"} or\n\n yes </ think'
    is_spelled = not ids
    for slowly in (False, is_spelled):
        assert allows(BEFORE, f"<think>{thought}</think>\n\n{right}", letter_by_letter=slowly)
        assert allows(WITHIN, f"{thought}</think>\n\n{right}", letter_by_letter=slowly)
    assert not allows(BEFORE, f"<think>{thought}</think>\n\n{wrong}")
    assert not allows(WITHIN, f"{thought}</think>\n\n{wrong}")
    assert not allows(WITHIN, right)
    assert not allows(WITHIN, thought)
    assert allows(BEFORE, right)
    assert allows(BEHIND, right)
    assert not allows(BEFORE, wrong)
    assert after_reasoning(form, THINK, BEHIND, ids) == form
    assert len(json.loads(after_reasoning(form, THINK, WITHIN, ids))["grammars"]) == 2
