"""Which tools an answer may call, of a chat's body: what the template is told, what the answer is held to, and how its
text is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from splittime.api.schema import ChatBody, NamedTool
from splittime.core.errors import RequestError
from splittime.text.answer_marks import AnswerMarks
from splittime.text.reasoning import HARMONY
from splittime.text.tool_families import MAX_TOOLS, Tool, ToolFamily
from splittime.text.tool_grammar import grammar_of_calls
from splittime.text.tool_parser import ToolParser

ANY_OBJECT: dict[str, Any] = {"type": "object"}


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


def as_template_reads(body: ChatBody, marks: AnswerMarks) -> tuple[dict[str, Any], ...]:
    """Returns the messages as the chat template reads them: the arguments of earlier calls as an object, or a text;
    with a call, what led to it under gpt-oss's name of it."""
    messages = tuple(message.to_template() for message in body.messages)
    if marks.reasoning is not None and marks.reasoning.name == HARMONY:
        for message in messages:
            if message.get("tool_calls") and message.get("reasoning_content") and not message.get("content"):
                message["thinking"] = message["reasoning_content"]
    if marks.joins_arguments:
        for message in messages:
            for call in message.get("tool_calls") or ():
                arguments = call["function"]["arguments"]
                if not isinstance(arguments, str):
                    call["function"]["arguments"] = msgspec.json.encode(arguments).decode()
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
