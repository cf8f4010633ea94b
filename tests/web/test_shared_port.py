"""A port that two listen at: how it is left without a connection lost, who holds it, and who is kept out."""

import asyncio
import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import sys
from types import SimpleNamespace

import pytest
import uvloop

from patience import until_async
from splittime.core.errors import ConfigError
from splittime.web import connection as connections
from splittime.web import http, serving
from splittime.web.ports import check_port_is_free, check_port_is_shared, hold_shared_port
from splittime.web.serving import _drain, listen, make_server

RUN = uvloop.run
NUM = 50  # more than a turn of the event loop accepts
GET = b"GET /%b HTTP/1.1\r\nhost: here\r\n\r\n"


class Told:
    """Answers each path with itself until it drains; `/at-once` from its head alone, `/late` when it may, `/begun` with
    a head at once and the body when it may."""

    is_draining = False

    def __init__(self) -> None:
        self.may = asyncio.Event()

    async def drain(self) -> None:
        self.is_draining = True

    async def __call__(self, scope, receive, send) -> None:
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        if scope["path"] in ("/begun", "/late"):
            await self.may.wait()
        if scope["path"] == "/begun":
            return await send({"type": "http.response.body"})
        await http.respond(send, b"draining" if self.is_draining else scope["path"].encode())

    def at_once(self, scope) -> http.AtOnce | None:
        return http.json_at_once({}) if scope["path"] == "/at-once" else None


def configured(host: str = "127.0.0.1", certificate: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        host=host,
        port=0,
        ssl_certfile=certificate,
        ssl_keyfile=None,
        body_timeout_s=10.0,
        slow_reader_s=10.0,
        send_buffer_bytes=0,
    )


@contextlib.asynccontextmanager
async def served(config):
    """Yields a server, its shared port, and one more socket that listens there, by which it is left. It listens
    at its own port to the end."""
    with hold_shared_port(config.host, 0) as held:
        port = held.getsockname()[1]
        shared, server = listen(config, port), make_server(Told(), config)
        last = shared.dup()
        own = listen(config)
        address = own.getsockname()
        serving = asyncio.create_task(server.serve(sockets=[own, shared]))
        await until_async(lambda: server.started)
        yield server, port, last
        if not server.should_exit:  # one that has drained by itself may have closed it
            connected(*address[:2]).close()
        server.should_exit = True
        await serving


async def answer(connection: socket.socket, path: bytes = b"x", tls: ssl.SSLContext | None = None):
    """Returns head and body of one answer, and what comes until the connection's end where there is one soon."""
    reader, writer = await asyncio.open_connection(sock=connection, ssl=tls, server_hostname="here" if tls else None)
    writer.write(GET % path)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return head, await reader.readexactly(length), reader, writer


def connected(host: str, port: int) -> socket.socket:
    made = socket.create_connection((host, port), timeout=10)
    made.setblocking(False)
    return made


@pytest.fixture
def certificate(tmp_path) -> str:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here to make a certificate with")
    made = tmp_path / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=here", "-keyout", str(made), "-out", str(tmp_path / "cert.pem")]
    subprocess.run(command, check=True, capture_output=True)
    made.write_bytes(made.read_bytes() + (tmp_path / "cert.pem").read_bytes())
    return str(made)


async def leave_with_a_queue(config, tls: ssl.SSLContext | None = None) -> None:
    async with served(config) as (server, port, last):
        waiting = [connected(config.host, port) for _ in range(NUM)]  # in this turn nobody accepts them
        server.leave(last)
        told = await asyncio.gather(*(answer(one, tls=tls) for one in waiting))
        assert [body for _, body, *_ in told] == [b"/x"] * NUM
        for head, _, reader, writer in told:
            assert head.lower().count(b"connection: close") == 1
            assert await reader.read() == b""
            writer.close()
        with pytest.raises(ConnectionRefusedError):
            connected(config.host, port)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_one_who_leaves_answers_whoever_was_let_in(host):
    if host == "::1" and not has_ipv6():
        pytest.skip("no IPv6 here")
    await leave_with_a_queue(configured(host))


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


async def test_one_who_leaves_answers_over_tls_too(certificate):
    trusting = ssl.create_default_context(cafile=certificate)
    trusting.check_hostname = False
    await leave_with_a_queue(configured(certificate=certificate), trusting)


