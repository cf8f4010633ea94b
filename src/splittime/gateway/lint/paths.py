"""`GET /lint`: what the prompts that were looked at carry for nothing; an operator asks."""

import asyncio
from typing import TYPE_CHECKING, Any

from splittime.core.errors import NotFound
from splittime.web import http

if TYPE_CHECKING:
    from splittime.gateway.service import GatewayService

LINT = "/lint"
ACCOUNTS = 1000  # that say what a token takes


async def send_lint(gateway: "GatewayService", scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """The report. Raises `NotFound` where no prompt is looked at."""
    lint = gateway.lint
    if lint is None:
        message = "no prompts are looked at: a table [lint] in the config turns that on"
        raise NotFound(message, code="lint_off", hint="add [lint] and restart the gateway")

    def work() -> dict[str, Any]:
        return lint.report(gateway.ledger.accounts(None, ACCOUNTS))

    await http.respond_json(send, await asyncio.get_running_loop().run_in_executor(gateway.pool, work))
