"""`POST /v1/load_lora_adapter` and `POST /v1/unload_lora_adapter`, as vLLM has them, for an operator's key: see
docs/guides/lora.md."""

from splittime.api.adapters import LoadAdapterBody, UnloadAdapterBody
from splittime.api.decode import decode_body
from splittime.server import adapters
from splittime.server.service import Service
from splittime.web import http

MAX_BODY_BYTES = 16 << 10


async def load(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers when requests may name the adapter, or why they may not."""
    body = decode_body(await _read(service, scope, receive), LoadAdapterBody)
    await adapters.load(service, body.lora_name, body.lora_path)
    await http.respond_json(send, {"message": f"adapter {body.lora_name} is loaded"})


async def unload(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """Answers 409 while requests use it."""
    body = decode_body(await _read(service, scope, receive), UnloadAdapterBody)
    adapters.unload(service, body.lora_name)
    await http.respond_json(send, {"message": f"adapter {body.lora_name} is unloaded"})


async def _read(service: Service, scope: http.Scope, receive: http.Receive) -> bytes:
    return await http.read_body_in_time(scope, receive, MAX_BODY_BYTES, service.config.body_timeout_s)
