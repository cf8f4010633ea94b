"""What requests count to their keys' limits (`web.tenants`): generations by their answers and tokens, and work on texts
that generates nothing (`/tokenize`, `/detokenize`, `count_tokens`) as one request of its tokens."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from splittime.api.choice import Choice
from splittime.core.errors import Refused
from splittime.core.request import Request
from splittime.server.group import Group
from splittime.server.service import Service
from splittime.text.process import TextDone
from splittime.text.workers import FramedWork, TextTask
from splittime.web import http
from splittime.web.reading import BodySender, read_beside
from splittime.web.tenants import Quota, QuotaUse, sharer_of, tenant_of

now_ns = time.monotonic_ns


@contextmanager
def refusals_counted(service: Service) -> Iterator[None]:
    """Counts a refusal that is raised inside."""
    try:
        yield
    except Refused as refused:
        raise service.admission.refuse(refused) from None


def reserve_tokens(service: Service, use: QuotaUse, requests: Sequence[Request]) -> None:
    """Raises `Refused` if the key's minute has too few tokens left for these prompts and what is expected of them."""
    with refusals_counted(service):
        use.reserve(sum(_expected_tokens(use.quota, request) for request in requests), now_ns())


def _expected_tokens(quota: Quota, request: Request) -> int:
    most = 0 if request.sampling.pooling else request.sampling.max_tokens or 0
    return len(request.prompt_token_ids) + quota.expect(most)


def settle(use: QuotaUse, group: Group | None) -> None:
    """Give back what a body has of its key's limits, and charge what was used, whoever left early."""
    choices: Sequence[Choice] = () if group is None else group.choices
    for choice in choices:
        if choice.token_ids and choice.cancelled_ns is None:
            use.quota.learn_output(len(choice.token_ids))
    used = sum(len(choice.request.prompt_token_ids) + len(choice.token_ids) for choice in choices)
    use.leave(used, now_ns())


class CountedText:
    """Work on a text, as one request of its key from its head to its end (`with`)."""

    def __init__(self, service: Service, scope: http.Scope, receive: http.Receive) -> None:
        self._service, self._tenant = service, tenant_of(scope)
        self.sender = BodySender(sharer_of(scope, self._tenant), receive)
        self._use: QuotaUse | None = None
        self._used_tokens = 0

    def __enter__(self) -> "CountedText":
        quota = self._service.quota(self._tenant)
        with refusals_counted(self._service):
            quota.check(now_ns())
        self._use = quota.enter(now_ns())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._use is not None:
            self._use.leave(self._used_tokens, now_ns())

    async def done(self, num_bytes: int, framed_work: Callable[..., FramedWork], *args: object) -> TextDone:
        """Returns what came of it. framed_work: makes of the body, of so many bytes, what is to be done. Given up when
        the client goes: what it left behind would stand before others' texts. What was begun by then is charged."""
        with refusals_counted(self._service):
            work = await read_beside(self.sender, num_bytes, framed_work, *args)
        task = self._service.texts.submit(work, tenant=self.sender.sharer.name, weight=self.sender.sharer.weight)
        watcher = asyncio.get_running_loop().create_task(self._drop_when_gone(task))
        try:
            done = await task.done
        except http.Disconnected:
            self._used_tokens += self._service.admission.estimate_tokens(task.size) if task.num_tries else 0
            raise
        finally:
            watcher.cancel()
            del task  # its error's traceback has this frame
        self._used_tokens += sum(done.whole_lens)
        return done

    async def _drop_when_gone(self, task: TextTask) -> None:
        await http.until_gone(self.sender.receive)
        self._service.texts.drop(task, http.Disconnected())
