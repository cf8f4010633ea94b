"""A server whose paths misbehave, each in its own way, on plain sockets: `http://127.0.0.1:PORT/NAME` is NAME's.

It notes what it was asked, and when the connection of a request was gone, by the name of the path. Run as a program
(`python hostile.py PORT`, 0 for any), it is a process that can be stopped and killed; it prints its port.
"""

import asyncio
import json
import sys
import threading
import time
from collections import defaultdict

CHUNK = {"choices": [{"index": 0, "delta": {"content": " tick"}, "finish_reason": None}]}
LAST = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
WHOLE = {
    "id": "x",
    "choices": [{"index": 0, "message": {"content": "tick"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3},
}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def text_chunk(name: str, text: str) -> dict:
    return {"id": name, "object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": None}]}


def scored_piece(score: float | None, chat: bool) -> dict:
    """One token as a choice, with its log-probability; None for a server that tells none."""
    piece = {"index": 0, "finish_reason": None, **({"delta": {"content": " small"}} if chat else {"text": " small"})}
    if score is not None:
        piece["logprobs"] = {"content": [{"logprob": score}]} if chat else {"token_logprobs": [score]}
    return piece


def scored_whole(scores: list, chat: bool) -> dict:
    pieces = [scored_piece(score, chat) for score in scores]
    choice = {"index": 0, "finish_reason": "stop", "logprobs": None}
    choice |= {"message": {"content": " small" * len(pieces)}} if chat else {"text": " small" * len(pieces)}
    if scores and scores[0] is not None:
        name = "content" if chat else "token_logprobs"
        choice["logprobs"] = {name: [one for piece in pieces for one in piece["logprobs"][name]]}
    return {"id": "x", "choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": len(pieces)}}


