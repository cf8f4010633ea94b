"""Everything that is not a generation and not the ledger: probes, models, tokens, metrics, knobs, the description."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import msgspec
import orjson

from splittime import __version__
from splittime.api.answer_structs import ModelCard, Models, Text
from splittime.api.decode import decode_body, decode_once, whole
from splittime.api.lenient import Ignored
from splittime.api.limits import ModelInfo
from splittime.api.openapi import document
from splittime.api.params import check_model, check_token_ids, template_options
from splittime.api.schema import DetokenizeBody, TokenizeBody
from splittime.core.engine import FALLING_ASLEEP
from splittime.core.errors import ConfigError, RequestError
from splittime.core.settings import settings_of
from splittime.scheduler.admission import MAX_BOUND, QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.server.counted import CountedText
from splittime.server.dashboard import send_file
from splittime.server.service import Service
from splittime.text.process import Decode, Encode, Render, TextDone
from splittime.text.workers import FramedWork, framed
from splittime.web import http
from splittime.web.reading import in_short_turns

Whole = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # what can be said to the engine


ALIVE = {"status": "ok"}


async def health(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Alive: this process answers."""
    await http.respond_json(send, ALIVE)


def health_at_once(scope: http.Scope) -> http.AtOnce:
    return http.json_at_once(ALIVE)


