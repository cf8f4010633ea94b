"""Which tools an answer may call, of a chat's body: what the template is told, what the answer is held to, and how its
text is read.

What a chat's answer says of the model's reasoning: where it begins, whether it is shown, and what a form is of.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from splittime.api.schema import ChatBody, NamedTool
from splittime.core.errors import RequestError
from splittime.core.sampling import ReasoningLimit
from splittime.text import reasoning
from splittime.text.answer_marks import AnswerMarks
from splittime.text.marks import HarmonyParser, ReasoningPlace
from splittime.text.reasoning import HARMONY
from splittime.text.tool_families import MAX_TOOLS, Tool, ToolFamily
from splittime.text.tool_grammar import grammar_of_calls
from splittime.text.tool_parser import ToolParser

BUDGET, MOST = "thinking_token_budget", 2**31 - 1
LABELS_TOLD = "x-anthropic-billing-header in the system prompt has no effect: the model is not told who is billed"
_LABELS = re.compile(r"(?i:x-anthropic-billing-header:[^\n]*(?:\n+|\Z))+")
ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class ReasoningUse:
    """An answer that may have reasoning. place: where it begins; None until the prompt is known. token_ids: of marks
    that are tokens. tools: that its content may call. limit: of the reasoning, as if an answer could begin with it."""

    marks: reasoning.ReasoningMarks
    is_shown: bool
    place: ReasoningPlace | None
    token_ids: Mapping[str, int]
    tools: frozenset[str]
    limit: ReasoningLimit | None = None

    def begun(self, prompt_end: str) -> "ReasoningUse":
        """Returns it with the place. prompt_end: the prompt's last characters."""
        return self if self.place is not None else replace(self, place=reasoning.place_behind(prompt_end, self.marks))

    def parser(self) -> reasoning.ReasoningParser | HarmonyParser:
        assert self.place is not None
        if self.marks.name == reasoning.HARMONY:
            return HarmonyParser(self.place, self.tools)
        return reasoning.ReasoningParser(self.marks, self.place)

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
        return reasoning.after_reasoning(grammar, self.marks, self.place, self.token_ids, is_calls=bool(self.tools))


def reasoning_use_of(body: ChatBody, marks: AnswerMarks, tools: Iterable[str]) -> ReasoningUse | None:
    """Returns None for a model that does not reason. tools: that the answer may call. A last message that is continued
    says itself where it stands. Raises RequestError for a bound where there can be none."""
    limit = _limit_of(body.thinking_token_budget, marks, has_tools=bool(body.tools))
    if marks.reasoning is None:
        return None
    place = None
    if body.continue_final_message:
        place = reasoning.place_within(str(body.messages[-1].to_template()["content"]), marks.reasoning)
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
    if marks.reasoning.name == reasoning.HARMONY and has_tools:
        return "where gpt-oss may call tools, its reasoning cannot be closed", "reasoning_effort: low"
    return "", hint


@dataclass(frozen=True, slots=True)
class ToolUse:
    """An answer that may call tools. tools: the schema of the arguments, by the tool's name. told: as the chat template
    reads them. grammar: what the answer is held to; "" where the model is free."""

    family: ToolFamily
    tools: Mapping[str, Mapping[str, Any]]
    told: tuple[dict[str, Any], ...]
    grammar: str

    def parser(self) -> ToolParser:
        return ToolParser(self.family, self.tools)


def tool_use_of(body: ChatBody, marks: AnswerMarks, form: str = "") -> ToolUse | None:
    """Returns None where no tool can be called. form: the grammar that an answer without calls is held to; "" for none.
    Raises RequestError, which names the field, for tools that cannot be."""
    choice = "none" if not body.tools and body.tool_choice in (None, "auto") else body.tool_choice or "auto"
    if choice == "none":
        return None
    if not body.tools:
        raise RequestError("tool_choice asks for a call, and there are no tools", param="tool_choice")
    tools = _checked(body)
    if choice == "auto" and not marks.tells_tools:
        raise RequestError(
            "tools: the model's chat template does not write them, so that the model would not know of them",
            code="unsupported_field",
            param="tools",
            hint="tool_choice required holds the answer to a call; --chat-template FILE gives another template",
        )
    if body.continue_final_message:
        raise RequestError("continue_final_message goes on with a text, not with calls", param="continue_final_message")
    may_repeat = body.parallel_tool_calls is not False and not isinstance(choice, NamedTool)
    grammar = ""
    if choice != "auto" or any(tool.is_strict for tool in tools) or not may_repeat or form:
        callable_tools = [_named(tools, choice)] if isinstance(choice, NamedTool) else tools
        grammar = grammar_of_calls(
            marks.tools,
            callable_tools,
            may_answer=choice == "auto",
            may_repeat=may_repeat,
            token_ids=marks.token_ids,
            form=form,
        )
    told = tuple({"type": "function", "function": _as_told(each)} for each in body.tools)
    return ToolUse(marks.tools, {tool.name: tool.parameters for tool in tools}, told, grammar)


def begins_with_labels(body: ChatBody) -> bool:
    """Returns whether the chat begins with lines for who bills it, which no model is to read. They differ from request
    to request: behind them nothing would be found in the prefix cache."""
    first = body.messages[0]
    return first.role in ("system", "developer") and _LABELS.match(first.text) is not None


def as_template_reads(body: ChatBody, marks: AnswerMarks) -> tuple[dict[str, Any], ...]:
    """Returns the messages as the chat template reads them: with a call, what led to it under gpt-oss's name of it;
    without labels."""
    messages = tuple(message.to_template() for message in body.messages)
    if begins_with_labels(body):
        messages[0]["content"] = _LABELS.sub("", messages[0]["content"], count=1)
        messages = messages if messages[0]["content"] or len(messages) == 1 else messages[1:]
    if marks.reasoning is not None and marks.reasoning.name == HARMONY:
        for message in messages:
            if message.get("tool_calls") and message.get("reasoning_content") and not message.get("content"):
                message["thinking"] = message["reasoning_content"]
    return messages


def _as_told(given: Any) -> dict[str, Any]:
    described = {} if given.function.description is None else {"description": given.function.description}
    return {"name": given.function.name, **described, "parameters": given.function.parameters or ANY_OBJECT}


def _checked(body: ChatBody) -> list[Tool]:
    given = body.tools or []
    if len(given) > MAX_TOOLS:
        said = f"tools has {len(given)} entries, more than {MAX_TOOLS}"
        raise RequestError(said, param="tools", value=len(given), limit=MAX_TOOLS)
    tools: dict[str, Tool] = {}
    for index, each in enumerate(given):
        asked = each.function
        if asked.name in tools:
            raise RequestError(f"tools[{index}]: there are two of the name {asked.name!r}", param=f"tools[{index}]")
        tools[asked.name] = Tool(asked.name, asked.parameters or ANY_OBJECT, bool(asked.strict))
    return list(tools.values())


def _named(tools: list[Tool], choice: NamedTool) -> Tool:
    name = choice.function.name
    for tool in tools:
        if tool.name == name:
            return tool
    hint = "tools: " + ", ".join(tool.name for tool in tools)
    raise RequestError(f"tool_choice: there is no tool {name!r}", param="tool_choice", value=name, hint=hint)