def event(value) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(status: int, body: dict, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


class Hostile:
    """asked: (headers, body) of each request by name. gone_s: when each connection was found closed by the gateway."""

    def __init__(self, port: int = 0) -> None:
        self.asked = defaultdict(list)
        self.gone_s = defaultdict(list)
        self.open = defaultdict(int)
        self.most_open = defaultdict(int)
        self.most_sent = 0  # bytes of `torrent`
        self.kept = defaultdict(list)  # ids of responses by name
        self.hold = threading.Event()  # `held` answers when it is set
        self._port = port
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        threading.Thread(target=self._run, args=(started,), daemon=True).start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        async def start() -> None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
            self.port = self._server.sockets[0].getsockname()[1]
            started.set()

        self._loop.run_until_complete(start())
        self._loop.run_forever()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"

    async def _serve(self, reader, writer) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.split("\r\n")
                headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines if line)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                name = first.split("/")[1]
                if first.startswith("GET ") and "/v1/models" in first:  # a gateway looks whether it lives
                    writer.write(whole(200, {"object": "list", "data": []}))
                    continue
                self.asked[name].append((headers, body))
                self.open[name] += 1
                self.most_open[name] = max(self.most_open[name], self.open[name])
                try:
                    if await getattr(self, f"do_{name}")(reader, writer, {**json.loads(body or b"{}"), "line": first}):
                        break
                finally:
                    self.open[name] -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _until_gone(self, name: str, reader, limit_s: float = 20) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await reader.read(1)
        except TimeoutError:
            return True
        except ConnectionError:
            pass
        self.gone_s[name].append(time.monotonic())
        return True

    # ---- the ways; True ends the connection

    async def do_fine(self, reader, writer, body) -> bool:
        if not body.get("stream"):
            writer.write(whole(200, WHOLE))
            return False
        writer.write(STREAM_HEAD)
        for each in (CHUNK, CHUNK, CHUNK, LAST, USAGE, b"[DONE]"):
            writer.write(chunk(event(each)))
            await writer.drain()
            await asyncio.sleep(body.get("pause_s", 0))
        writer.write(b"0\r\n\r\n")
        return False

    do_second = do_third = do_fine

    async def do_pausing(self, reader, writer, body) -> bool:
        return await self.do_fine(reader, writer, {**body, "pause_s": 0.2})

    async def do_keeping(self, reader, writer, body) -> bool:
        """Keeps the model `kept` until its client leaves; any other is treated in the way that its body names."""
        if body["model"] == "kept":
            return await self._until_gone("keeping", reader, limit_s=300)
        return await getattr(self, f"do_{body.get('then', 'fine')}")(reader, writer, body)

    async def do_late(self, reader, writer, body) -> bool:
        await asyncio.sleep(0.15)
        return await self.do_fine(reader, writer, body)

    async def do_held(self, reader, writer, body) -> bool:
        while not self.hold.is_set():
            await asyncio.sleep(0.005)
        writer.write(whole(200, WHOLE))
        return False

    async def do_paced(self, reader, writer, body) -> bool:
        """So many tokens, of the `max_tokens` that there may be; a millisecond each ten."""
        tokens = body["real_tokens"]
        await asyncio.sleep(tokens / 10_000)
        writer.write(whole(200, WHOLE | {"usage": {"prompt_tokens": 10, "completion_tokens": tokens}}))
        return False

    async def do_slow(self, reader, writer, body) -> bool:
        return await self._until_gone("slow", reader)

    async def do_halfopen(self, reader, writer, body) -> bool:
        writer.write(STREAM_HEAD)
        return await self._until_gone("halfopen", reader)

    async def do_broken(self, reader, writer, body) -> bool:
        writer.write(whole(500, {"error": {"message": "it broke"}}))
        return False

    async def do_away(self, reader, writer, body) -> bool:
        writer.write(whole(503, {"error": {"message": "not ready"}}))
        return False

    async def do_busy(self, reader, writer, body) -> bool:
        writer.write(whole(429, {"error": {"message": "busy"}}, "retry-after: 7"))
        return False

    async def do_refusing(self, reader, writer, body) -> bool:
        writer.write(whole(body["status"], {"error": {"message": "no"}}))
        return False

    async def do_strict(self, reader, writer, body) -> bool:
        writer.write(whole(400, {"error": {"message": "too long", "code": "context_length_exceeded"}}))
        return False

    async def do_redirect(self, reader, writer, body) -> bool:
        writer.write(whole(307, {}, f"location: http://127.0.0.1:{self.port}/fine/v1/chat/completions"))
        return False

    async def do_lying(self, reader, writer, body) -> bool:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{}")
        await writer.drain()
        return True

    async def do_garbage(self, reader, writer, body) -> bool:
        writer.write(b"this is no HTTP at all\r\n\r\n")
        await writer.drain()
        return True

    async def do_hangup(self, reader, writer, body) -> bool:
        return True

    async def do_dying(self, reader, writer, body) -> bool:
        writer.write(STREAM_HEAD + chunk(event(CHUNK)) + chunk(event(CHUNK)))
        await writer.drain()
        await asyncio.sleep(body.get("pause_s", 0.05))
        return True

    async def do_polite(self, reader, writer, body) -> bool:
        writer.write(STREAM_HEAD + chunk(event(CHUNK)) + chunk(event(CHUNK)) + b"0\r\n\r\n")
        return False

    async def do_lingering(self, reader, writer, body) -> bool:
        """Its answer is whole, and it does not say that it ends there."""
        writer.write(STREAM_HEAD + chunk(event(CHUNK) + event(LAST) + event(b"[DONE]")))
        return await self._until_gone("lingering", reader)

    async def do_stalling(self, reader, writer, body) -> bool:
        writer.write(STREAM_HEAD + chunk(event(CHUNK)))
        return await self._until_gone("stalling", reader)

    async def do_endless(self, reader, writer, body) -> bool:
        writer.write(STREAM_HEAD)
        gone = asyncio.ensure_future(self._until_gone("endless", reader))
        while not gone.done():
            writer.write(chunk(event(CHUNK)))
            await asyncio.sleep(0.01)
        return True

    async def do_torrent(self, reader, writer, body) -> bool:
        """As fast as it is read."""
        writer.write(STREAM_HEAD)
        large = chunk(event({**CHUNK, "filling": "x" * 65536}))
        try:
            while True:
                writer.write(large)
                await writer.drain()
                self.most_sent += len(large)
        except ConnectionError:
            return True

    async def do_claiming(self, reader, writer, body) -> bool:
        """It tells an account that is longer than the whole exchange."""
        hour_ns = 3600 * 10**9
        stages = [{"stage": "decode", "cause": None, "begin_ns": 0, "end_ns": hour_ns}]
        writer.write(whole(200, WHOLE | {"timing": {"start_ns": 5, "sealed_ns": 5 + hour_ns, "stages": stages}}))
        return False

    async def do_honest(self, reader, writer, body) -> bool:
        """It tells an account that may be true."""
        stages = [{"stage": "decode", "cause": None, "begin_ns": 0, "end_ns": 1000}]
        writer.write(whole(200, WHOLE | {"timing": {"start_ns": 5, "sealed_ns": 1005, "stages": stages}}))
        return False

    async def do_gappy(self, reader, writer, body) -> bool:
        """It tells an account with a hole, stages that run backwards, or numbers that are none; a word for each."""
        lies = {
            "gap": [(0, 5), (7, 10)],
            "backwards": [(0, 5), (5, -3)],
            "late": [(2, 10)],
            "huge": [(0, 2**63)],
            "words": [("a", "b")],
            "none": [],
        }
        told = [{"stage": "decode", "cause": None, "begin_ns": b, "end_ns": e} for b, e in lies[body["lie"]]]
        writer.write(whole(200, WHOLE | {"timing": {"start_ns": 0, "sealed_ns": 10, "stages": told}}))
        return False

    async def do_overlong(self, reader, writer, body) -> bool:
        """More than its content-length says: what would be the next request's answer."""
        writer.write(whole(200, WHOLE) + whole(200, WHOLE | {"id": "of another"}))
        return False

    async def do_badchunk(self, reader, writer, body) -> bool:
        """A chunk whose length is no number."""
        writer.write(STREAM_HEAD + chunk(event(CHUNK)) + b"zz\r\n" + event(CHUNK))
        return await self._until_gone("badchunk", reader)

    async def do_unending(self, reader, writer, body) -> bool:
        """One event that never ends, as fast as it is read."""
        writer.write(STREAM_HEAD + chunk(b"data: {"))
        try:
            while True:
                writer.write(chunk(b"x" * 2**20))
                await writer.drain()
        except ConnectionError:
            return True

    async def do_headlong(self, reader, writer, body) -> bool:
        """A head that never ends."""
        writer.write(b"HTTP/1.1 200 OK\r\n")
        try:
            while True:
                writer.write(b"x-filling: " + b"x" * 4096 + b"\r\n")
                await writer.drain()
        except ConnectionError:
            return True

    async def do_telling(self, reader, writer, body) -> bool:
        """Two tokens of a completion, and half an event."""
        pieces = [event(text_chunk("telling", text)) for text in ("1 ", "2")]
        writer.write(STREAM_HEAD + chunk(b"".join(pieces)) + chunk(b'data: {"id": "telling", "choi'))
        await writer.drain()
        return True

    async def do_ending(self, reader, writer, body) -> bool:
        """Goes on with them; the model `held` when it is let go."""
        while body["model"] == "held" and not self.hold.is_set():
            await asyncio.sleep(0.005)
        usage = {"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8}
        last = text_chunk("ending", "") | {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
        told = (
            text_chunk("ending", " 3"),
            text_chunk("ending", " 4"),
            last,
            {"choices": [], "usage": usage},
            b"[DONE]",
        )
        writer.write(STREAM_HEAD + b"".join(chunk(event(one)) for one in told) + b"0\r\n\r\n")
        return False

    async def do_scored(self, reader, writer, body) -> bool:
        """A token for each log-probability in the request's `sure`, told where they are asked for and not `mute`. It
        waits behind so many tokens (`waits_after`) until it is let go, and with `stays` it never ends by itself."""
        asked, chat = not (body.get("logprobs") is None or body["logprobs"] is False), "messages" in body
        if asked and body.get("refuses"):
            writer.write(whole(400, {"error": {"message": "this model has no logprobs"}}))
            return False
        scores = body["sure"] if asked and not body.get("mute") else [None] * len(body["sure"])
        if not body.get("stream"):
            writer.write(whole(200, scored_whole(scores, chat)))
            return False
        writer.write(STREAM_HEAD + chunk(event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})))
        for number, score in enumerate(scores):
            if number == body.get("dies_after"):
                return True
            while number == body.get("waits_after") and not self.hold.is_set():
                await asyncio.sleep(0.005)
            writer.write(chunk(event({"choices": [scored_piece(score, chat)]})))
            try:
                await writer.drain()
            except ConnectionError:
                self.gone_s["scored"].append(time.monotonic())
                raise
            await asyncio.sleep(body.get("pause_s", 0))
        if body.get("stays"):
            return await self._until_gone("scored", reader)
        writer.write(b"".join(chunk(event(each)) for each in (LAST, USAGE, b"[DONE]")) + b"0\r\n\r\n")
        return False

    # ---- the other APIs

    async def do_typed(self, reader, writer, body) -> bool:
        """Answers at every path that a gateway passes on, and keeps its responses."""
        method, path = body["line"].split(" ")[:2]
        name, path = path.split("/")[1], "/" + path.split("/", 2)[2]
        if path.startswith("/v1/responses/"):
            return self._kept_response(writer, method, name, path.removeprefix("/v1/responses/"))
        if path == "/v1/responses":
            if body.get("previous_response_id") not in (None, *self.kept[name]):
                writer.write(whole(400, {"error": {"message": "no such", "code": "previous_response_not_found"}}))
                return False
            body["told"] = response_id = f"resp_{name}_{len(self.asked[name])}"
            self.kept[name].append(response_id)
        if path in ("/v1/responses", "/v1/messages") and body.get("stream"):
            return await self._typed_stream(reader, writer, path, body)
        if path not in TYPED_WHOLE:
            return await self.do_fine(reader, writer, body)
        told = TYPED_WHOLE[path] | ({"id": body["told"]} if "told" in body else {})
        writer.write(whole(body.get("answers", 200), told))
        return False

    do_typed2 = do_typed

    def _kept_response(self, writer, method: str, name: str, rest: str) -> bool:
        response_id = rest.removesuffix("/cancel")
        if response_id not in self.kept[name]:
            writer.write(whole(404, {"error": {"message": "no such response", "code": "not_found", "param": "id"}}))
        elif rest.endswith("/cancel"):
            writer.write(whole(400, {"error": {"message": "it is no background response", "code": "not_background"}}))
        else:
            if method == "DELETE":
                self.kept[name].remove(response_id)
            told = TYPED_WHOLE["/v1/responses"] | {"id": response_id}
            writer.write(whole(200, told, "content-encoding: identity"))
        return False

    async def _typed_stream(self, reader, writer, path, body) -> bool:
        told = response_events(body["told"]) if path == "/v1/responses" else MESSAGE_EVENTS
        writer.write(STREAM_HEAD)
        for number, each in enumerate(told[: body.get("dies_after")]):
            if number == body.get("stays_after"):
                return await self._until_gone(body["line"].split("/")[1], reader)
            writer.write(chunk(b"event: %b\n" % each["type"].encode() + event(each)))
            await writer.drain()
        if "dies_after" in body:
            return True
        writer.write(b"0\r\n\r\n")
        return False

    async def do_chatsonly(self, reader, writer, body) -> bool:
        if "/v1/chat/" in body["line"]:
            return await self.do_fine(reader, writer, body)
        writer.write(whole(404, {"detail": "Not Found"}))
        return False


