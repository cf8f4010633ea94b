"""What a chat's answer says of the model's reasoning: where it begins, whether it is shown, and what a form is of."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from splittime.api.schema import ChatBody
from splittime.text.answer_marks import AnswerMarks
from splittime.text.reasoning import (
    ReasoningMarks,
    ReasoningParser,
    ReasoningPlace,
    after_reasoning,
    place_behind,
    place_within,
)


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """An answer that may have reasoning. place: where it begins; None until the prompt is known. token_ids: of marks
    that are tokens."""

    marks: ReasoningMarks
    is_shown: bool
    place: ReasoningPlace | None
    token_ids: Mapping[str, int]

    def begun(self, prompt_end: str) -> "ReasoningUse":
        """Returns it with the place. prompt_end: the prompt's last characters."""
        return self if self.place is not None else replace(self, place=place_behind(prompt_end, self.marks))

    def parser(self) -> ReasoningParser:
        assert self.place is not None
        return ReasoningParser(self.marks, self.place)

    def held(self, grammar: str) -> str:
        """Returns the grammar of answers whose content has this grammar."""
        assert self.place is not None
        return after_reasoning(grammar, self.marks, self.place, self.token_ids)


def reasoning_use_of(body: ChatBody, marks: AnswerMarks) -> ReasoningUse | None:
    """Returns None for a model that does not reason. A last message that is continued says itself where it stands."""
    if marks.reasoning is None:
        return None
    place = None
    if body.continue_final_message:
        place = place_within(str(body.messages[-1].to_template()["content"]), marks.reasoning)
    return ReasoningUse(marks.reasoning, body.include_reasoning is not False, place, marks.token_ids)
