"""`/v1/completions` and `/v1/chat/completions`: let a visit in, write its answer, see it out."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import orjson

from splittime.core.errors import DeadlineExceeded, ErrorInfo, Overloaded, SplittimeError
from splittime.core.request import FinishReason
from splittime.engine.choice import Choice
from splittime.ledger.account import REFUSED
from splittime.server import http
from splittime.server.admission import Refused
from splittime.server.answer import DONE, Answer
from splittime.server.generation import Generation, ignore_news
from splittime.server.params import Ask
from splittime.server.service import Service
from splittime.server.stream import EventStream, start
from splittime.server.timing import last_ended, server_timing, timing
from splittime.server.visit import Visit, do_nothing

now_ns = time.monotonic_ns


class GenerationEndpoint:
    """An ASGI application for one of the two endpoints."""

    def __init__(self, service: Service, endpoint: str) -> None:
        self._service, self._endpoint = service, endpoint

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        visit = Visit(self._service, self._endpoint, scope, receive)
        self._service.num_open += 1
        try:
            await self._serve(visit, send)
        finally:
            self._service.num_open -= 1
            visit.leave()

    def refuse_at_once(self, scope: http.Scope) -> http.AtOnce | None:
        """The refusal of a request for which there is no room, decided and answered at its head; None if there is."""
        visit = Visit(self._service, self._endpoint, scope)
        try:
            visit.knock()
        except Overloaded as error:
            visit.begin_refusal()
            info = error.info
            return http.error_at_once(error, self._headers(visit), lambda: visit.close_refused(REFUSED, info))
        except SplittimeError:  # a fault of its own, told when its body has been read
            return None
        return None

    async def _serve(self, visit: Visit, send: http.Send) -> None:
        try:
            ask, generation = await visit.come_in()
        except http.Disconnected:
            visit.close_refused(FinishReason.ABORT, None)
        except SplittimeError as error:
            visit.begin_refusal()
            if isinstance(error, Overloaded) and not isinstance(error, Refused):  # the engine client's own refusal
                self._service.exporter.count_refusal(error.info.code)
            await http.respond_error(send, error, self._headers(visit))
            late = isinstance(error, DeadlineExceeded)
            visit.close_refused(FinishReason.DEADLINE if late else REFUSED, error.info)
        else:
            await self._answer(visit, ask, generation, send)

    async def _answer(self, visit: Visit, ask: Ask, generation: Generation, send: http.Send) -> None:
        answer = Answer(ask, visit.group_id, self._service.tokenizer)
        try:
            if ask.stream:
                await Streamed(self, visit, ask, generation, answer, send).write()
            else:
                await self._write_whole(visit, ask, generation, answer, send)
        finally:
            if not generation.all_done.is_set():  # nobody writes any more: the task was cancelled, or failed
                generation.cancel()
                await generation.all_done.wait()
            at_ns = now_ns()
            for choice in generation.choices:
                visit.close_choice(choice, at_ns)
            self._count_prompts(ask, generation)

    def _count_prompts(self, ask: Ask, generation: Generation) -> None:
        """What no choice's own account knows of the prompt that it answers. One that no step computed is left out."""
        for begin in range(0, len(generation.choices), ask.n):
            choices = generation.choices[begin : begin + ask.n]
            if any(choice.has_started for choice in choices):
                limits = [choice.request.sampling.max_tokens or 0 for choice in choices]
                longest = max(choice.num_output_tokens for choice in choices)
                self._service.exporter.observe_prompt(limits, longest)

    async def _write_whole(
        self, visit: Visit, ask: Ask, generation: Generation, answer: Answer, send: http.Send
    ) -> None:
        await generation.all_done.wait()
        if generation.is_cancelled:
            return
        choices = list(generation.choices)
        last, at_ns = last_ended(choices), now_ns()
        headers = self.timed_headers(visit, last, at_ns)
        if generation.error is not None:
            await http.respond_error(send, generation.error, headers=headers)
            return
        counts = [choice.num_untaken for choice in choices]
        timings, more = whole_timings(choices, ask, at_ns)
        if visit.notices:
            more["notices"] = visit.notices
        body = answer.body(choices, timings, **more)
        blocked = start(http.respond(send, body, headers=headers, until_taken=True), asyncio.get_running_loop())
        if blocked is not None and not await self._await_reader(visit, generation, blocked):
            return
        written_ns = now_ns()
        for choice, count in zip(choices, counts, strict=True):
            choice.note_written(count, written_ns)

    async def _await_reader(self, visit: Visit, generation: Generation, blocked: asyncio.Task[None]) -> bool:
        """The socket did not take the answer at once: wait for it, and no longer than for a stream."""
        since_ns = now_ns()
        done, _ = await asyncio.wait([blocked], timeout=self._service.config.slow_reader_s)
        for choice in generation.choices:
            choice.note_client_wait(since_ns, now_ns())
        if not done:
            blocked.cancel()
            drop_client(visit, generation, "slow_reader_s")
        return bool(done) and not generation.is_cancelled

    def _headers(self, visit: Visit) -> http.Headers:
        """Returns the headers that every answer has."""
        headers = [(b"x-request-id", visit.request_id.encode("latin-1"))]
        headers += [(b"x-splittime-notice", notice.encode("latin-1")) for notice in visit.notices]
        wanted = http.header(visit.scope, b"endpoint-load-metrics-format")
        if wanted is not None:
            headers += orca_header(self._service, wanted)
        return headers

    def stream_headers(self, visit: Visit, generation: Generation) -> http.Headers:
        return [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self.timed_headers(visit, generation.choices[0], now_ns()),
        ]

    def timed_headers(self, visit: Visit, choice: Choice, at_ns: int) -> http.Headers:
        return [*self._headers(visit), (b"server-timing", server_timing(choice, at_ns))]


