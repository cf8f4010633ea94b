"""A splittime server's own book: the accounts of exactly what was sent, late ones too; a note for the missing."""

import asyncio
from typing import Any

import aiohttp
import client_runs
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from splittime.bench import servers
from splittime.bench.book.figures import summary
from splittime.bench.book.records import Arm, Ending, Outcome, Phase
from splittime.bench.servers import by_request, fetch, sent_as
from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.account_json import account_json
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.wire.target import Target


def account(request_id: str, group_id: str | None = None, start_ns: int = 1000, step_id: int = 7) -> ClosedAccount:
    book = Account(request_id, start_ns, Stage.RECEIVE)
    book.enter(Stage.DECODE, start_ns + 10)
    book.close(start_ns + 100)
    return ClosedAccount(
        request_id=request_id,
        group_id=group_id or f"cmpl-{request_id}",
        model="m",
        endpoint="completions",
        started_at_unix_ns=0,
        start_ns=start_ns,
        end_ns=start_ns + 100,
        intervals=tuple(book.intervals()),
        finish_reason="stop",
        output_tokens=1,
        token_steps=(step_id,),
        token_ready_ns=(start_ns + 50,),
        token_written_ns=(start_ns + 60,),
    )


def step(step_id: int, begin_ns: int, end_ns: int) -> StepRecord:
    parts = dict.fromkeys(("plan_ns", "launch_ns", "sample_ns", "commit_ns", "host_gap_ns", "idle_ns"), 0)
    counts = dict.fromkeys(("prefill_tokens", "decode_tokens", "kv_tokens_read", "blocks_used"), 0)
    numbers = {**parts, **counts, "num_running": 0, "num_waiting": 0}
    took_ns = end_ns - begin_ns
    return StepRecord(step_id=step_id, begin_ns=begin_ns, end_ns=end_ns, device_ns=took_ns, rows=(), **numbers)


def sent(*request_ids: str) -> list[Outcome]:
    facts = {"phase": Phase.MEASURED, "ending": Ending.COMPLETE, "intended_ns": 0, "sent_ns": 1}
    return [Outcome(index=index, request_id=name, **facts) for index, name in enumerate(request_ids)]


class Ledger:
    """What `/ledger` of a server answers: some accounts in the list, some by name after so many questions."""

    def __init__(self, listed=(), by_name=None, after_questions: int = 0, steps=(), facts: Any = None) -> None:
        self.listed, self.by_name, self.after_questions = list(listed), by_name or {}, after_questions
        self.steps, self.facts = list(steps), facts
        self.asked: list[str] = []
        self.limits: list[int] = []

    async def answer(self, request: web.Request) -> web.Response:
        place = request.path.removeprefix("/ledger/")
        if place == "requests":
            self.limits.append(int(request.query["limit"]))
            latest = self.listed[-self.limits[-1] :]
            return web.json_response({"accounts": [account_json(one) for one in latest]})
        if place == "steps":
            return web.json_response({"steps": msgspec.to_builtins(self.steps)})
        if place == "facts" and self.facts is not None:
            return web.json_response(msgspec.to_builtins(self.facts))
        return self.one(place.removeprefix("requests/"))

    def one(self, name: str) -> web.Response:
        self.asked.append(name)
        found = self.by_name.get(name)
        if found is None or self.asked.count(name) <= self.after_questions:
            return web.json_response({"error": {}}, status=404)
        answer = account_json(found[-1])
        if len(found) > 1:
            answer["choices"] = [account_json(one) for one in found]
        return web.json_response(answer)