RESPONSE_USAGE = {"input_tokens": 7, "input_tokens_details": {"cached_tokens": 2}, "output_tokens": 3}
MESSAGE_USAGE = {"input_tokens": 4, "cache_creation_input_tokens": 1, "cache_read_input_tokens": 2, "output_tokens": 3}
COUNTED = {"prompt_tokens": 5, "total_tokens": 5}
TYPED_WHOLE = {
    "/v1/responses": {"object": "response", "status": "completed", "output": [], "usage": RESPONSE_USAGE},
    "/v1/messages": {"id": "msg_1", "content": [], "stop_reason": "tool_use", "usage": MESSAGE_USAGE},
    "/v1/messages/count_tokens": {"input_tokens": 9},
    "/v1/embeddings": {"object": "list", "data": [{"index": 0, "embedding": [0.5]}], "usage": COUNTED},
    "/v1/rerank": {"results": [{"index": 0, "relevance_score": 0.5}], "usage": {"total_tokens": 6}},
    "/v1/score": {"object": "list", "data": [{"index": 0, "score": 0.5}], "usage": COUNTED},
}


def response_events(response_id: str) -> list[dict]:
    """Names of fields in the order of vLLM's: the type comes last."""
    delta = {"item_id": "m", "output_index": 0, "delta": "tick", "type": "response.output_text.delta"}
    last = TYPED_WHOLE["/v1/responses"] | {"id": response_id, "status": "incomplete"}
    last |= {"incomplete_details": {"reason": "max_output_tokens"}}
    begun = {"response": {"id": response_id, "status": "in_progress"}, "type": "response.created"}
    return [begun, delta, delta, delta, {"response": last, "type": "response.incomplete"}]


MESSAGE_EVENTS = [
    {"type": "message_start", "message": {"id": "msg_1", "usage": MESSAGE_USAGE | {"output_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    {"type": "ping"},
    *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "tick"}} for _ in range(3)),
    {"type": "content_block_stop", "index": 0},
    {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"input_tokens": 0, "output_tokens": 3}},
    {"type": "message_stop"},
]


if __name__ == "__main__":
    print(Hostile(int(sys.argv[1])).port, flush=True)
    threading.Event().wait()
