"""A chat's stream as the typed events of OpenAI's Responses API.

Items come in the order in which they are written, each open, written and closed before the next begins. Only when the
chunk has come that counts the tokens is the response whole, which its last event carries.
"""

from collections.abc import Callable, Iterator

import msgspec
import orjson

from splittime.api.response_answers import (
    Told,
    call_item,
    called,
    item_id,
    message_item,
    reasoning_item,
    reasoning_part,
    response_of,
    status_of,
    text_part,
)
from splittime.api.responses import Functions

TEXT, REASONING = "output_text", "reasoning_text"  # kinds of a text, in the names of events


class OpenText:
    """A message or reasoning that is being written. Each method returns events, which get their numbers later.

    kind: of its part's text, in the names of events. item, part: make it of a text."""

    def __init__(
        self, own_id: str, index: int, kind: str, item: Callable[[str, str, str], Told], part: Callable[[str], Told]
    ) -> None:
        self._id, self.kind, self._item, self._part = own_id, kind, item, part
        self._pieces: list[str] = []
        self._at = {"output_index": index}
        self._part_at = {"item_id": own_id, **self._at, "content_index": 0}
        self._beside: Told = {"logprobs": []} if kind == TEXT else {}

    def item(self, status: str) -> Told:
        return self._item(self._id, "".join(self._pieces), status)

    def begin(self) -> list[Told]:
        added = {"type": "response.output_item.added", **self._at, "item": self.item("in_progress") | {"content": []}}
        return [added, {"type": "response.content_part.added", **self._part_at, "part": self._part("")}]

    def add(self, text: str) -> list[Told]:
        self._pieces.append(text)
        return [{"type": f"response.{self.kind}.delta", **self._part_at, "delta": text, **self._beside}]

    def end(self, status: str) -> list[Told]:
        item, text = self.item(status), "".join(self._pieces)
        return [
            {"type": f"response.{self.kind}.done", **self._part_at, "text": text, **self._beside},
            {"type": "response.content_part.done", **self._part_at, "part": self._part(text)},
            {"type": "response.output_item.done", **self._at, "item": item},
        ]


class OpenCall:
    """A call that is being written; as `OpenText`."""

    kind = "function_call_arguments"

    def __init__(self, own_id: str, index: int, call_id: str, named: Told) -> None:
        self._id, self._call_id, self._named = own_id, call_id, named
        self._pieces: list[str] = []
        self._at = {"output_index": index}

    def item(self, status: str) -> Told:
        return call_item(self._id, self._call_id, self._named, "".join(self._pieces), status)

    def begin(self) -> list[Told]:
        return [{"type": "response.output_item.added", **self._at, "item": self.item("in_progress")}]

    def add(self, arguments: str) -> list[Told]:
        self._pieces.append(arguments)
        return [{"type": f"response.{self.kind}.delta", "item_id": self._id, **self._at, "delta": arguments}]

    def end(self, status: str) -> list[Told]:
        item = self.item(status)
        given = {"name": self._named["name"], "arguments": item["arguments"]}
        return [
            {"type": f"response.{self.kind}.done", "item_id": self._id, **self._at, **given},
            {"type": "response.output_item.done", **self._at, "item": item},
        ]


