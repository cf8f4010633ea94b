"""`POST /kv/blocks`: given to the operator's key alone, of the layout that is asked for; refused in words else."""

import json
import urllib.error
import urllib.request

import msgspec
import pytest

from splittime.core.engine import MAX_NAMES, BlocksAsk, sound_blocks

NAME = b"n" * 16


def post(port: int, body: bytes, key: str | None = None) -> tuple[int, bytes]:
    headers = {"content-type": "application/msgpack"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"http://127.0.0.1:{port}/kv/blocks", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_it_gives_what_there_is_with_digests(launch) -> None:
    ask = BlocksAsk("fake", (NAME, b"m" * 16))
    status, body = post(launch().port, msgspec.msgpack.encode(ask))
    assert status == 200
    assert sound_blocks(body, ask, 7) == {NAME: b"content"}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{}", 400, "invalid_msgpack"),
        (msgspec.msgpack.encode({"layout": "fake", "names": [b"short"]}), 400, "invalid_msgpack"),
        (msgspec.msgpack.encode({"layout": "fake", "names": [NAME] * (MAX_NAMES + 1)}), 400, "invalid_msgpack"),
        (bytes(200_000), 413, "body_too_large"),
        (msgspec.msgpack.encode(BlocksAsk("other")), 404, "no_blocks"),
    ],
)
def test_what_cannot_be_answered_is_refused(launch, body: bytes, status: int, code: str) -> None:
    found, said = post(launch().port, body)
    assert (found, json.loads(said)["error"]["code"]) == (status, code)


def test_only_the_operators_key_gets_any(launch) -> None:
    live, body = launch(config={"api_key": ("operator", "tenant")}), msgspec.msgpack.encode(BlocksAsk("fake"))
    assert [post(live.port, body, key)[0] for key in (None, "tenant", "operator")] == [401, 403, 200]
