"""The items of a response of OpenAI's Responses API, whole, and while they are being written: a message, the reasoning
before it, and a call."""

from typing import Any, ClassVar

Told = dict[str, Any]  # an event, an item or a response, as it is written


def text_part(text: str) -> Told:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def message_item(item_id: str, text: str, status: str) -> Told:
    return {"type": "message", "id": item_id, "status": status, "role": "assistant", "content": [text_part(text)]}


def call_item(item_id: str, call_id: str, name: str, arguments: str, status: str) -> Told:
    given = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"type": "function_call", "id": item_id, "status": status, **given}


def reasoning_part(text: str) -> Told:
    return {"type": "reasoning_text", "text": text}


def reasoning_item(item_id: str, text: str, status: str) -> Told:
    given = {"summary": [], "content": [reasoning_part(text)], "encrypted_content": None}
    return {"type": "reasoning", "id": item_id, "status": status, **given}


class OpenMessage:
    """A message that is being written. Each method returns events, which get their numbers later."""

    kind = "output_text"
    of_part: ClassVar[Told] = {"logprobs": []}  # beside its text, in an event

    def __init__(self, item_id: str, index: int) -> None:
        self._id, self._pieces = item_id, list[str]()
        self._at = {"output_index": index}
        self._part_at = {"item_id": item_id, **self._at, "content_index": 0}

    def part(self, text: str) -> Told:
        return text_part(text)

    def item(self, status: str) -> Told:
        return message_item(self._id, "".join(self._pieces), status)

    def begin(self) -> list[Told]:
        added = {"type": "response.output_item.added", **self._at, "item": self.item("in_progress") | {"content": []}}
        return [added, {"type": "response.content_part.added", **self._part_at, "part": self.part("")}]

    def add(self, text: str) -> list[Told]:
        self._pieces.append(text)
        return [{"type": f"response.{self.kind}.delta", **self._part_at, "delta": text, **self.of_part}]

    def end(self, status: str) -> list[Told]:
        item = self.item(status)
        (part,) = item["content"]
        return [
            {"type": f"response.{self.kind}.done", **self._part_at, "text": part["text"], **self.of_part},
            {"type": "response.content_part.done", **self._part_at, "part": part},
            {"type": "response.output_item.done", **self._at, "item": item},
        ]


class OpenReasoning(OpenMessage):
    """Reasoning that is being written."""

    kind = "reasoning_text"
    of_part: ClassVar[Told] = {}

    def part(self, text: str) -> Told:
        return reasoning_part(text)

    def item(self, status: str) -> Told:
        return reasoning_item(self._id, "".join(self._pieces), status)


class OpenCall:
    """A call that is being written; as `OpenMessage`."""

    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        self._id, self._call_id, self._name, self._pieces = item_id, call_id, name, list[str]()
        self._at = {"output_index": index}

    def item(self, status: str) -> Told:
        return call_item(self._id, self._call_id, self._name, "".join(self._pieces), status)

    def begin(self) -> list[Told]:
        return [{"type": "response.output_item.added", **self._at, "item": self.item("in_progress")}]

    def add(self, arguments: str) -> list[Told]:
        self._pieces.append(arguments)
        kind = "response.function_call_arguments.delta"
        return [{"type": kind, "item_id": self._id, **self._at, "delta": arguments}]

    def end(self, status: str) -> list[Told]:
        item, kind = self.item(status), "response.function_call_arguments.done"
        given = {"name": self._name, "arguments": item["arguments"]}
        return [
            {"type": kind, "item_id": self._id, **self._at, **given},
            {"type": "response.output_item.done", **self._at, "item": item},
        ]


OpenItem = OpenMessage | OpenCall