async def test_whoever_was_let_in_is_answered_before_the_drain():
    async with served(configured()) as (server, port, last):
        waiting = [connected("127.0.0.1", port) for _ in range(NUM)]
        leaving = asyncio.create_task(_drain(server.config.app.drain, server, [last]))
        told = await asyncio.gather(*(answer(one) for one in waiting))
        assert [body for _, body, *_ in told] == [b"/x"] * NUM
        await leaving


async def test_who_stays_gets_all_that_comes_after():
    config = configured()
    async with served(config) as (server, port, last):
        other = listen(config, port)
        server.leave(last)
        other.setblocking(False)
        for _ in range(20):
            connected(config.host, port).close()
            other.accept()[0].close()
        other.close()


async def test_connections_that_were_open_end_with_their_next_answer():
    config = configured()
    async with served(config) as (server, port, last):
        open_ones = [await answer(connected(config.host, port)) for _ in range(2)]
        server.leave(last)
        await server.on_tick(0)  # each second's, which makes headers anew
        for (head, _, reader, writer), path in zip(open_ones, (b"x", b"at-once"), strict=True):
            assert b"connection: close" not in head.lower()
            writer.write(GET % path)
            told = await asyncio.wait_for(reader.read(), 30)  # an idle connection is closed after 75
            assert told.lower().count(b"connection: close") == 1
            writer.close()


async def test_connections_that_are_at_work_end_with_their_answer():
    config = configured()
    async with served(config) as (server, port, last):
        at_work = [await asyncio.open_connection(sock=connected(config.host, port)) for _ in range(2)]
        for (_, writer), path in zip(at_work, (b"late", b"begun"), strict=True):
            writer.write(GET % path)
        begun = await at_work[1][0].readuntil(b"\r\n\r\n")
        assert b"connection: close" not in begun.lower()
        await server.on_tick(0)  # a cycle keeps the headers of its second
        server.leave(last)
        server.config.app.may.set()
        late, rest = [await asyncio.wait_for(reader.read(), 30) for reader, _ in at_work]
        assert (late.lower().count(b"connection: close"), rest) == (1, b"")
        for _, writer in at_work:
            writer.close()


async def test_an_idle_connection_is_closed_before_the_drain(monkeypatch):
    for module in (connections, serving):
        monkeypatch.setattr(module, "LEAVE_S", 0.1)
    config = configured()
    async with served(config) as (server, port, last):
        _, _, reader, writer = await answer(connected(config.host, port))

        async def drain() -> None:
            assert await asyncio.wait_for(reader.read(), 30) == b""

        await _drain(drain, server, [last])
        writer.close()


async def test_one_who_has_not_started_leaves_when_it_has(monkeypatch):
    monkeypatch.setattr(serving, "LEAVE_S", 0.0)
    config = configured()
    with hold_shared_port(config.host, 0) as held:
        port = held.getsockname()[1]
        shared, server = listen(config, port), make_server(Told(), config)

        async def drain() -> None:
            with pytest.raises(ConnectionRefusedError):
                connected(config.host, port)

        leaving = asyncio.create_task(_drain(drain, server, [shared.dup()]))
        await asyncio.sleep(0)
        await asyncio.gather(leaving, server.serve(sockets=[shared]))


async def test_one_who_cannot_leave_is_drained():
    config = configured()
    server = make_server(Told(), config)
    server.started = True
    shared = listen(config)
    shared.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        await _drain(server.config.app.drain, server, [shared])
    assert (server.config.app.is_draining, server.should_exit) == (True, True)


def test_a_port_that_is_held_is_shared_with_those_who_ask_for_it():
    with hold_shared_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match="in use"):
            hold_shared_port("127.0.0.1", port)  # another cluster of the same user
        with pytest.raises(ConfigError, match="in use"):
            check_port_is_free("127.0.0.1", port)
        check_port_is_shared("127.0.0.1", port)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_a_port_of_one_who_does_not_share_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="in use") as caught:
            check_port_is_shared("127.0.0.1", port)
        assert (caught.value.info.param, caught.value.info.value) == ("shared_port", port)
        assert "only gateways of one user" in caught.value.info.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_another_user_is_kept_out():
    joining = "import os, sys; from splittime.web.ports import bound; os.setuid(int(sys.argv[2]));"
    joining += "bound('127.0.0.1', int(sys.argv[1]), shares=True)"
    with hold_shared_port("127.0.0.1", 0) as held:
        command = [sys.executable, "-c", joining, str(held.getsockname()[1])]
        done = [subprocess.run([*command, user], capture_output=True, check=False) for user in ("0", "65534")]
    assert [one.returncode for one in done] == [0, 1]
    assert b"Address already in use" in done[1].stderr
