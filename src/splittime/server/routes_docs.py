"""`/openapi.json` and the page that shows it, with nothing fetched from elsewhere."""

from splittime.server import http
from splittime.server.dashboard.files import send_file
from splittime.server.described.bodies import Limits
from splittime.server.described.openapi import document
from splittime.server.service import Service


async def openapi(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    model, needs_text = service.model, not service.tokenizer.encode("")
    limits = Limits.of(model, needs_text) if model is not None else None
    await http.respond_json(send, document(service.config, limits, service.client.stats().knobs))


async def docs(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await send_file(scope, send, "docs.html")
