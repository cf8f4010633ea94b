"""The layer around an ASGI application: accounts of requests, the routes, the account inside an answer.

The application and its engine client are small ones of our own, with the few attributes that the layer looks at;
`test_vllm.py` does the same with vLLM's.
"""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from splittime.attach import mail
from splittime.attach.engine_books import UNKNOWN, DecidedPlan, EngineBooks
from splittime.attach.joining import Joining
from splittime.attach.mail import Sender
from splittime.attach.middleware import WithBooks
from splittime.attach.request_book import AskedRequest
from splittime.attach.routes import AttachedBooks, BookRoutes
from splittime.ledger.facts import ServerFacts
from splittime.ledger.store import Ledger

PROMPT, ANSWER = list(range(20)), [7, 8, 9]
SETTINGS = {"num_blocks": 10}


class Core:
    """The engine's process, in this one: books, and mail of its own."""

    def __init__(self) -> None:
        self.client_index = 0
        self.books = EngineBooks()
        about = {"version": "1", "model": "m", "max_model_len": 64, "engine": "vllm 0"}
        facts = ServerFacts(**about, settings=SETTINGS, unknown=UNKNOWN)
        self.mail = Sender(0, facts)
        self.aborted: list[str] = []

    async def add_request_async(self, request) -> None:
        now_ns, tokens = time.monotonic_ns(), ANSWER
        self.books.receive(AskedRequest(request.request_id, 0, len(PROMPT), 3, answer_ids=tokens), now_ns, now_ns)

    def step(self, name: str, start: int, count: int, *, is_last: bool = False) -> None:
        begin_ns = time.monotonic_ns()
        plan = DecidedPlan(((name, start, count),), int(count == 1), start + count, (), (), [(name, 0)], (), 1, 1, 0)
        flight = self.books.begin(plan, begin_ns, time.monotonic_ns())
        ready_ns = time.monotonic_ns()
        for client, first in self.books.commit(flight, [(name, 1)], ready_ns):
            self.mail.book(client, first)
        if is_last:
            self.mail.book(0, self.books.end(name, "length", ready_ns))
        self.mail.step(self.books.end_step(flight, {}, ready_ns, time.monotonic_ns()))


class Client:
    """The part of an engine client that is watched."""

    def __init__(self) -> None:
        self.engine_core = Core()
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name="m", model="m", max_model_len=64)
        )

    async def generate(self, prompt, params, request_id):
        name = f"{request_id}-12345678"
        try:
            await self.engine_core.add_request_async(
                SimpleNamespace(request_id=name, external_req_id=request_id, cache_salt=None, prompt_token_ids=PROMPT)
            )
            for index, token in enumerate(ANSWER):
                is_last = index == len(ANSWER) - 1
                self.engine_core.step(name, 0 if not index else 19 + index, 20 if not index else 1, is_last=is_last)
                part = SimpleNamespace(index=0, token_ids=[token], finish_reason="length" if is_last else None)
                yield SimpleNamespace(outputs=[part])
                await asyncio.sleep(0)
        except GeneratorExit:
            self.engine_core.aborted.append(name)
            self.engine_core.mail.book(0, self.engine_core.books.end(name, "abort", time.monotonic_ns()))
            raise


