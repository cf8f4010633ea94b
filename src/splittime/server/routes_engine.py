"""Routes for an operator: sleep and wake, adapters, and blocks of KV cache for other servers.

`POST /sleep`, `POST /wake` (`/wake_up`, as vLLM has it) and `GET /is_sleeping` (docs/guides/sleep.md): what is asked is
in the query, as vLLM's users write it: `POST /sleep?level=1&mode=abort`. The answer comes when it is done, and says
where the time went. A client that goes away changes nothing: what it asked for is done all the same.

`POST /kv/blocks` is for another server of the same model (`--kv-peers` there, `--kv-export` here), by the operator's
key alone: whoever can name a block had its text and its salt, but the latest are given without a name. Both bodies are
msgpack (`core.engine`). It answers while the server drains, since one that leaves has most to give.

`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter` are vLLM's (docs/guides/lora.md).

`POST /ledger/what-if`: what other settings, or another load, would have made of the latest requests.

Nothing of the server is changed. Only requests that began after the latest change of a knob count: before, the settings
were others than those that the simulation starts from.
"""

import asyncio
import functools
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import msgspec
import orjson

from splittime.api.decode import decode_body, decode_once, whole
from splittime.api.schema import LoadAdapterBody, UnloadAdapterBody
from splittime.core.engine import AWAKE, MAX_NAMES, NAME_BYTES, BlocksAsk, SleepAsk, SleepReport, with_digests
from splittime.core.errors import Conflict, NotFound, RequestError
from splittime.ledger.facts import ServerFacts
from splittime.ledger.store import Ledger
from splittime.server import adapters
from splittime.server.routes_info import Whole
from splittime.server.service import Service
from splittime.server.simulation import DRAWS
from splittime.simulate.change import Change
from splittime.simulate.recorded import question
from splittime.web import http
from splittime.web.reading import BodySender, read_beside
from splittime.web.tenants import sharer_of, tenant_of

if TYPE_CHECKING:
    from splittime.diagnose.excerpt import Excerpt

TWO_MINUTES_S = 120.0
MAX_BODY_BYTES = 64
NO_BODY = (b"", b"{}")
MAX_ASK_BYTES = MAX_NAMES * (NAME_BYTES + 2) + 1024
CONTENT_TYPE = b"application/msgpack"
MAX_ADAPTER_BODY_BYTES = 16 << 10


class WhatIfBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """settings: values by name, as in `PATCH /knobs`, with `num_blocks` of the KV cache. speed: requests come so many
    times as fast."""

    settings: dict[str, bool | Whole | float | str | None] = {}
    speed: float = 1.0


async def what_if(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """See the module's docstring. 429 while another is being simulated; 409 where the books do not say enough."""
    http.query_of(scope)
    raw = await service.read_body(scope, receive)
    body = await read_beside(BodySender(sharer_of(scope, tenant_of(scope)), receive), len(raw), _decoded, raw)
    service.require_model()
    work = functools.partial(_what_if_answer, service, service.facts(), body)
    answer = await asyncio.wrap_future(service.simulation.start(work))
    await http.respond(send, answer)


def _decoded(raw: bytes) -> WhatIfBody:
    try:
        body = decode_once(raw, WhatIfBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body does not say a change: {error}", code="invalid_json") from error
    return msgspec.structs.replace(body, settings={name: whole(value) for name, value in body.settings.items()})


def _what_if_answer(service: Service, facts: ServerFacts | None, body: WhatIfBody) -> bytes:
    """Raises `RequestError` for a change that cannot be, `Conflict` where the books do not say enough."""
    change = Change(body.settings, body.speed)
    excerpt = _excerpt(service.ledger, facts)
    answer = orjson.loads(service.simulation.run(question(excerpt.recorded, change, DRAWS)))
    error, is_bad_change = answer.pop("error"), answer.pop("is_bad_change")
    if error is not None:
        kind, code = (RequestError, "invalid_value") if is_bad_change else (Conflict, "cannot_tell")
        about = {name: error.get(name) for name in ("param", "value", "limit", "hint")}
        raise kind(error["message"], code=code, **about)
    accounts = excerpt.recorded.accounts
    span_ns = accounts[-1].end_ns - min(account.start_ns for account in accounts)
    about = {"settings": body.settings, "speed": body.speed, "span_s": span_ns / 1e9, "num_left_out": excerpt.num_open}
    return orjson.dumps({**about, **answer})


def _excerpt(ledger: Ledger, facts: ServerFacts | None) -> "Excerpt":
    from splittime.diagnose.books import LIVE_ACCOUNTS, LIVE_STEPS, live_books  # here: a start does not wait for it
    from splittime.diagnose.excerpt import latest_excerpt

    since_ns, kept = 0 if facts is None else facts.knobs_changed_ns, ledger.accounts(None, LIVE_ACCOUNTS)
    accounts = [account for account in kept if account.start_ns >= since_ns]
    steps = [step for step in ledger.steps(LIVE_STEPS) if step.begin_ns >= since_ns]
    excerpt = latest_excerpt(live_books(facts, accounts, steps, "the live ledger"))
    if excerpt is None:
        raise _unserved(len(kept) - len(accounts), since_ns)
    return excerpt


def _unserved(earlier: int, since_ns: int) -> Conflict:
    """Returns the error where no request has ended with the settings that there are now. earlier: how many began
    before."""
    if not earlier:
        hint = "Ask again when requests have been served."
        return Conflict("no request has been served yet", code="cannot_tell", hint=hint)
    seconds = (time.monotonic_ns() - since_ns) / 1e9
    ago = f"{seconds / 60:,.0f} minutes" if seconds >= TWO_MINUTES_S else f"{seconds:.0f} seconds"
    words = f"the settings were changed {ago} ago; the latest {earlier:,} requests began before that and do not count"
    hint = "Ask again when requests have been served with the settings that there are now."
    return Conflict(words, code="cannot_tell", hint=hint)


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
    body = await service.read_body(scope, receive, MAX_BODY_BYTES)
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
    raw = await service.read_body(scope, receive, MAX_ASK_BYTES)
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
    body = decode_body(await service.read_body(scope, receive, MAX_ADAPTER_BODY_BYTES), LoadAdapterBody)
    await adapters.load(service, body.lora_name, body.lora_path)
    await http.respond_json(send, {"message": f"adapter {body.lora_name} is loaded"})


async def unload_adapter(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers 409 while requests use it."""
    body = decode_body(await service.read_body(scope, receive, MAX_ADAPTER_BODY_BYTES), UnloadAdapterBody)
    adapters.unload(service, body.lora_name)
    await http.respond_json(send, {"message": f"adapter {body.lora_name} is unloaded"})
