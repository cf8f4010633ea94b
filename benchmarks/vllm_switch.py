"""Our books inside vLLM with a switch, for `benchmarks.scenarios.vllm_price`: off while the file of `OFF` is there.

    vllm serve MODEL --scheduler-cls benchmarks.vllm_switch.scheduler --middleware benchmarks.vllm_switch.WithSwitch

Two servers on one machine differ by more than the books cost, so one server is measured with them and without them.
What is left while they are off, and so in no price: the methods that wrap vLLM's own, a generator around each answer, a
look at the file for each request, and two threads that look for mail 40 times a second (together 4.5 ms of processor
time a second). To be switched while no request is open and all mail is read.
"""

import os
from typing import Any

from splittime.attach import vllm_scheduler
from splittime.attach.middleware import WithBooks
from splittime.web import http

OFF = "SPLITTIME_BENCHMARK_OFF"  # the file's path, in the environment


def is_off() -> bool:
    return os.path.exists(os.environ[OFF])


def scheduler(*args: Any, **kwargs: Any) -> Any:
    """Returns the scheduler with books, which takes no notes while they are off."""
    made = vllm_scheduler.scheduler(*args, **kwargs)
    mail, add = made._st_mail, made.add_request

    def add_request(request: Any) -> None:
        if not mail.has_stopped:  # else a fault has ended the books
            made._st_mail = None if is_off() else mail
        add(request)

    made.add_request = add_request
    return made


class WithSwitch(WithBooks):
    """The layer, or none."""

    async def __call__(self, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
        if scope["type"] == "http" and is_off():
            await self._app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