class ResponseEvents:
    """Turns a chat's stream, which counts its tokens in a chunk at its end, into a response's. at_end: is given the
    response before the event that carries it is written."""

    def __init__(self, asked: Told, functions: Functions, at_end: Callable[[Told], None]) -> None:
        self._asked, self._functions, self._at_end = asked, functions, at_end
        self._rest = b""
        self._num_events = 0
        self._head: Told | None = None  # the first chunk
        self._done: list[Told] = []  # items
        self._open: OpenText | OpenCall | None = None
        self._status = "completed"

    def feed(self, body: bytes) -> bytes:
        """Returns the events that these bytes complete."""
        *events, self._rest = (self._rest + body).split(b"\n\n")
        return b"".join(piece for event in events for piece in self._translated(event))

    def _translated(self, event: bytes) -> Iterator[bytes]:
        data = event.removeprefix(b"data: ")
        if data.startswith(b"{"):
            for told in self._events_of(orjson.loads(data)):
                yield from self._written(told)
        else:
            yield event + b"\n\n"  # the end mark

    def _written(self, told: Told) -> tuple[bytes, ...]:
        """Returns the event's bytes in pieces, as what it repeats may be long. A schema there may have numbers of more
        than 64 bits, which orjson does not write."""
        numbered = {"type": told["type"], "sequence_number": self._num_events, **told}
        self._num_events += 1
        return b"event: %b\ndata: " % told["type"].encode(), msgspec.json.encode(numbered), b"\n\n"

    def _events_of(self, chunk: Told) -> Iterator[Told]:
        if "error" in chunk:
            yield self._failure(chunk["error"])
            return
        if self._head is None:
            self._head = chunk
            for kind in ("response.created", "response.in_progress"):
                yield {"type": kind, "response": response_of(self._asked, chunk, "in_progress")}
        for choice in chunk["choices"]:
            yield from self._of_delta(choice["delta"])
            if choice["finish_reason"] is not None:
                yield from self._last_item(status_of(choice["finish_reason"]))
        if chunk.get("usage") is not None:
            yield self._end(chunk)

    def _of_delta(self, delta: Told) -> Iterator[Told]:
        """Yields what is new: of the call that is open, then reasoning and text, then calls that begin."""
        pieces = delta.get("tool_calls", ())
        for piece in pieces:
            if "id" not in piece and isinstance(self._open, OpenCall):
                yield from self._open.add(piece["function"]["arguments"])
        if reasoning := delta.get("reasoning_content"):
            yield from self._add(REASONING, reasoning)
        if text := delta.get("content"):
            yield from self._add(TEXT, text)
        for piece in pieces:
            if "id" in piece:
                yield from self._begin_call(piece)

    def _add(self, kind: str, text: str) -> Iterator[Told]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(self._new_text(kind))
        assert self._open is not None
        yield from self._open.add(text)

    def _new_text(self, kind: str) -> OpenText:
        if kind == REASONING:
            return OpenText(self._next_id("rs"), self._next_index, kind, reasoning_item, reasoning_part)
        return OpenText(self._next_id("msg"), self._next_index, kind, message_item, text_part)

    def _begin_call(self, piece: Told) -> Iterator[Told]:
        function = piece["function"]
        named = called(self._functions, function["name"])
        call = OpenCall(self._next_id("fc"), self._next_index, piece["id"], named)
        yield from self._begin(call)
        if function["arguments"]:
            yield from call.add(function["arguments"])

    def _begin(self, item: OpenText | OpenCall) -> Iterator[Told]:
        yield from self._close("completed")
        self._open = item
        yield from item.begin()

    def _close(self, status: str) -> Iterator[Told]:
        if self._open is not None:
            item, self._open = self._open, None
            self._done.append(item.item(status))
            yield from item.end(status)

    def _last_item(self, status: str) -> Iterator[Told]:
        """Yields the end of the last item; of an empty message where there was none."""
        self._status = status
        if self._open is None:
            yield from self._begin(self._new_text(TEXT))
        yield from self._close(status)

    def _end(self, chunk: Told) -> Told:
        timing = chunk.get("timing")
        response = response_of(self._asked, chunk, self._status, self._done, usage=chunk["usage"], timing=timing)
        self._at_end(response)
        return {"type": f"response.{self._status}", "response": response}

    def _failure(self, error: Told) -> Told:
        code, message = error["code"], error["message"]
        if self._head is None:
            return {"type": "error", "code": code, "message": message, "param": error["param"]}
        output = [*self._done, *([] if self._open is None else [self._open.item("incomplete")])]
        failed = response_of(self._asked, self._head, "failed", output, error={"code": code, "message": message})
        return {"type": "response.failed", "response": failed | {"store": False}}  # only what is whole is kept

    @property
    def _next_index(self) -> int:
        return len(self._done) + (self._open is not None)

    def _next_id(self, kind: str) -> str:
        assert self._head is not None
        return item_id(self._head, kind, self._next_index)
