"""The same server over TLS, with a certificate made here."""

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import urllib.request
from pathlib import Path

import aiohttp
import pytest

from patience import until
from splittime.core.errors import ConfigError, EngineError
from splittime.server.config import ServerConfig
from splittime.web import serving
from splittime.wire.scrape import ask_first
from splittime.wire.target import Target, get_json

from .conftest import say
from .test_endings import raw_request


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[str, str]:
    """Certificate and key, for localhost and 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    names = (str(folder / "cert.pem"), str(folder / "key.pem"))
    more = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-days", "3650"]
    make = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-out", names[0], "-keyout", names[1], *more]
    subprocess.run(make, check=True, capture_output=True, timeout=120)
    return names


def trusting(files: tuple[str, str]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files[0])


def over_tls(files, port: int, receive_buffer: int | None = None) -> ssl.SSLSocket:
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(60)
    client.connect(("127.0.0.1", port))
    return trusting(files).wrap_socket(client, server_hostname="localhost")


def test_answers_and_streams_come_over_tls(launch, files) -> None:
    server = launch(say("hello"), config={"ssl_certfile": files[0], "ssl_keyfile": files[1]})
    body = json.dumps({"prompt": "x", "max_tokens": 5, "stream": True}).encode()
    request = urllib.request.Request(f"https://localhost:{server.port}/v1/completions", body)
    with urllib.request.urlopen(request, timeout=60, context=trusting(files)) as answer:
        assert b"[DONE]" in answer.read()
    server.call(lambda: None)  # what the server does right after its last byte is done too
    (account,) = server.ledger.accounts()
    account.verify()


def test_one_file_may_hold_both(launch, files, tmp_path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(Path(files[1]).read_text() + Path(files[0]).read_text())
    server = launch(config={"ssl_certfile": str(both)})
    with urllib.request.urlopen(f"https://127.0.0.1:{server.port}/health", timeout=60, context=trusting(files)) as told:
        assert told.status == 200


def test_plain_http_is_not_answered(launch, files) -> None:
    server = launch(config={"ssl_certfile": files[0], "ssl_keyfile": files[1]})
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" not in client.recv(100)


def test_a_connection_that_never_shakes_hands_is_ended(launch, files, monkeypatch) -> None:
    monkeypatch.setattr(serving, "HANDSHAKE_S", 0.05)
    server = launch(config={"ssl_certfile": files[0], "ssl_keyfile": files[1]})
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=30) for _ in range(3)]
    begun = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    begun.sendall(b"\x16\x03\x01")  # the begin of a record
    for one in (*silent, begun):
        with one, contextlib.suppress(ConnectionResetError):
            assert one.recv(100) == b""  # after a minute, by uvloop's default


def test_a_slow_reader_over_tls_is_dropped_too(launch, files) -> None:
    config = {"slow_reader_buffer_bytes": 20_000, "send_buffer_bytes": 4096, "slow_reader_s": 30.0}
    config |= {"ssl_certfile": files[0], "ssl_keyfile": files[1]}
    server = launch(say("long " * 200, end=False), step_s=0.001, config=config, model={"max_model_len": 10**6})
    client = over_tls(files, server.port, receive_buffer=4096)
    client.sendall(raw_request({"prompt": "x", "max_tokens": 500_000, "stream": True, "logprobs": 5}))
    until(server.ledger.accounts)
    (account,) = server.ledger.accounts()
    account.verify()
    assert account.error.code == "slow_reader"


def test_a_client_that_goes_away_over_tls_is_noticed(launch, files) -> None:
    server = launch(
        say("long " * 200, end=False), step_s=0.02, config={"ssl_certfile": files[0], "ssl_keyfile": files[1]}
    )
    client = over_tls(files, server.port)
    client.sendall(raw_request({"prompt": "x", "max_tokens": 4000, "stream": True}))
    assert client.recv(100)
    client.close()
    until(server.ledger.accounts)
    assert server.ledger.accounts()[0].finish_reason == "abort"


def test_files_that_cannot_serve_are_refused_at_start(files, tmp_path) -> None:
    text = tmp_path / "text"
    text.write_text("no certificate")
    for certfile, keyfile in [("missing.pem", None), (files[0], None), (files[0], str(text)), (str(text), files[1])]:
        with pytest.raises(ConfigError, match="cannot serve HTTPS with") as caught:
            ServerConfig(ssl_certfile=certfile, ssl_keyfile=keyfile).validate()
        assert certfile in caught.value.info.message
    with pytest.raises(ConfigError, match="without ssl_certfile"):
        ServerConfig(ssl_keyfile=files[1]).validate()


def test_a_key_with_a_password_is_refused_at_start_rather_than_asked_for(files, tmp_path) -> None:
    locked = str(tmp_path / "locked.pem")
    command = ["openssl", "rsa", "-aes256", "-in", files[1], "-out", locked, "-passout", "pass:secret"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with pytest.raises(ConfigError, match="cannot serve HTTPS with"):
        ServerConfig(ssl_certfile=files[0], ssl_keyfile=locked).validate()


async def first_answer(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        await ask_first(session, Target(url=url))


def test_a_command_that_does_not_trust_the_certificate_says_how_it_would(launch, files, monkeypatch) -> None:
    server = launch(config={"ssl_certfile": files[0], "ssl_keyfile": files[1]})
    with pytest.raises(EngineError) as raised:
        get_json(f"https://localhost:{server.port}/stats", None)
    assert "SSL_CERT_FILE" in (raised.value.info.hint or "")
    with pytest.raises(EngineError) as raised:
        asyncio.run(first_answer(f"https://localhost:{server.port}"))
    assert "SSL_CERT_FILE" in (raised.value.info.hint or "")
    monkeypatch.setenv("SSL_CERT_FILE", files[0])
    assert "running" in str(get_json(f"https://localhost:{server.port}/stats", None))
