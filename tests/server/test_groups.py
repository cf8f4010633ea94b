"""What becomes of the choices of one request while some of them are not submitted yet."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from splittime.api.choice import Choice
from splittime.core.errors import Conflict, ErrorInfo
from splittime.core.request import FinishReason, Request
from splittime.core.sampling import SamplingParams
from splittime.ledger.account import Account
from splittime.ledger.stages import Stage
from splittime.scheduler.events import RequestOutput
from splittime.server.group import Group
from splittime.text.output import OutputText

from .conftest import byte_tokenizer, say
from .fake_engine import FakeEngine


def request_of(name: str, max_tokens: int) -> Request:
    sampling, at_ns = SamplingParams(max_tokens=max_tokens, ignore_eos=True), time.monotonic_ns()
    return Request(request_id=name, prompt_token_ids=(120,), sampling=sampling, submitted_ns=at_ns)


class Starting:
    """The choices a, b and c of one request; `before` is awaited before the one of that number is submitted."""

    def __init__(self, engine: FakeEngine, number: int, before: Callable[["Starting"], Awaitable[None]]) -> None:
        self.engine, self.number, self.before = engine, number, before
        self.touched: list[str] = []
        self.num_rooms = self.given_up = 0
        tokenizer = byte_tokenizer()
        requests = [request_of(name, max_tokens=2) for name in "abc"]
        accounts = [Account(one.request_id, one.submitted_ns, Stage.HANDOFF) for one in requests]
        pairs = enumerate(zip(requests, accounts, strict=True))
        self.choices = [Choice(index, one, account, OutputText(tokenizer)) for index, (one, account) in pairs]
        writer = SimpleNamespace(touch=lambda choice, size: self.touched.append(choice.request.request_id))
        place = SimpleNamespace(leave=lambda at_ns: None, drop_one=lambda: None, give_up=self._give_up)
        self.group = Group("g", engine, self.choices, place, writer, lambda: None)

    def _give_up(self) -> None:
        self.given_up += 1

    async def room(self) -> None:
        self.num_rooms += 1
        if self.num_rooms == self.number:
            await self.before(self)


async def first_ended(starting: Starting) -> None:
    while not starting.choices[0].is_done:
        await asyncio.sleep(0)


def test_one_refused_after_another_has_ended_takes_nothing_of_others_and_writes_nothing() -> None:
    """Its id is in flight for another's request, which goes on."""

    async def main() -> None:
        engine = FakeEngine(say("xy"))
        starting = Starting(engine, 2, others_b_comes)
        with pytest.raises(Conflict):
            await starting.group.start(starting.room)
        assert starting.choices[0].token_ids == list(b"xy")
        assert (engine.aborts, starting.touched, starting.given_up) == ([], [], 1)
        assert not engine.streams["b"].aborted

    async def others_b_comes(starting: Starting) -> None:
        await first_ended(starting)
        starting.engine.submit(request_of("b", max_tokens=4000))

    asyncio.run(main())


@pytest.mark.parametrize("how", ["is said to have failed", "breaks"])
def test_one_that_fails_before_all_are_submitted_takes_the_others_with_it(how: str) -> None:
    """Each only once it is submitted: before, its id may be another request's."""

    async def main() -> None:
        engine, seen = FakeEngine(say("xy")), []
        engine.paused = True

        async def first_fails(starting: Starting) -> None:
            failed = engine.streams["a"]
            if how == "breaks":
                failed.items.put_nowait(None)
            else:
                engine.waiting.remove(failed)
                error = ErrorInfo("engine_error", "it failed", "engine_error", 500)
                engine._put(failed, 1, RequestOutput("a", finish_reason=FinishReason.ERROR, error=error))
            await first_ended(starting)
            seen.append((list(dict.fromkeys(engine.aborts)), list(starting.touched)))

        starting = Starting(engine, 3, first_fails)
        await starting.group.start(starting.room)
        own = ["a"] if how == "breaks" else []
        assert seen == [([*own, "b"], [])]
        assert list(dict.fromkeys(engine.aborts)) == [*own, "b", "c"]
        await starting.group.all_done.wait()
        assert starting.group.error.code == "engine_error"
        reasons = [choice.finish_reason for choice in starting.choices]
        assert reasons == [FinishReason.ERROR, FinishReason.ABORT, FinishReason.ABORT]
        assert starting.touched == ["a", "b", "c"]

    asyncio.run(main())
