"""Routes for an operator: sleep and wake, adapters, and blocks of KV cache for other servers.

`POST /sleep`, `POST /wake` (`/wake_up`, as vLLM has it) and `GET /is_sleeping` (docs/guides/sleep.md): what is asked is
in the query, as vLLM's users write it: `POST /sleep?level=1&mode=abort`. The answer comes when it is done, and says
where the time went. A client that goes away changes nothing: what it asked for is done all the same.

`POST /kv/blocks` is for another server of the same model (`--kv-peers` there, `--kv-export` here), by the operator's
key alone: whoever can name a block had its text and its salt, but the latest are given without a name. Both bodies are
msgpack (`core.kv_blocks`). It answers while the server drains, since one that leaves has most to give.

`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter` are vLLM's (docs/guides/lora.md).
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, get_args, get_type_hints

import msgspec

from splittime.api.decode import decode_body
from splittime.api.schema import LoadAdapterBody, UnloadAdapterBody
from splittime.core.errors import NotFound, RequestError
from splittime.core.kv_blocks import MAX_NAMES, NAME_BYTES, BlocksAsk, with_digests
from splittime.core.sleep import AWAKE, SleepAsk, SleepReport
from splittime.server import adapters
from splittime.server.service import Service
from splittime.web import http

MAX_BODY_BYTES = 64
NO_BODY = (b"", b"{}")
MAX_ASK_BYTES = MAX_NAMES * (NAME_BYTES + 2) + 1024
CONTENT_TYPE = b"application/msgpack"
MAX_ADAPTER_BODY_BYTES = 16 << 10


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


async def blocks(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers with those that there are, as many as one answer holds; 404 where none are given."""
    raw = await http.read_body_in_time(scope, receive, MAX_ASK_BYTES, service.config.body_timeout_s)
    try:
        ask = msgspec.msgpack.decode(raw, type=BlocksAsk)
    except msgspec.MsgspecError as error:
        raise RequestError(f"the body asks for no blocks: {error}", code="invalid_msgpack") from error
    told = await service.client.export(ask)
    if told is None:
        hint = "start it with --kv-export; its weights, types, kernels and version must be those of the one that asks"
        raise NotFound("this server gives no blocks of that layout", code="no_blocks", hint=hint)
    loop = asyncio.get_running_loop()
    body = await loop.run_in_executor(service.pool, with_digests, ask.layout, told)
    await http.respond(send, body, content_type=CONTENT_TYPE)


async def load_adapter(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers when requests may name the adapter, or why they may not."""
    body = decode_body(await _read_adapter(service, scope, receive), LoadAdapterBody)
    await adapters.load(service, body.lora_name, body.lora_path)
    await http.respond_json(send, {"message": f"adapter {body.lora_name} is loaded"})


async def unload_adapter(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers 409 while requests use it."""
    body = decode_body(await _read_adapter(service, scope, receive), UnloadAdapterBody)
    adapters.unload(service, body.lora_name)
    await http.respond_json(send, {"message": f"adapter {body.lora_name} is unloaded"})


async def _read_adapter(service: Service, scope: http.Scope, receive: http.Receive) -> bytes:
    return await http.read_body_in_time(scope, receive, MAX_ADAPTER_BODY_BYTES, service.config.body_timeout_s)
