"""Streams that tell their tokens though nobody asked: what upstreams are sent, and what clients see of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.gateway.config import BreakerConfig, UpstreamConfig
from splittime.gateway.forwarded import forwarded
from splittime.gateway.upstreams import Upstream
from splittime.gateway.usage_asked import AT_THE_END, EACH, EACH_CHUNK, INCLUDE, NOTHING, UsageAsked

from .conftest import gateway_of
from .conftest import upstream as upstream_text
from .hostile import Hostile, whole

USAGE = {"prompt_tokens": 7, "completion_tokens": 3}


def upstream(**told) -> Upstream:
    return Upstream(UpstreamConfig(name="u", url="http://127.0.0.1:1", models=("m",), **told), BreakerConfig())


def body_of(**fields) -> bytes:
    return json.dumps({"model": "m", "prompt": "x", "stream": True, **fields}).encode()


def asked(body: bytes, path="/v1/completions", each=False, **told) -> UsageAsked:
    return UsageAsked(forwarded(path, body, 16), upstream(**told), each=each)


def event(value) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def compact(value) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def chunk(**more) -> dict:
    return {"id": "x", "choices": [{"index": 0, "text": 'say "usage":null'}], **more}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_is_asked_for_its_tokens_and_nothing_else_changes(path):
    body = b' {"model":"m", "prompt": "\xc3\xa9",\n "stream":true, "temperature":1.0}'
    sent = asked(body, path).request.body
    assert json.loads(sent)["stream_options"] == {"include_usage": True}
    assert sent.replace(b'"stream_options":{"include_usage":true},', b"") == body


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"other": 1, "include_usage": None}])
def test_options_of_its_own_stay(options):
    sent = json.loads(asked(body_of(stream_options=options)).request.body)
    assert sent == {**json.loads(body_of()), "stream_options": {**(options or {}), "include_usage": True}}


def test_a_name_that_is_written_otherwise_is_the_same_name():
    body = body_of(stream_options={"include_usage": False}).replace(b"stream_options", b"stream_option\\u0073")
    sent = asked(body).request.body
    assert sent.count(b"include_usage") == 1
    assert json.loads(sent)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("body", "path", "told"),
    [
        (body_of(stream_options={"include_usage": True}), "/v1/completions", {}),
        (body_of(stream=False), "/v1/completions", {}),
        (body_of(stream_options=[1]), "/v1/completions", {}),
        (body_of(), "/v1/completions", {"kind": "splittime"}),
        (body_of(), "/v1/responses", {}),
        (body_of(), "/v1/messages", {}),
    ],
)
def test_who_is_not_asked_gets_the_body_as_it_came(body, path, told):
    one = asked(body, path, **told)
    assert one.request.body is body
    assert one.shown(event({"choices": [], "usage": USAGE})) == event({"choices": [], "usage": USAGE})


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_the_event_is_taken_out_and_the_rest_is_as_it_came(end):
    def told(*values) -> bytes:
        return b"".join(event(value)[:-2] + end for value in values)

    one, last = asked(body_of()), chunk(finish_reason="stop")
    assert one.shown(told(chunk(), last, {"choices": [], "usage": USAGE}, b"[DONE]")) == told(chunk(), last, b"[DONE]")
    assert one.shown(told({"choices": [ ], "usage": USAGE})) == b""  # fmt: skip
    assert one.shown(told(chunk(usage=USAGE))) == told(chunk(usage=USAGE))  # it told that beside an answer by itself
    assert one.shown(told(compact(chunk(usage=None)))) == told(compact(chunk(usage=None)))
    for other in (b"no json", b'{"usage"', {"error": {"message": "usage"}}, {"choices": [], "usage": None}):
        assert one.shown(told(other)) == told(other)


@given(st.lists(st.sampled_from([chunk(), chunk(usage=None), {"choices": []}, b"[DONE]", b": usage"]), max_size=6))
def test_what_has_no_usage_is_never_changed(values):
    events = b"".join(event(value) for value in values)
    assert asked(body_of()).shown(events) == events


USAGE_EVENT = compact({"choices": [], "usage": USAGE})


@pytest.mark.parametrize(
    "told",
    [
        b"id: 3\ndata: " + USAGE_EVENT + b"\n\n",
        b"event: message\r\ndata:" + USAGE_EVENT + b"\r\n\r\n",
        b": ping\ndata: " + USAGE_EVENT + b"\nretry: 1\n\n",
        b"data: " + USAGE_EVENT + b"\n\r\n",
        b"data: " + USAGE_EVENT.replace(b'"usage"', b'\ndata: "usage"') + b"\n\n",
    ],
)
def test_the_event_is_found_by_the_lines_that_readers_go_by(told):
    """Between events of other ends, of which each keeps its own."""
    one, two = b"data: " + compact(chunk()) + b"\n\r\n", b"id: 1\r\ndata: " + compact(chunk()) + b"\r\n\r\n"
    assert asked(body_of()).shown(one + told + two + told + b"data: [DONE]\n\n") == one + two + b"data: [DONE]\n\n"


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_chunk_that_is_counted_keeps_its_other_lines(end):
    told = end.join((b"id: 3", b"data: " + compact(chunk(usage=USAGE)), b": x", b"", b""))
    assert asked(body_of(), each=True).shown(told) == end.join(
        (b"id: 3", b"data: " + compact(chunk()), b": x", b"", b"")
    )


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"123456789012345678901234567890"])
def test_options_that_nobody_can_count_with_are_passed_on_as_they_came(number):
    """A number beyond all numbers was a ValidationError, and so a 500."""
    sent = asked(body_of(stream_options={"x": 0}).replace(b'"x": 0', b'"x": %b' % number)).request.body
    assert b'"stream_options":{"x":%b,"include_usage":true}' % number in sent


def test_each_chunk_is_asked_where_a_stream_may_go_on_elsewhere():
    one = asked(body_of(), each=True)
    assert json.loads(one.request.body)["stream_options"] == {INCLUDE: True, EACH: True}
    assert json.loads(one.shown(event(chunk(usage=USAGE))).removeprefix(b"data: ")) == chunk()
    assert one.shown(event({"choices": [], "usage": USAGE})) == b""
    own = asked(body_of(stream_options={"include_usage": True}), each=True)
    assert own.shown(event({"choices": [], "usage": USAGE})) == event({"choices": [], "usage": USAGE})
    assert b"usage" not in own.shown(event(chunk(usage=USAGE))).replace(b'\\"usage', b"")


def test_who_refuses_the_field_is_asked_for_less_and_not_again():
    to = upstream()
    one = UsageAsked(forwarded("/v1/completions", body_of(), 16), to, each=True)
    assert not one.is_refused(400, b"the prompt is too long")
    assert not one.is_refused(500, b"include_usage")
    assert one.is_refused(400, b"Unknown parameter: 'stream_options.continuous_usage_stats'")
    assert json.loads(one.request.body)["stream_options"] == {INCLUDE: True}
    assert one.is_refused(422, b'{"loc":["body","stream_options"]}')
    assert one.request.body == body_of()
    assert not one.is_refused(400, b"stream_options")  # nothing was added
    one.note_answered(200)
    assert UsageAsked(forwarded("/v1/completions", body_of(), 16), to).request.body == body_of()


@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
def test_a_refusal_that_quotes_its_request_says_nothing_of_the_field(status):
    """{"role": "include_usage"} made one upstream tell nobody its tokens, for good."""
    to = upstream()
    one = UsageAsked(forwarded("/v1/completions", body_of(), 16), to, each=True)
    one.note_answered(200)
    for _ in range(2):
        assert one.is_refused(400, b"no such role: 'include_usage'")
        one.note_answered(status)
    assert to.tells_usage == upstream().tells_usage
    assert not one.is_refused(400, b"include_usage")


def test_a_quotation_far_behind_a_refusals_beginning_is_not_looked_at():
    one = asked(body_of())
    assert not one.is_refused(400, b"no" + b" " * 2000 + b"include_usage")


@pytest.mark.parametrize(("num_refused", "level"), [(0, EACH_CHUNK), (1, AT_THE_END), (2, NOTHING)])
def test_what_was_answered_without_the_field_is_asked_so_from_then_on(num_refused, level):
    to = upstream()
    one = UsageAsked(forwarded("/v1/completions", body_of(), 16), to, each=True)
    for _ in range(num_refused):
        assert one.is_refused(400, b"include_usage")
    one.note_answered(200)
    assert to.tells_usage == level


def test_who_was_asked_for_less_has_refused_nothing():
    to = upstream()
    UsageAsked(forwarded("/v1/completions", body_of(), 16), to).note_answered(200)
    UsageAsked(forwarded("/v1/completions", body_of(stream=False), 16), to).note_answered(200)
    assert to.tells_usage == EACH_CHUNK


def test_what_the_client_asked_itself_is_refused_to_the_client():
    to = upstream()
    own = UsageAsked(forwarded("/v1/completions", body_of(stream_options={"include_usage": True}), 16), to)
    assert not own.is_refused(400, b"stream_options")
    assert to.tells_usage == upstream().tells_usage


class Picky(Hostile):
    async def do_quoting(self, reader, writer, body) -> bool:
        role = body["messages"][0]["role"]
        if role != "user":
            writer.write(whole(400, {"error": {"message": f"no such role: {role}"}}))
            return False
        return await self.do_fine(reader, writer, body)

    async def do_picky(self, reader, writer, body) -> bool:
        if "stream_options" in body:
            writer.write(whole(400, {"error": {"message": "stream_options: extra fields are not permitted"}}))
            return False
        return await self.do_fine(reader, writer, body)


def test_a_server_that_refuses_the_field_serves_streams_all_the_same(tmp_path):
    """It is asked once more without it, by the same attempt, and then never with it."""
    server = Picky()
    try:
        with gateway_of(tmp_path, upstream_text("picky", server.url("picky"))) as gateway:
            told = [gateway.ask("picky", {"x-request-id": f"r{number}"}, stream=True) for number in range(3)]
            assert [one[0] for one in told] == [200] * 3
            assert all(one[2].endswith(b"data: [DONE]\n\n") for one in told)
            assert [len(gateway.account(f"r{number}")["attempts"]) for number in range(3)] == [1] * 3
        assert ["stream_options" in json.loads(body) for _, body in server.asked["picky"]] == [
            True,
            False,
            False,
            False,
        ]
    finally:
        server.stop()


def test_a_request_that_is_refused_itself_changes_nothing_for_the_next(tmp_path):
    server = Picky()
    try:
        with gateway_of(tmp_path, upstream_text("quoting", server.url("quoting"))) as gateway:
            wrong = [{"role": "include_usage", "content": "x"}]
            assert gateway.ask("quoting", stream=True, messages=wrong)[0] == 400
            assert gateway.ask("quoting", stream=True)[0] == 200
        asked_so = ["stream_options" in json.loads(body) for _, body in server.asked["quoting"]]
        assert asked_so == [True, False, True]
    finally:
        server.stop()
