"""What a chat's answer says of the model's reasoning: where it begins, whether it is shown, and what a form is of."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from splittime.api.schema import ChatBody
from splittime.text.answer_marks import AnswerMarks
from splittime.text.harmony import HarmonyParser
from splittime.text.reasoning import (
    HARMONY,
    ReasoningMarks,
    ReasoningParser,
    after_reasoning,
    place_behind,
    place_within,
)
from splittime.text.told_apart import ReasoningPlace


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """An answer that may have reasoning. place: where it begins; None until the prompt is known. token_ids: of marks
    that are tokens. tools: that its content may call."""

    marks: ReasoningMarks
    is_shown: bool
    place: ReasoningPlace | None
    token_ids: Mapping[str, int]
    tools: frozenset[str]

    def begun(self, prompt_end: str) -> "ReasoningUse":
        """Returns it with the place. prompt_end: the prompt's last characters."""
        return self if self.place is not None else replace(self, place=place_behind(prompt_end, self.marks))

    def parser(self) -> ReasoningParser | HarmonyParser:
        assert self.place is not None
        if self.marks.name == HARMONY:
            return HarmonyParser(self.place, self.tools)
        return ReasoningParser(self.marks, self.place)

    def held(self, grammar: str) -> str:
        """Returns the grammar of answers whose content has this grammar."""
        assert self.place is not None
        return after_reasoning(grammar, self.marks, self.place, self.token_ids, is_calls=bool(self.tools))


def reasoning_use_of(body: ChatBody, marks: AnswerMarks, tools: Iterable[str]) -> ReasoningUse | None:
    """Returns None for a model that does not reason. tools: that the answer may call. A last message that is continued
    says itself where it stands."""
    if marks.reasoning is None:
        return None
    place = None
    if body.continue_final_message:
        place = place_within(str(body.messages[-1].to_template()["content"]), marks.reasoning)
    is_shown = body.include_reasoning is not False
    return ReasoningUse(marks.reasoning, is_shown, place, marks.token_ids, frozenset(tools))