class Application:
    """Completions, streamed or whole, and one path of its own. leaves_after: chunks, after which it fails to write."""

    def __init__(self, client: Client) -> None:
        self.state = SimpleNamespace(engine_client=client, args=SimpleNamespace(api_key=None, host="127.0.0.1"))

    async def __call__(self, scope, receive, send) -> None:
        if scope["path"] == "/own":
            await respond(send, 200, b"own")
            return
        body = json.loads((await receive())["body"])
        if body.get("nothing"):
            await respond(send, 200, b"{}")
            return
        if body.get("bad"):
            await respond(send, 400, b'{"error": "bad"}')
            return
        outputs = self.state.engine_client.generate("text", None, f"cmpl-{body['id']}-0")
        if not body.get("stream"):
            tokens = [part.token_ids[0] async for output in outputs for part in output.outputs]
            await respond(send, 200, json.dumps({"tokens": tokens}).encode())
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        if "text" in body:
            await send({"type": "http.response.body", "body": body["text"].encode(), "more_body": True})
        try:
            async for output in outputs:
                chunk = json.dumps(output.outputs[0].token_ids).encode()
                await send({"type": "http.response.body", "body": b"data: " + chunk + b"\n\n", "more_body": True})
        finally:
            await outputs.aclose()
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def respond(send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class Answered(Exception):
    """The client has gone away."""


@pytest.fixture
def layer(monkeypatch, tmp_path):
    monkeypatch.setenv(mail.FOLDER, str(tmp_path / "mail"))
    client = Client()
    application = Application(client)
    around = WithBooks(application)

    def ask(path="/v1/completions", body=None, headers=(), leaves_after=None, **of_scope):
        sent = []

        async def receive():
            return {"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}

        async def send(message):
            if leaves_after is not None and len(sent) > leaves_after:
                raise Answered
            sent.append(message)

        scope = {
            "type": "http",
            "path": path,
            "method": "GET" if body is None else "POST",
            "app": application,
            "headers": [*headers, *(() if dict(headers).get(b"host") else [(b"host", b"127.0.0.1")])],
            "query_string": b"",
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8000),
            "scheme": "http",
            **of_scope,
        }

        async def one() -> None:
            await around(scope, receive, send)

        asyncio.run(one())
        content = b"".join(message.get("body", b"") for message in sent)
        return sent[0]["status"], dict(sent[0]["headers"]), content

    ask.client, ask.around = client, around
    yield ask
    client.engine_core.mail.close()


def accounts(layer, count: int):
    """Waits until so many are closed."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = json.loads(layer("/ledger/requests")[2])["accounts"]
        if len(found) >= count:
            return found
        time.sleep(0.02)
    raise AssertionError("the accounts did not come")


def test_a_streamed_answer_has_an_exact_account(layer):
    status, headers, content = layer(body={"id": "one", "stream": True})
    assert (status, content.count(b"data: ")) == (200, 4)
    assert b"receive;dur=" in headers[b"server-timing"]
    (account,) = accounts(layer, 1)
    assert [stage["stage"] for stage in account["stages"]] == [
        "receive", "tokenize", "admit", "handoff", "queue", "prefill", "decode", "deliver",
    ]  # fmt: skip
    ends = [0, *(stage["end_ns"] for stage in account["stages"])]
    assert [stage["begin_ns"] for stage in account["stages"]] == ends[:-1]
    assert account["end_ns"] - account["start_ns"] == ends[-1]
    assert (account["group_id"], account["prompt_tokens"], account["output_tokens"]) == ("cmpl-one", 20, 3)
    assert [token["step_id"] for token in account["tokens"]] == [1, 2, 3]
    written = [token["written_ns"] for token in account["tokens"]]
    assert written == sorted(written)
    assert len(set(written)) == 3  # each in a chunk of its own
    assert account["first_chunk_tokens"] == 1


def test_all_tokens_of_a_whole_answer_are_written_at_once(layer):
    assert json.loads(layer(body={"id": "one"})[2]) == {"tokens": ANSWER}
    (account,) = accounts(layer, 1)
    assert len({token["written_ns"] for token in account["tokens"]}) == 1
    assert account["first_chunk_tokens"] == 3


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_answer_holds_its_account_if_asked(layer, is_stream):
    status, headers, content = layer(body={"id": "x", "stream": is_stream}, headers=[(b"x-include-timing", b"1")])
    if is_stream:
        event = next(each for each in content.split(b"\n\n") if b"timing" in each)
        assert content.index(event) < content.index(b"[DONE]")
        told = json.loads(event.removeprefix(b"data: "))
        assert told["choices"] == []
    else:
        assert int(headers[b"content-length"]) == len(content)
        told = json.loads(content)
        assert told["tokens"] == ANSWER
    named = [stage["stage"] for stage in told["timing"]["stages"]]
    assert named == ["receive", "tokenize", "admit", "handoff", "queue", "prefill", "decode", "deliver"]
    assert status == 200


def test_a_text_that_holds_the_end_of_streams_is_left_alone(layer):
    told = b'data: {"text": "data: [DONE]"}\n\n'
    _, _, content = layer(
        body={"id": "x", "stream": True, "text": told.decode()}, headers=[(b"x-include-timing", b"1")]
    )
    assert told in content
    assert content.count(b'"timing"') == 1


def test_without_being_asked_an_answer_is_as_it_was(layer):
    assert layer(body={"id": "x"})[2] == json.dumps({"tokens": ANSWER}).encode()


def test_a_client_that_leaves_ends_in_one_account(layer):
    with pytest.raises(Answered):
        layer(body={"id": "gone", "stream": True}, leaves_after=1)
    assert layer.client.engine_core.aborted == ["cmpl-gone-0-12345678"]
    (account,) = accounts(layer, 1)
    assert account["finish_reason"] == "abort"
    assert account["output_tokens"] >= 1


def test_a_refusal_has_an_account(layer):
    assert layer(body={"id": "x", "bad": True}, headers=[(b"x-request-id", b"mine")])[0] == 400
    (account,) = accounts(layer, 1)
    assert (account["group_id"], account["finish_reason"], account["error"]["status"]) == ("mine", "refused", 400)


def test_a_request_that_asks_the_engine_for_nothing_has_an_account_too(layer):
    assert layer(body={"id": "x", "nothing": True}, headers=[(b"x-request-id", b"mine")])[0] == 200
    (account,) = accounts(layer, 1)
    assert (account["group_id"], account["finish_reason"], account["error"]["status"]) == ("mine", "refused", 200)


def test_the_engine_is_known_before_the_first_request(layer):
    layer("/own")
    until = time.monotonic() + 30
    while layer("/ledger/facts")[0] != 200 and time.monotonic() < until:
        time.sleep(0.02)
    assert json.loads(layer("/ledger/facts")[2])["engine"] == "vllm 0"


def test_other_paths_are_let_through_untouched(layer):
    assert layer("/own")[2] == b"own"
    assert json.loads(layer("/ledger/requests")[2]) == {"accounts": []}


def test_an_id_of_any_length_is_a_short_name_and_is_found_by_itself(layer):
    own = "x" * 100_000
    layer(body={"id": own})
    (account,) = accounts(layer, 1)
    assert max(len(account["request_id"]), len(account["group_id"])) < 150
    for asked in (own, f"cmpl-{own}", f"cmpl-{own}-0-12345678", account["group_id"]):
        assert json.loads(layer(f"/ledger/requests/{asked}")[2])["request_id"] == account["request_id"]
        assert layer(f"/dashboard/requests/{asked}")[0] == 200
    assert layer(f"/ledger/requests/{own}y")[0] == 404
    assert len(layer("/ledger/steps")[2]) < 5_000


def test_the_page_and_the_ledger_are_there(layer):
    layer(body={"id": "one"})
    accounts(layer, 1)
    assert layer("/", headers=[(b"accept", b"text/html")])[2].lstrip().startswith(b"<!doctype html>")
    facts = json.loads(layer("/ledger/facts")[2])
    assert (facts["engine"], facts["settings"]["num_blocks"]) == ("vllm 0", 10)
    assert len(json.loads(layer("/ledger/steps")[2])["steps"]) == 3
    data = json.loads(layer("/dashboard/data")[2])
    engine = data["engine"]
    assert (engine["blocks_total"], engine["prompt_tokens"], engine["output_tokens"]) == (10, len(PROMPT), len(ANSWER))
    assert len(data["rows"]) == 1
    name = data["rows"][0]["id"]
    assert json.loads(layer(f"/dashboard/requests/{name}")[2])
    assert json.loads(layer("/ledger/requests/one")[2])["request_id"] == name
    assert layer("/ledger/nothing")[0] == 404
    assert layer("/ledger/facts", query_string=b"engine=0")[0] == 200
    assert layer("/ledger/facts", query_string=b"engine=1")[0] == 400
    status, headers, _ = layer("/ledger/facts", method="POST")
    assert (status, dict(headers)[b"allow"]) == (405, b"GET, HEAD")


def test_no_socket_is_left_behind(monkeypatch, tmp_path):
    folder = tmp_path / "sockets"
    monkeypatch.setenv(mail.FOLDER, str(folder))
    mail.Receiver(0, lambda each: None, lambda: None).close()
    assert not folder.exists()


def test_a_name_that_leads_here_is_no_key(layer):
    """DNS rebinding: a page whose name leads to this machine, on a server that listens on all addresses."""
    layer.around._app.state.args.host = "0.0.0.0"
    evil = [(b"host", b"evil.example"), (b"origin", b"http://evil.example")]
    assert layer("/ledger/requests", headers=evil)[0] == 403


def test_a_stranger_cannot_hide_anothers_account(layer):
    layer(body={"id": "victim"})
    accounts(layer, 1)
    layer(body={"id": "x", "bad": True}, headers=[(b"x-request-id", b"cmpl-victim")])
    layer(body={"id": "x", "bad": True}, headers=[(b"x-request-id", b"x" * 8_000)])
    assert json.loads(layer("/ledger/requests/victim")[2])["finish_reason"] == "length"
    assert max(len(each["group_id"]) for each in accounts(layer, 3)) < 200


def test_books_that_cannot_be_kept_leave_the_server_as_it_is(layer, monkeypatch, tmp_path):
    taken = Ledger(tmp_path / "taken.sqlite")
    monkeypatch.setenv("SPLITTIME_LEDGER_FILE", str(tmp_path / "taken.sqlite"))
    assert layer("/own")[2] == b"own"
    assert layer(body={"id": "x"})[0] == 200
    assert layer.around._routes is None
    taken.close()


def test_a_ledger_answers_to_nobody_from_elsewhere(layer):
    assert layer("/ledger/facts", client=("10.0.0.7", 1))[0] == 403
    assert layer("/ledger/facts", headers=[(b"host", b"rebound.example")])[0] == 403
    assert layer("/own", client=("10.0.0.7", 1))[0] == 200  # that is vLLM's to decide


def test_with_a_key_the_books_ask_for_it(layer):
    layer.around._app.state.args.api_key = ["secret"]
    assert layer("/ledger/requests")[0] == 401
    assert layer("/ledger/requests", headers=[(b"authorization", b"Bearer secret")], client=("10.0.0.7", 1))[0] == 200


def test_requests_in_flight_are_told_apart(layer):
    async def both():
        await asyncio.gather(*(layer.client.generate("t", None, f"cmpl-{name}-0").__anext__() for name in "ab"))

    layer("/own")  # begins the watching
    asyncio.run(both())  # calls that no HTTP request made are nobody's
    layer(body={"id": "c"})
    assert [each["group_id"] for each in accounts(layer, 1)] == ["cmpl-c"]


def test_mail_whose_thread_has_died_keeps_nothing(monkeypatch, tmp_path, caplog):
    """A folder whose name is too long for a socket: the engine goes on, and its memory does not grow."""
    monkeypatch.setenv(mail.FOLDER, str(tmp_path / ("long" * 30)))
    sender = Sender(
        0, ServerFacts(version="1", model="m", max_model_len=64, engine="vllm 0", settings=SETTINGS, unknown=UNKNOWN)
    )
    sender._thread.join(10)
    for number in range(3):
        sender.book(0, number)
    assert not sender._thread.is_alive()
    assert not sender._queue
    assert "the mail of the books ends here" in caplog.text
    sender.close()


def test_equal_api_keys_are_one():
    client = Client()
    state = SimpleNamespace(engine_client=client, args=SimpleNamespace(api_key=["K", "K"], host="127.0.0.1"))
    books = AttachedBooks(Joining(lambda _: Ledger()), state)
    BookRoutes(books)
    assert books.keys == ("K",)
    client.engine_core.mail.close()
