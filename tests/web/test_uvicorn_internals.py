"""`web.connection` builds on parts of uvicorn that its makers may change: each is named here, so that an upgrade which
takes one away fails with its name."""

import asyncio
import inspect
import re
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

SOURCE = Path(__file__).parents[2] / "src" / "splittime"
OVERRIDDEN = (
    "connection_made",
    "connection_lost",
    "data_received",
    "on_message_begin",
    "on_header",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
    "on_response_complete",
    "send_400_response",
    "pause_writing",
    "resume_writing",
)
USED = (
    "_unset_keepalive_if_required",
    "cycle",
    "expect_100_continue",
    "flow",
    "loop",
    "parser",
    "pipeline",
    "root_path",
    "server_state",
    "timeout_keep_alive",
    "timeout_keep_alive_handler",
    "timeout_keep_alive_task",
    "transport",
)


async def answer(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def made() -> HttpToolsProtocol:
    config = uvicorn.Config(answer, ws="none", lifespan="off", log_config=None)
    config.load()
    return HttpToolsProtocol(config=config, server_state=ServerState(), app_state={})


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def set_write_buffer_limits(self, high=None, low=None) -> None:
        pass


def test_the_protocol_has_what_is_overridden_and_used() -> None:
    protocol = asyncio.run(made())
    assert [name for name in OVERRIDDEN if not callable(getattr(HttpToolsProtocol, name, None))] == []
    assert [name for name in USED if not hasattr(protocol, name)] == []
    assert isinstance(protocol.server_state.default_headers, list)
    assert isinstance(protocol.server_state.total_requests, int)
    assert isinstance(protocol.server_state.connections, set)


async def test_a_request_fills_the_scope_and_the_cycle_as_is_assumed() -> None:
    protocol, transport = await made(), Transport()
    protocol.connection_made(transport)
    assert (protocol.scheme, protocol.flow.write_paused) == ("http", False)
    protocol.data_received(b"GET /a?b=c HTTP/1.1\r\nhost: here\r\n\r\n")
    assert isinstance(protocol.cycle, RequestResponseCycle)
    assert (protocol.cycle.response_complete, protocol.cycle.disconnected) == (False, False)
    assert protocol.cycle.keep_alive is True
    assert isinstance(protocol.cycle.message_event, asyncio.Event)
    await asyncio.sleep(0.01)
    assert protocol.scope["headers"] == [(b"host", b"here")]
    assert (protocol.url, protocol.parser.get_method()) == (b"/a?b=c", b"GET")
    assert (protocol.parser.get_http_version(), protocol.parser.should_keep_alive()) == ("1.1", True)
    assert protocol.cycle.response_complete
    assert transport.written.startswith(STATUS_LINE[200])
    assert STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n"


def test_the_server_takes_sockets_and_leaves_signals_to_one_method() -> None:
    assert list(inspect.signature(uvicorn.Server.serve).parameters) == ["self", "sockets"]
    assert "capture_signals" in inspect.getsource(uvicorn.Server.serve)
    server = uvicorn.Server(uvicorn.Config(answer))
    assert (server.should_exit, server.force_exit, server.started) == (False, False, False)
    assert "self.servers.append(server)" in inspect.getsource(uvicorn.Server.startup)
    server.config.load()
    assert (server.config.encoded_headers, server.config.backlog) == ([(b"server", b"uvicorn")], 2048)


def test_nobody_else_imports_them() -> None:
    inner = re.compile(r"^\s*(?:from|import) uvicorn\.", re.MULTILINE)
    users = [path for path in SOURCE.rglob("*.py") if inner.search(path.read_text(encoding="utf-8"))]
    assert users == [SOURCE / "web" / "connection.py"]