class Streamed:
    """The writing of one stream."""

    def __init__(
        self,
        endpoint: GenerationEndpoint,
        visit: Visit,
        ask: Ask,
        generation: Generation,
        answer: Answer,
        send: http.Send,
    ) -> None:
        self._endpoint, self._visit, self._ask = endpoint, visit, ask
        self._generation, self._written, self._send = generation, answer, send
        self._stream = EventStream(
            send,
            answer,
            generation.choices,
            visit.service.config,
            headers=lambda: endpoint.stream_headers(visit, generation),
            on_slow=self._drop_client,
            on_ended=visit.close_choice,
            finish_timing=self._choice_timing,
        )
        generation.on_news = self._stream.touch
        visit.on_gone = self._stream.abandon

    async def write(self) -> None:
        try:
            await self._write()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        """Undo what refers to each other in a circle, so that an ended request is freed at once: what 4,000 of them
        left for the garbage collector kept everybody waiting for half a second when it came."""
        self._generation.on_news = ignore_news
        self._visit.on_gone = do_nothing
        del self._stream

    async def _write(self) -> None:
        if self._generation.is_cancelled:  # it went away between hand-off and here
            self._stream.abandon()
        await self._generation.all_done.wait()
        error = self._generation.error
        if error is not None and not self._stream.has_begun and not self._stream.is_abandoned:
            headers = self._endpoint.timed_headers(self._visit, self._generation.choices[0], now_ns())
            await http.respond_error(self._send, error, headers=headers)
            return
        await self._stream.finish(self._last_words)

    def _choice_timing(self, choice: Choice) -> dict[str, Any] | None:
        """With several choices each one's last chunk has its own timing."""
        if self._ask.include_timing and len(self._generation.choices) > 1:
            return timing(choice, now_ns())
        return None

    def _last_words(self, rest: Sequence[Choice]) -> bytes:
        """The last chunks of the choices that are left, the usage, and the end mark."""
        if self._generation.error is not None:
            return http.error_event(self._generation.error) + DONE
        choices, words = list(self._generation.choices), self._written
        more = {"timing": timing(last_ended(choices), now_ns())} if self._ask.include_timing else {}
        usage_follows = self._ask.include_usage
        parts = []
        for choice in rest:
            beside = more if choice is rest[-1] and not usage_follows else {}
            parts.append(words.last_event(choice, self._choice_timing(choice), **beside))
        if usage_follows:
            parts.append(words.usage_event(choices, **more))
        return b"".join(parts) + DONE

    def _drop_client(self, limit: str) -> None:
        drop_client(self._visit, self._generation, limit)


def drop_client(visit: Visit, generation: Generation, limit: str) -> None:
    """A slow reader: end its generations and cut the connection, without waiting for it to read anything."""
    value = getattr(visit.service.config, limit)
    message = f"the client did not read: {limit} passed"
    generation.end_early(ErrorInfo("slow_reader", message, "slow_reader", 408, limit=value))
    transport = visit.scope.get("extensions", {}).get(http.TRANSPORT)
    if transport is not None:
        transport.abort()


def whole_timings(choices: list[Choice], ask: Ask, at_ns: int) -> tuple[list[dict[str, Any] | None], dict[str, Any]]:
    """What a whole body says of time: each choice's, if there are several, and the last one's at the top."""
    if not ask.include_timing:
        return [None] * len(choices), {}
    each: list[dict[str, Any] | None] = [timing(choice, at_ns) for choice in choices]
    top = {"timing": timing(last_ended(choices), at_ns)}
    return (each if len(choices) > 1 else [None]), top


def orca_header(service: Service, wanted: str) -> http.Headers:
    """The load report that Envoy and llm-d ask for (ORCA), in the form they ask for."""
    stats = service.client.stats()
    named = {"kv_cache_usage_perc": round(stats.kv_cache_usage, 6), "num_requests_waiting": stats.num_waiting}
    if wanted.upper() == "JSON":
        return [(b"endpoint-load-metrics", b"JSON " + orjson.dumps({"named_metrics": named}))]
    if wanted.upper() == "TEXT":
        text = ", ".join(f"named_metrics.{name}={value}" for name, value in named.items())
        return [(b"endpoint-load-metrics", f"TEXT {text}".encode())]
    return []
