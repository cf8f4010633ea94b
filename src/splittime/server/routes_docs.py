"""`/openapi.json` and a page that shows it, with nothing fetched from elsewhere."""

from splittime.server import http
from splittime.server.docs_page import PAGE
from splittime.server.openapi import document
from splittime.server.service import Service


async def openapi(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await http.respond_json(send, document(service.config))


async def docs(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    await http.respond(send, PAGE.encode(), content_type=b"text/html; charset=utf-8")
