"""How calls of tools are written in a chat's answer, as OpenAI does: whole, or in pieces as the arguments come."""

import secrets
from typing import Any

from splittime.api.answer_structs import CalledFunction, ToolCall
from splittime.text.tool_parser import Parsed, ToolParser


class ToolAnswer:
    """The calls of one choice, as far as they have come."""

    def __init__(self, parser: ToolParser) -> None:
        self._parser = parser
        self.calls: list[ToolCall] = []

    def push(self, text: str, *, is_end: bool) -> Parsed:
        """Returns what this piece of the answer's text adds."""
        parsed = self._parser.push(text, is_end=is_end)
        for delta in parsed.calls:
            if delta.name is not None:
                function = CalledFunction(name=delta.name, arguments="")
                self.calls.append(ToolCall(id=f"call_{secrets.token_hex(12)}", function=function))
            self.calls[delta.number].function.arguments += delta.arguments
        return parsed

    def delta(self, parsed: Parsed) -> dict[str, Any]:
        """Returns the new part of a message as a chunk has it."""
        made: dict[str, Any] = {"content": parsed.content} if parsed.content else {}
        pieces = []
        for delta in parsed.calls:
            piece: dict[str, Any] = {"index": delta.number, "function": {"arguments": delta.arguments}}
            if delta.name is not None:
                piece |= {"id": self.calls[delta.number].id, "type": "function"}
                piece["function"] = {"name": delta.name, **piece["function"]}
            pieces.append(piece)
        return made | {"tool_calls": pieces} if pieces else made