async def ready(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Would a request be served now?"""
    service.require_ready()
    await http.respond_json(send, {"status": "ready"})


async def index(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    model = service.model
    about = {
        "name": "splittime",
        "version": __version__,
        "model": model.name if model else None,
        "ready": service.is_serving,
        "docs": "/docs",
        "openapi": "/openapi.json",
        "ledger": "/ledger/requests",
        "metrics": "/metrics",
    }
    await http.respond_json(send, about)


async def ping(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Alive, as SageMaker's health check asks: an empty body."""
    await http.respond_json(send, {})


async def version(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await http.respond_json(send, {"version": __version__})


async def favicon(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """For browsers that ask for one without being told of it, as at `/docs`."""
    await send_file(scope, send, "icon.svg")


def _card(name: str, model: ModelInfo) -> ModelCard:
    """A name's entry. parent: of an adapter, the model that it belongs to."""
    adapter = model.adapters.get(name)
    return ModelCard(
        id=name,
        created=model.created_unix_s if adapter is None else adapter.created_unix_s,
        max_model_len=model.max_model_len,
        root=name,
        parent=None if adapter is None else model.name,
    )


async def models(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    model = service.require_model()
    await http.respond(send, msgspec.json.encode(Models(data=[_card(name, model) for name in model.served_names])))


async def one_model(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    model, name = service.require_model(), scope[http.PATH_REST]
    check_model(name, model)
    await http.respond(send, msgspec.json.encode(_card(name, model)))


async def tokenize(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Token ids of a text or of rendered messages."""
    done, headers = await _done(service, scope, receive, _tokenize_work)
    await http.respond(send, done.answer, headers=headers)


async def _done(
    service: Service, scope: http.Scope, receive: http.Receive, work: Callable[..., FramedWork]
) -> tuple[TextDone, http.Headers]:
    model, ignored = service.require_model(), service.config.new_ignored()
    with CountedText(service, scope, receive) as text:
        body = await service.read_body(scope, receive)
        done = await text.done(len(body), work, body, model, ignored)
    return done, http.notice_headers(service.note_ignored(ignored))


def _tokenize_work(given: bytes, model: ModelInfo, ignored: Ignored | None) -> FramedWork:
    body = decode_body(given, TokenizeBody, ignored)
    check_model(body.model, model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give prompt or messages, one of them", param="prompt")
    options = template_options(body)
    answer: dict[str, Any] = {"answer_max_model_len": model.max_model_len, "wants_strings": body.return_token_strs}
    if body.prompt is not None:
        return framed(Encode((body.prompt,), body.add_special_tokens is not False, **answer))
    messages = tuple(message.to_template() for message in body.messages or ())
    return framed(Render(messages, options, bool(body.add_special_tokens), **answer))


async def detokenize(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    done, headers = await _done(service, scope, receive, _detokenize_work)
    await http.respond(send, msgspec.json.encode(Text(done.text)), headers=headers)


def _detokenize_work(given: bytes, model: ModelInfo, ignored: Ignored | None) -> FramedWork:
    body = decode_body(given, DetokenizeBody, ignored)
    check_model(body.model, model)
    ids = check_token_ids(body.tokens, model.vocab_size, "tokens")
    return framed(Decode(ids, body.skip_special_tokens))


async def tokenizer_info(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """What a client needs to render and count prompts as this server does."""
    model, tokenizer = service.require_model(), service.tokenizer
    answer = {
        "vocab_size": model.vocab_size,
        "max_model_len": model.max_model_len,
        "eos_token_ids": list(model.eos_token_ids),
        "special_tokens": tokenizer.special_tokens,
        "chat_templates": tokenizer.chat_templates,
    }
    await http.respond_json(send, answer)


async def metrics(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    exporter = service.exporter
    await http.respond(send, exporter.render(), content_type=exporter.content_type.encode())


async def stats(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The engine's latest gauges and this process's own, in JSON."""
    admission = service.admission
    answer = {
        "engine": msgspec.to_builtins(service.client.stats()),
        "server": {
            "is_engine_ready": service.client.is_ready,
            "open_requests": service.num_open,
            "queued_requests": admission.queued_requests,
            "queued_prompt_tokens": admission.queued_prompt_tokens,
            **service.predicted(),
            "refusals": dict(admission.refusals),
            "is_draining": service.is_draining,
            "gc_pauses": None if service.gc_pauses is None else service.gc_pauses.summary(),
        },
        "ledger": msgspec.to_builtins(service.ledger.counts()),
    }
    await http.respond_json(send, answer)


async def knobs(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """What can be changed on the live server, and its value now."""
    await http.respond_json(send, _knobs(service))


async def change_knobs(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Change some; all of them come back. A bad one changes nothing."""
    body = await service.read_body(scope, receive)
    wanted = decode_knobs(body)
    own = {name: wanted.pop(name) for name in QueueLimits.__dataclass_fields__ if name in wanted}
    for name, value in own.items():
        if type(value) is not int or not 1 <= value <= MAX_BOUND:
            raise RequestError(f"{name} must be a whole number above 0", param=name, value=value)
    before = _knobs(service)
    if not wanted:
        engine_knobs = service.client.stats().knobs
    else:
        if service.client.rest.state != FALLING_ASLEEP or service.is_draining:  # one that is paused would not get there
            service.require_ready()
        engine_knobs = await _configure(service, wanted)
    for name, value in own.items():
        setattr(service.admission.bounds, name, value)
    now = {**engine_knobs, **asdict(service.admission.bounds)}
    if now != before:
        service.knobs_changed_ns = time.monotonic_ns()
    await http.respond_json(send, now)


def _knobs(service: Service) -> dict[str, Any]:
    return {**service.client.stats().knobs, **asdict(service.admission.bounds)}


async def reset_prefix_cache(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Forget every cached prefix that no request uses, as vLLM's route does; say how many blocks are in use."""
    http.query_of(scope)
    service.require_ready()
    before = service.client.stats()
    if before.knobs.get("enable_prefix_caching"):
        for is_on in (False, True):
            await service.client.configure({"enable_prefix_caching": is_on}, lasts=False)
    answer = {"forgotten_blocks": before.blocks_cached, "blocks_in_use": before.blocks_used}
    await http.respond_json(send, answer)


async def _configure(service: Service, wanted: dict[str, Any]) -> dict[str, Any]:
    """The engine's own refusal of a knob is a setting's error there, and the request's fault here."""
    try:
        return await service.client.configure(wanted)
    except ConfigError as error:
        info = msgspec.structs.replace(error.info, status=400, kind=RequestError.kind)
        refusal = RequestError(info.message)
        refusal.info = info
        raise refusal from error


def decode_knobs(body: bytes) -> dict[str, Any]:
    """The values by name; a whole number may be written as a float. Raises `RequestError`."""
    try:
        given = decode_once(body, dict[str, bool | Whole | float | str | None])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not an object of knobs: {error}", code="invalid_json") from error
    return {name: whole(value) for name, value in given.items()}


async def openapi(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The description, made once for a model: it takes 15 ms, and any key may ask for it."""
    config, about = service.config, (service.model, tuple(service.client.stats().knobs))
    if service.described[0] != about:
        make = partial(
            document,
            config,
            service.model,
            needs_text=not service.tokenizer.encode(""),
            knobs=knob_schemas(about[1]),
            root_path=config.root_path,
            asks_for_key=config.asks_for_key,
        )
        loop = asyncio.get_running_loop()
        written = await loop.run_in_executor(None, in_short_turns, lambda: orjson.dumps(make(), default=str))
        service.described = about, written
    await http.respond(send, service.described[1])


async def docs(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """A page that shows the description, with nothing fetched from elsewhere."""
    await send_file(scope, send, "docs.html")


def knob_schemas(names: Iterable[str]) -> dict[str, Any]:
    """Returns the JSON schema of each knob: of these of the engine, and of the admission's bounds."""
    of_engine = msgspec.json.schema(SchedulerConfig)["$defs"]["SchedulerConfig"]["properties"]
    most = {one.name: one.doc.most for one in settings_of(SchedulerConfig)}
    bound = {"type": "integer", "minimum": 1, "maximum": MAX_BOUND}
    return {
        **{name: _bounded(of_engine.get(name, {}), most.get(name) or MAX_BOUND) for name in names},
        **dict.fromkeys(QueueLimits.__dataclass_fields__, bound),
    }


def _bounded(knob: dict[str, Any], most: float) -> dict[str, Any]:
    """Whole numbers among the engine's knobs are counts."""
    if "anyOf" in knob:
        return {**knob, "anyOf": [_bounded(kind, most) for kind in knob["anyOf"]]}
    return {**knob, "minimum": 1, "maximum": most} if knob.get("type") == "integer" else knob
