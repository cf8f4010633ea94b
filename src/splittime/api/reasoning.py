"""What a chat's answer says of the model's reasoning: where it begins, whether it is shown, and what a form is of."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from splittime.api.schema import ChatBody
from splittime.core.errors import RequestError
from splittime.core.sampling import ReasoningLimit
from splittime.text.answer_marks import AnswerMarks
from splittime.text.harmony import HarmonyParser
from splittime.text.marks import ReasoningPlace
from splittime.text.reasoning import (
    HARMONY,
    ReasoningMarks,
    ReasoningParser,
    after_reasoning,
    place_behind,
    place_within,
)

BUDGET, MOST = "thinking_token_budget", 2**31 - 1


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """An answer that may have reasoning. place: where it begins; None until the prompt is known. token_ids: of marks
    that are tokens. tools: that its content may call. limit: of the reasoning, as if an answer could begin with it."""

    marks: ReasoningMarks
    is_shown: bool
    place: ReasoningPlace | None
    token_ids: Mapping[str, int]
    tools: frozenset[str]
    limit: ReasoningLimit | None = None

    def begun(self, prompt_end: str) -> "ReasoningUse":
        """Returns it with the place. prompt_end: the prompt's last characters."""
        return self if self.place is not None else replace(self, place=place_behind(prompt_end, self.marks))

    def parser(self) -> ReasoningParser | HarmonyParser:
        assert self.place is not None
        if self.marks.name == HARMONY:
            return HarmonyParser(self.place, self.tools)
        return ReasoningParser(self.marks, self.place)

    @property
    def limit_here(self) -> ReasoningLimit | None:
        """The limit of an answer that begins at the place."""
        if self.limit is None or self.place is ReasoningPlace.BEHIND:
            return None
        is_open = self.place is ReasoningPlace.WITHIN
        return msgspec.structs.replace(self.limit, begin_ids=(), blank_ids=()) if is_open else self.limit

    def held(self, grammar: str) -> str:
        """Returns the grammar of answers whose content has this grammar."""
        assert self.place is not None
        return after_reasoning(grammar, self.marks, self.place, self.token_ids, is_calls=bool(self.tools))


def reasoning_use_of(body: ChatBody, marks: AnswerMarks, tools: Iterable[str]) -> ReasoningUse | None:
    """Returns None for a model that does not reason. tools: that the answer may call. A last message that is continued
    says itself where it stands. Raises RequestError for a bound where there can be none."""
    limit = _limit_of(body.thinking_token_budget, marks, has_tools=bool(body.tools))
    if marks.reasoning is None:
        return None
    place = None
    if body.continue_final_message:
        place = place_within(str(body.messages[-1].to_template()["content"]), marks.reasoning)
    is_shown = body.include_reasoning is not False
    return ReasoningUse(marks.reasoning, is_shown, place, marks.token_ids, frozenset(tools), limit)


def _limit_of(budget: int | None, marks: AnswerMarks, *, has_tools: bool) -> ReasoningLimit | None:
    if budget is None or budget == -1:
        return None
    if not 0 <= budget <= MOST:
        words = f"{BUDGET} is {budget}, outside -1 to {MOST}"
        raise RequestError(words, param=BUDGET, value=str(budget), limit=[-1, MOST])
    found, (why, hint) = marks.reasoning_ids, _why_unbound(marks, has_tools=has_tools)
    if found is None or why:
        raise RequestError(f"{BUDGET}: {why}", param=BUDGET, value=budget, hint=hint)
    return ReasoningLimit(budget, found.end, found.begins, found.closed_by, found.blanks)


def can_be_bound(marks: AnswerMarks, *, has_tools: bool) -> bool:
    """Returns whether the reasoning of this model can have a bound."""
    return not _why_unbound(marks, has_tools=has_tools)[0]


def _why_unbound(marks: AnswerMarks, *, has_tools: bool) -> tuple[str, str]:
    """Returns why there can be no bound, "" where there can, and a way out."""
    hint = "leave it out; max_tokens bounds the whole answer"
    if marks.reasoning is None:
        return "nothing says that this model reasons", "--reasoning-parser names the marks of its reasoning"
    if marks.reasoning_ids is None:
        end = marks.reasoning.end
        return f"{end} is no token of this model, so that tokens do not say where reasoning ends", hint
    if marks.reasoning.name == HARMONY and has_tools:
        return "where gpt-oss may call tools, its reasoning cannot be closed", "reasoning_effort: low"
    return "", hint
