"""What a command says of a server that is another's, or not there."""

import io
import json
import urllib.error
import urllib.request
from email.message import Message
from typing import Any

import pytest

from splittime.core.errors import ConfigError, NobodyThere, NotFound
from splittime.wire.target import get_json

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


def test_a_key_that_no_header_can_have_is_not_told() -> None:
    with pytest.raises(ConfigError, match="a character that no header can have"):
        get_json(URL, "secret\n")


def _answer_404(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise urllib.error.HTTPError(URL, 404, "Not Found", Message(), io.BytesIO(body))

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
