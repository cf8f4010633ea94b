"""An id belongs to the request that came with it first, until the engine has let go: nobody else's book goes by it."""

import concurrent.futures
import threading

import pytest

from patience import until

from .conftest import LiveServer, say
from .test_endings import connect, nothing_left, raw_request

MINE = "X-Request-Id: mine\r\n"


@pytest.fixture
def busy(launch):
    """A server where the request `mine` is at work."""
    live: LiveServer = launch(say("x", end=False), step_s=0.005, config={"max_queued_requests": 2})
    with connect(live) as sock:
        sock.sendall(raw_request({"prompt": "x", "max_tokens": 4000}, headers=MINE))
        until(lambda: "mine" in live.service.groups)
        yield live


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"prompt": "x"}, {}),
        ({"prompt": "x", "n": 0}, {}),
        (b"{", {}),
        (b" " * (5 * 2**20), {}),
        ({"prompt": "x"}, {"X-Request-Deadline-Ms": "0"}),
        ({"prompt": "x"}, {"Content-Encoding": "gzip"}),
    ],
    ids=["good", "bad", "no json", "too long", "deadline", "encoding"],
)
def test_whatever_else_is_wrong_another_gets_a_conflict_and_an_id_of_its_own(busy, body: object, headers: dict) -> None:
    status, fields, answer = busy.post("/v1/completions", body, {"X-Request-Id": "mine", **headers})
    assert (status, answer["error"]["code"], answer["error"]["value"]) == (409, "request_id_in_flight", "mine")
    (account,) = busy.ledger.accounts()
    assert account.finish_reason == "refused"
    assert account.request_id == fields["x-request-id"] != "mine"
    assert "mine" not in account.group_id
    assert busy.ledger.account("mine") == []
    assert "mine" in busy.service._reserved


def test_a_full_queue_files_nothing_under_anothers_id(launch) -> None:
    live = launch(say("x"), config={"max_queued_requests": 1})
    live.engine.paused = True
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(live.post, "/v1/completions", {"prompt": "x"}, {"X-Request-Id": "mine"})
        until(lambda: live.service.admission.queued_requests)
        assert live.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": "mine"})[0] == 409
        status, fields, _ = live.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": "other"})
        assert (status, fields["x-request-id"]) == (429, "other")
        live.engine.paused = False
        assert first.result()[0] == 200
    assert [account.finish_reason for account in live.ledger.account("mine")] == ["stop"]
    assert [account.finish_reason for account in live.ledger.account("other")] == ["refused"]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"prompt": "x", "n": 0}, {}, 400),
        (b"{", {}, 400),
        (b" " * (5 * 2**20), {}, 413),
        ({"prompt": "x"}, {"X-Request-Deadline-Ms": "0"}, 400),
        ({"prompt": "x"}, {"Content-Encoding": "gzip"}, 415),
        ({"prompt": "x", "model": "none"}, {}, 404),
    ],
)
def test_a_refused_request_keeps_its_own_id_and_gives_it_free(launch, body: object, headers: dict, status: int) -> None:
    live = launch(say("x"))
    for _ in range(2):
        answer = live.post("/v1/completions", body, {"X-Request-Id": "mine", **headers})
        assert (answer[0], answer[1]["x-request-id"]) == (status, "mine")
    assert [account.request_id for account in live.ledger.accounts()] == ["mine"] * 2
    assert nothing_left(live)
    assert live.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": "mine"})[0] == 200


def test_while_a_body_is_on_its_way_the_id_is_taken(launch) -> None:
    live = launch(say("x"))
    asked = raw_request({"prompt": "x", "max_tokens": 2}, headers=MINE)
    with connect(live) as slow:
        slow.sendall(asked[:-5])
        until(lambda: "mine" in live.service._reserved)
        assert live.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": "mine"})[0] == 409
        slow.sendall(asked[-5:])
        assert slow.recv(100).startswith(b"HTTP/1.1 200")
    until(lambda: nothing_left(live))
    assert [account.finish_reason for account in live.ledger.account("mine")] == ["stop"]


def test_an_id_that_is_none_is_not_kept(launch) -> None:
    live = launch()
    for wrong in ("a b", "x" * 129):
        status, fields, _ = live.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": wrong})
        assert status == 400
        assert fields["x-request-id"] not in ("", wrong)
    status, fields, _ = live.post("/v1/completions", {"prompt": "x"}, {"X-Request-Id": "x" * 128})
    assert (status, fields["x-request-id"]) == (200, "x" * 128)


def test_a_request_whose_choices_id_is_taken_does_not_end_the_one_that_has_it(launch) -> None:
    live = launch(say("x" * 200), step_s=0.005)
    asked = {"prompt": "x", "max_tokens": 200}
    told = []
    first = threading.Thread(target=lambda: told.append(live.post("/v1/completions", asked, {"X-Request-Id": "a-1"})))
    first.start()
    until(lambda: live.engine.running)
    assert live.post("/v1/completions", {**asked, "n": 2}, {"X-Request-Id": "a"})[0] == 409
    live.engine.step_s = 0.0
    first.join(60)
    assert told[0][0] == 200
    assert live.engine.aborts == ["a-0"]
