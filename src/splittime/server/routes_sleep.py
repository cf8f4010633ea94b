"""`POST /sleep`, `POST /wake` (`/wake_up`, as vLLM has it) and `GET /is_sleeping`: see docs/guides/sleep.md.

What is asked is in the query, as vLLM's users write it: `POST /sleep?level=1&mode=abort`. The answer comes when it is
done, and says where the time went. A client that goes away changes nothing: what it asked for is done all the same.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, get_args, get_type_hints

import msgspec

from splittime.core.errors import RequestError
from splittime.core.sleep import AWAKE, SleepAsk, SleepReport
from splittime.server.service import Service
from splittime.web import http

MAX_BODY_BYTES = 64
NO_BODY = (b"", b"{}")


async def sleep(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Returns when the server is asleep."""
    ask = _ask(await _query(service, scope, receive))
    if service.is_draining:
        service.require_ready()
    await _answer(service, await _unless_draining(service, service.client.sleep(ask)), send)


async def wake(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Returns when it serves again."""
    for name, value in (await _query(service, scope, receive)).items():
        message = f"{name} is not supported here: the whole engine wakes at once"
        raise RequestError(message, param=name, value=value, hint="leave it out")
    if service.is_draining:
        service.require_ready()
    await _answer(service, await _unless_draining(service, service.client.wake()), send)


async def is_sleeping(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    rest = service.client.rest
    await http.respond_json(send, {"is_sleeping": rest.state != AWAKE, "state": rest.state, "level": rest.level})


async def _unless_draining(service: Service, call: Coroutine[Any, Any, SleepReport]) -> SleepReport:
    """Returns what the call returns; a 503 as soon as the server shuts down, since the engine may be stuck."""
    done, draining = asyncio.ensure_future(call), asyncio.ensure_future(service.began_draining.wait())
    try:
        await asyncio.wait({done, draining}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            service.require_ready()
        return await done
    finally:
        done.cancel()
        draining.cancel()


async def _answer(service: Service, report: SleepReport, send: http.Send) -> None:
    service.exporter.observe_sleep(report)
    await http.respond_json(send, report_json(report))


def report_json(report: SleepReport) -> dict[str, Any]:
    """A report in JSON: durations in ms, in the order in which they came."""
    fields = msgspec.structs.asdict(report)
    begin_ns, end_ns = fields.pop("begin_ns"), fields.pop("end_ns")
    fields["parts_ms"] = {name: _ms(duration_ns) for name, duration_ns in report.parts_ns.items()}
    fields["total_ms"], fields["slept_s"] = _ms(end_ns - begin_ns), round(fields.pop("slept_ns") / 1e9, 3)
    del fields["parts"]
    return fields


def _ms(duration_ns: int) -> float:
    return round(duration_ns / 1e6, 3)


async def _query(service: Service, scope: http.Scope, receive: http.Receive) -> dict[str, str]:
    """Returns what is asked. A body that says something is refused rather than overlooked."""
    body = await http.read_body_in_time(scope, receive, MAX_BODY_BYTES, service.config.body_timeout_s)
    if body.strip() not in NO_BODY:
        raise RequestError("what is asked goes into the query, not into a body", hint="POST /sleep?level=2")
    return http.query(scope)


def _ask(query: dict[str, str]) -> SleepAsk:
    hints = get_type_hints(SleepAsk)
    for name in query:
        if name not in hints:
            message = f"{name!r} is not one of {', '.join(hints)}"
            raise RequestError(message, param=name[:64], value=query[name][:64], limit=list(hints))
    ask = SleepAsk(**{name: _typed(name, text, hints[name]) for name, text in query.items()})
    ask.validate()
    return ask


def _typed(name: str, text: str, hint: Any) -> Any:
    kind = next(one for one in (*get_args(hint), hint) if one in (int, float, str))
    try:
        return kind(text)
    except ValueError:
        raise RequestError(f"{name} is {text[:64]!r}, which is no number", param=name, value=text[:64]) from None
