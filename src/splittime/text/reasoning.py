"""What a model thinks before it answers, told from the answer: the marks around it, where an answer begins, and how a
form is made that of what follows.

A template may open the reasoning in the prompt, or close it there (`enable_thinking: false`); the end of the prompt
says which. Else the answer may begin with the mark. Line breaks beside the marks are layout, and part of nothing.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from splittime.core.errors import ConfigError
from splittime.text import marks
from splittime.text.grammars import literal, up_to
from splittime.text.marks import ReasoningPlace, ToldApart, ToldApartParser, overlap


class ReasoningMarks(NamedTuple):
    """begin, end: what stands around the reasoning. gap: between it and a form. answer: what content begins with,
    reasoning or not, unless it is calls. closed_by: what else shows that reasoning is over."""

    name: str
    begin: str
    end: str
    gap: str = ""
    answer: str = ""
    closed_by: tuple[str, ...] = ()

    @property
    def closes(self) -> str:
        """Returns what shows that reasoning is over."""
        return self.answer or self.end


NONE, HARMONY = "none", "harmony"
REASONING = {
    marks.name: marks
    for marks in (
        ReasoningMarks("think", "<think>", "</think>", "\n\n"),
        ReasoningMarks("mistral", "[THINK]", "[/THINK]"),
        ReasoningMarks("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningMarks(HARMONY, marks.THOUGHT, marks.THOUGHT_END, answer=marks.ANSWER, closed_by=marks.OTHER_CHANNELS),
    )
}
OTHER_NAMES = {"qwen3": "think", "deepseek_r1": "think", "openai_gptoss": HARMONY}  # vLLM's


def check_reasoning_parser(name: str) -> None:
    """Raises ConfigError, with the list, for a name that there is not."""
    if name not in (NONE, *REASONING, *OTHER_NAMES):
        known = ", ".join((NONE, *REASONING, *OTHER_NAMES))
        raise ConfigError(
            f"no reasoning parser {name!r}", param="reasoning_parser", value=name, hint=f"there are: {known}"
        )


def reasoning_of_template(template: str, name: str | None) -> ReasoningMarks | None:
    """Returns the marks of this name; without one, those that the chat template writes; None for no reasoning."""
    if name is not None:
        return REASONING.get(OTHER_NAMES.get(name, name))
    return next((marks for marks in REASONING.values() if marks.closes in template), None)


def place_behind(prompt_end: str, marks: ReasoningMarks) -> ReasoningPlace:
    """Returns where an answer begins behind a prompt with this end, which the template wrote."""
    bare = prompt_end.rstrip()
    if bare.endswith(marks.begin):
        return ReasoningPlace.WITHIN
    return ReasoningPlace.BEHIND if bare.endswith(marks.closes) else ReasoningPlace.BEFORE


def place_within(text: str, marks: ReasoningMarks) -> ReasoningPlace:
    """Returns where an answer begins that goes on with this text."""
    is_open = text.rfind(marks.begin) > text.rfind(marks.end)
    return ReasoningPlace.WITHIN if is_open else ReasoningPlace.BEHIND


def after_reasoning(
    grammar: str, marks: ReasoningMarks, place: ReasoningPlace, token_ids: Mapping[str, int], *, is_calls: bool = False
) -> str:
    """Returns the grammar of answers whose reasoning is any text and which go on as this grammar says. Where the prompt
    has not opened the reasoning, there may be none. token_ids: of marks that are tokens. is_calls: the grammar is that
    of calls, or of a text with all its marks."""
    if place is ReasoningPlace.BEHIND:
        return grammar
    form, *others = json.loads(grammar)["grammars"]
    start = "thought"
    if place is ReasoningPlace.BEFORE:
        start = f'("\\n"? {literal(marks.begin, token_ids)} thought)?'
    start += f" {'' if is_calls else literal(marks.answer, token_ids)} @form"
    rules = f"start: {start}\n" + up_to("thought", marks.end + marks.gap, token_ids)
    return json.dumps({"grammars": [{"lark_grammar": rules}, {**form, "name": "form"}, *others]}, ensure_ascii=False)


class ReasoningParser(ToldApartParser):
    def __init__(self, marks: ReasoningMarks, place: ReasoningPlace) -> None:
        super().__init__()
        self._marks = marks
        self._is_begun = place is not ReasoningPlace.BEFORE
        self._is_first = place is ReasoningPlace.WITHIN  # nothing of the reasoning has come
        self._is_over = place is ReasoningPlace.BEHIND
        self._skips_breaks = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the reasoning so far, with its marks."""
        return self._num_tokens if self._is_over else len(self._offsets) if self._is_begun else 0

    def note_token(self, offset: int) -> None:
        if not self._is_over:
            super().note_token(offset)

    def _told_apart(self, is_end: bool) -> ToldApart:
        if not self._is_begun:
            self._look_for_begin(is_end)
        reasoning = self._reasoning(is_end) if self._is_begun and not self._is_over else ""
        return ToldApart(reasoning, self._content(is_end) if self._is_over else "")

    def _look_for_begin(self, is_end: bool) -> None:
        bare = self._text.lstrip()
        if bare.startswith(self._marks.begin):
            self._text, self._is_begun, self._is_first = bare, True, True
        elif is_end or not self._marks.begin.startswith(bare):
            self._is_begun = self._is_over = True
            self._offsets.clear()

    def _reasoning(self, is_end: bool) -> str:
        if self._is_first and not self._is_past_begin(is_end):
            return ""
        end = self._marks.end
        at = self._text.find(end)
        if at >= 0:
            said, self._text = self._text[:at].rstrip("\n"), self._text[at + len(end) :]
            self._end()
            return said
        sure = self._text[: len(self._text) - (0 if is_end else overlap(self._text, end))].rstrip("\n")
        self._text = "" if is_end else self._text[len(sure) :]
        return sure

    def _is_past_begin(self, is_end: bool) -> bool:
        """Goes to the first character of the reasoning; a mark that its prompt wrote already may come again."""
        bare = self._text.lstrip("\n")
        if not is_end and self._marks.begin.startswith(bare) and bare != self._marks.begin:
            return False
        self._text = bare.removeprefix(self._marks.begin).lstrip("\n")
        self._is_first = not self._text
        return bool(self._text)

    def _end(self) -> None:
        end_at = self._num_chars - len(self._text)
        self._num_tokens = sum(offset < end_at for offset in self._offsets)
        self._offsets.clear()
        self._is_over = self._skips_breaks = True

    def _content(self, is_end: bool) -> str:
        """All that has come; no line breaks right behind the reasoning."""
        if self._skips_breaks:
            self._text = self._text.lstrip("\n")
            self._skips_breaks = not self._text
        said, self._text = self._text, ""
        return said
