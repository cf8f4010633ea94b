"""What a command says of a server that is another's, or not there."""

import io
import json
import socket
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from splittime.core.errors import ConfigError, EngineError, NobodyThere, NotFound, RequestError
from splittime.web.tenants import Tenant, forbidden
from splittime.wire import target
from splittime.wire.target import get_json, is_url

URL = "http://127.0.0.1:9/ledger/facts"


@pytest.mark.parametrize(
    "body", [b"no JSON", b'{"detail": "Not Found"}', b'{"error": {"code": 404, "message": "File Not Found"}}']
)
def test_a_foreign_server_is_measured_from_outside(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    _answer_404(monkeypatch, body)
    with pytest.raises(NotFound, match=f"no splittime server: {URL} answered 404") as error:
        get_json(URL, None)
    assert "splittime bench run URL" in str(error.value.info.hint)


def test_what_our_server_has_not_it_says_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(NotFound("no request 'x' is kept").to_body()).encode()
    _answer_404(monkeypatch, body)
    with pytest.raises(NotFound, match="no request 'x' is kept"):
        get_json(URL, None)


def test_where_nobody_answers_there_is_a_hint() -> None:
    with pytest.raises(NobodyThere, match=f"nothing answers at {URL}") as error:
        get_json(URL, None)
    assert str(error.value.info.hint).startswith("Is the server running there?")


def test_who_answers_late_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts start a server again where nobody is: one that is slow must not look so."""
    monkeypatch.setattr(target, "TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as slow:
        with pytest.raises(EngineError, match=r"cannot ask .*timed out") as error:
            get_json(f"http://127.0.0.1:{slow.getsockname()[1]}", None)
        assert type(error.value) is EngineError


def test_what_has_a_port_is_a_server_unless_a_file_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    named = ("host:80", "127.0.0.1:80/v1", "[::1]:80", "http://host", "run:5", "run.json", "[::1]", "C:run")
    assert [is_url(each) for each in named] == [True] * 5 + [False] * 3
    (tmp_path / "run:5").touch()
    assert not is_url("run:5")


def test_a_key_that_no_header_can_have_is_not_told() -> None:
    with pytest.raises(ConfigError, match="a character that no header can have"):
        get_json(URL, "secret\n")


def test_a_refusal_has_one_hint_the_servers_own_if_it_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = forbidden(Tenant(name="a", is_operator=False), "/ledger/facts")
    _answer(monkeypatch, 403, json.dumps(refused.to_body()).encode())
    with pytest.raises(ConfigError, match="may not ask for /ledger/facts; ask with an operator's key") as error:
        get_json(URL, "of-a")
    assert error.value.info.hint is None
    unknown = RequestError("no API key, or a wrong one", hint="send Authorization: Bearer KEY")
    for status, body in ((403, b"no JSON"), (401, json.dumps(unknown.to_body()).encode())):
        _answer(monkeypatch, status, body)
        with pytest.raises(ConfigError) as error:
            get_json(URL, "of-nobody")
        assert error.value.info.hint == "Give the server's key with --api-key or SPLITTIME_API_KEY."


def _answer_404(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    _answer(monkeypatch, 404, body)


def _answer(monkeypatch: pytest.MonkeyPatch, status: int, body: bytes) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise urllib.error.HTTPError(URL, status, "as told", Message(), io.BytesIO(body))

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
