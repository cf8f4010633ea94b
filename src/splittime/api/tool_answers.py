"""How calls of tools are written in a chat's answer, as OpenAI does: whole, or in pieces as the arguments come."""

import secrets
import string
from typing import Any

from splittime.api.answer_structs import CalledFunction, ToolCall
from splittime.text.tool_parser import CallDelta, ParsedText, ToolParser

LETTERS = string.ascii_letters + string.digits


class ToolAnswer:
    """The calls of one choice, as far as they have come."""

    def __init__(self, parser: ToolParser, ids: str) -> None:
        """ids: what a call's id looks like, of the family."""
        self._parser, self._ids = parser, ids
        self.calls: list[ToolCall] = []

    def push(self, text: str, *, is_end: bool) -> ParsedText:
        """Returns what this piece of the answer's text adds."""
        parsed = self._parser.push(text, is_end=is_end)
        for delta in parsed.calls:
            if delta.name is not None:
                function = CalledFunction(name=delta.name, arguments="")
                self.calls.append(ToolCall(id=self._new_id(delta), function=function))
            self.calls[delta.number].function.arguments += delta.arguments
        return parsed

    def _new_id(self, delta: CallDelta) -> str:
        """Returns an id that the model's template takes when the call is sent back."""
        match self._ids:
            case "numbered":
                return f"functions.{delta.name}:{delta.own_number or delta.number}"
            case "nine":
                return "".join(secrets.choice(LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def delta(self, parsed: ParsedText) -> dict[str, Any]:
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
