"""How one request's prompts become token ids: here, if that is surely short (`inline`), else in a worker process.

The request's account says which part of the time is waiting for a worker (`tokenize_queue`, with its cause) and which
is work (`tokenize`). A request that ends first, because its client went away or its deadline passed, takes its text
back from the worker.
"""

import asyncio
import time

from splittime.core.errors import DeadlineExceeded
from splittime.engine.text_work import TextDone, TextWork, carry_out
from splittime.engine.text_worker import TextTask
from splittime.ledger.account import Account
from splittime.ledger.stages import Stage
from splittime.server.http import Disconnected
from splittime.server.prompt_text import PromptText
from splittime.server.service import Service

now_ns = time.monotonic_ns


class Tokens:
    """The tokenising of one visit's prompts. account: the visit's own, in which the stages are entered."""

    def __init__(self, service: Service, account: Account) -> None:
        self._service, self._account = service, account
        self._task: TextTask | None = None  # the text that a worker has, or will have

    async def of(self, prompt: PromptText, deadline_ns: int | None) -> tuple[tuple[int, ...], ...]:
        """Returns the ids of each prompt. Raises what the client must be told, or `Disconnected` after `drop`."""
        work = prompt.work
        if work is None:
            self._account.enter(Stage.TOKENIZE, now_ns())
            return prompt.token_ids
        inline = self._service.takes_inline(work)
        done = self._here(work) if inline else await self._beside(work, deadline_ns)
        self._service.admission.learn_ratio(done.num_bytes, sum(map(len, done.ids)))
        return done.ids

    def drop(self) -> None:
        """Nobody wants the ids any more: end the work on them, if there is any."""
        if self._task is not None and not self._task.done.done():
            self._service.texts.drop(self._task, Disconnected())

    def _here(self, work: TextWork) -> TextDone:
        begin_ns = now_ns()
        self._account.enter(Stage.TOKENIZE, begin_ns)
        done = carry_out(work, self._service.tokenizer)
        self._service.inline.learn(work.size, now_ns() - begin_ns)
        return done

    async def _beside(self, work: TextWork, deadline_ns: int | None) -> TextDone:
        texts, account = self._service.texts, self._account
        self._task = texts.submit(work, lambda: account.enter(Stage.TOKENIZE, now_ns()))
        if self._task.cause is not None:
            account.enter(Stage.TOKENIZE_QUEUE, now_ns(), self._task.cause)
        alarm = None
        if deadline_ns is not None:
            left_s = (deadline_ns - now_ns()) / 1e9
            alarm = asyncio.get_running_loop().call_later(left_s, texts.drop, self._task, too_late())
        try:
            return await self._task.done
        finally:
            self._task = None  # the error that it may hold knows this frame: a circle, left to the collector
            if alarm is not None:
                alarm.cancel()


def too_late() -> DeadlineExceeded:
    return DeadlineExceeded("the request's deadline passed before it reached the engine")
