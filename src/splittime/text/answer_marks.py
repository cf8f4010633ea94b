"""The marks by which a model's answers are read: of its calls, and of what it thinks before."""

from collections.abc import Mapping
from typing import NamedTuple

from splittime.text.grammars import pieces
from splittime.text.reasoning import HARMONY, ReasoningMarks, reasoning_of_template
from splittime.text.tokenizer import Tokenizer
from splittime.text.tool_families import ToolFamily, family_named, family_of_template

_MOST_BLANKS = {" ": 8, "\n": 4, "\t": 2, "\r\n": 2}
_BLANKS = tuple(blank * count for blank, most in _MOST_BLANKS.items() for count in range(1, most + 1))


class ReasoningIds(NamedTuple):
    """The marks of reasoning as tokens. begins: with one of these runs begins an answer that has reasoning, be it
    behind some of the blanks. end: closes it, and of gpt-oss opens what is said. closed_by: shows that it is over too.
    blanks: tokens of white space."""

    begins: tuple[tuple[int, ...], ...]
    end: tuple[int, ...]
    closed_by: tuple[tuple[int, ...], ...]
    blanks: tuple[int, ...]


class AnswerMarks(NamedTuple):
    """reasoning: None where it is no part of its own. tells_tools: the chat template writes tools into the prompt.
    token_ids: of the marks that are tokens of their own, by their text. shown_ids: those that are no text unless they
    are asked for. reasoning_ids: None where the end of the reasoning has no token of its own, so that tokens cannot say
    where it is."""

    tools: ToolFamily
    reasoning: ReasoningMarks | None
    tells_tools: bool
    token_ids: Mapping[str, int]
    shown_ids: frozenset[int]
    reasoning_ids: ReasoningIds | None


def answer_marks(tokenizer: Tokenizer, tool_parser: str | None, reasoning_parser: str | None) -> AnswerMarks:
    """Returns the marks that the settings name; else those of the chat template. Who writes calls as gpt-oss does has
    them among the marks of its reasoning, which it has in any case. Raises ConfigError for a name that there is not."""
    template = tokenizer.chat_templates.get("default", "")
    tools = family_of_template(template) if tool_parser is None else family_named(tool_parser)
    reasoning = reasoning_of_template(template, HARMONY if tools.name == "openai" else reasoning_parser)
    marks = (*tools.marks, *(() if reasoning is None else (reasoning.begin, reasoning.end, reasoning.answer)))
    ids = {name: each for name, each in tokenizer.added_tokens.items() if any(name in mark for mark in marks)}
    shown = tokenizer.special_ids.intersection(ids.values())
    return AnswerMarks(tools, reasoning, "tools" in template, ids, shown, _reasoning_ids(tokenizer, reasoning, ids))


def _reasoning_ids(tokenizer: Tokenizer, marks: ReasoningMarks | None, ids: Mapping[str, int]) -> ReasoningIds | None:
    if marks is None or not any(part in ids for part in pieces(marks.end, ids)):
        return None
    begins = (breaks + marks.begin for breaks in ("", "\n", "\n\n"))  # of which a mark that is no token has a part
    return ReasoningIds(
        tuple(_spelled(tokenizer, begin, ids) for begin in begins),
        _spelled(tokenizer, marks.end + marks.answer, ids),
        tuple(_spelled(tokenizer, mark, ids) for mark in marks.closed_by),
        tuple(sorted({token for blank in _BLANKS for token in _spelled(tokenizer, blank, ids)})),
    )


def _spelled(tokenizer: Tokenizer, mark: str, ids: Mapping[str, int]) -> tuple[int, ...]:
    parts = (
        [ids[part]] if part in ids else tokenizer.encode(part, add_special_tokens=False) for part in pieces(mark, ids)
    )
    return tuple(token for part in parts for token in part)