def fetched(ledger: Ledger, outcomes: list[Outcome], **arm: Any) -> Arm:
    async def main() -> Arm:
        app = web.Application()
        app.router.add_route("GET", "/{path:.*}", ledger.answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            target = Target(url=str(server.make_url("")))
            return await fetch(session, Arm(url=target.url, kind="splittime", **arm), target, outcomes)

    return asyncio.run(main())


def test_ours_among_strangers_in_one_question() -> None:
    ledger = Ledger([account("x"), account("a"), account("y"), account("b", "chatcmpl-b")])
    arm = fetched(ledger, sent("a", "b"))
    assert [one.request_id for one in arm.accounts] == ["a", "b"]
    assert arm.accounts[0] == account("a"), "not a nanosecond is lost on the way"
    assert (ledger.asked, arm.notes) == (["facts"], ())


def test_what_was_not_sent_is_not_asked_for() -> None:
    ledger = Ledger()
    outcomes = [Outcome(index=0, request_id="a", phase=Phase.MEASURED, ending=Ending.UNSENT, intended_ns=0)]
    assert fetched(ledger, outcomes).notes == ()
    assert ledger.asked == ["facts"]


def test_an_account_that_closes_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PATIENCE_S", 60.0)
    ledger = Ledger([account("a")], {"b": [account("b")]}, after_questions=2)
    arm = fetched(ledger, sent("a", "b"))
    assert [one.request_id for one in arm.accounts] == ["a", "b"]
    assert ledger.asked.count("b") == 3
    assert arm.notes == ()


def test_what_stays_missing_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PATIENCE_S", 0.0)
    arm = fetched(Ledger([account("a")]), sent("a", "b", "c"), notes=("An older note.",))
    assert [one.request_id for one in arm.accounts] == ["a"]
    assert arm.notes[0] == "An older note."
    assert "2 of 3" in arm.notes[1]
    assert "--ledger-file" in arm.notes[1]


def test_all_choices_of_a_request_even_where_the_list_begins_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "PATIENCE_S", 60.0)
    choices = [account(f"a-{place}", "cmpl-a", start_ns=1000 + place) for place in range(3)]
    others = [account(f"x{place}") for place in range(servers.MARGIN - 1)]
    ledger = Ledger([*choices, *others], {"a": choices})  # of 202 in the list, 201 are given
    arm = fetched(ledger, sent("a"))
    assert [one.request_id for one in arm.accounts] == ["a-0", "a-1", "a-2"]
    assert ledger.asked == ["a", "facts"]


def test_steps_of_the_accounts_time_only() -> None:
    steps = [step(5, 0, 900), step(6, 990, 1040), step(7, 1040, 1060), step(8, 1100, 1200)]
    arm = fetched(Ledger([account("a")], steps=steps), sent("a"))
    assert [one.step_id for one in arm.steps] == [6, 7]
    assert arm.notes == ()


def test_first_steps_that_are_no_longer_kept_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MAX_LIMIT", 2)
    arm = fetched(Ledger([account("a", step_id=6)], steps=[step(7, 1040, 1060), step(8, 1070, 1080)]), sent("a"))
    assert [one.step_id for one in arm.steps] == [7, 8]
    assert "last 2 steps" in arm.notes[0]


def test_facts_where_there_are_any() -> None:
    facts = ServerFacts(version="1", model="m", max_model_len=9)
    assert fetched(Ledger(facts=facts), []).facts == facts
    assert fetched(Ledger(), []).facts is None
    assert fetched(Ledger(facts={"something": "else"}), []).facts is None


def test_the_name_that_was_sent() -> None:
    assert sent_as(account("a", "cmpl-a")) == "a"
    assert sent_as(account("a", "chatcmpl-cmpl-a")) == "cmpl-a"
    assert sent_as(account("a", "a")) == "a"
    twice = [account("a"), account("a", start_ns=5000)]
    assert [one.start_ns for one in by_request(twice)["a"]] == [5000]


def test_the_gaps_of_the_server_s_own_clock_are_found_by_the_id_that_was_sent() -> None:
    """The server names its answers after the id that came, with a prefix."""
    whole = client_runs.run([client_runs.outcome(0), client_runs.outcome(1)])
    named = [account(f"r-{i}-choice", f"cmpl-r-{i}") for i in range(2)]
    timed = tuple(msgspec.structs.replace(one, token_ready_ns=(10, 30, 60)) for one in named)
    arm = msgspec.structs.replace(whole.arms[0], accounts=timed)
    found = summary(msgspec.structs.replace(whole, arms=(arm,))).figures["itl"]
    assert (found.count, found.max) == (4, 30)
