"""What tenants use by the minute, told to each other by several gateways through a Valkey or Redis (`limits_valkey`).

Each gateway counts its own tenants' use and lets requests in by its own buckets, so that no request waits for the
store. Every `EXCHANGE_S` it adds what they have used since to the store's totals, and takes from its buckets what the
totals have grown beyond that, which is the others' use. So `requests_per_minute` and `tokens_per_minute` are those of
all gateways together. They are overdrawn by what the others let in within one exchange; then nobody is let in until the
buckets have filled again, as after tokens that were known late.

A gateway whose store is away goes on by its own buckets, and tells later what was used; no bucket falls further than a
minute below nothing for that. An exchange whose reply is lost counts twice. `max_open_requests` is each gateway's own:
what runs at a gateway that was killed would never be given back.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import NamedTuple

from splittime.gateway.valkey_connection import ValkeyConnection, address_of
from splittime.web.tenants import Quota

log = logging.getLogger("splittime.gateway")

EXCHANGE_S = 0.25
PREFIX = b"splittime:use:1:"
KEPT_S = 86_400  # of a tenant that nobody asks for


class Use(NamedTuple):
    requests: int = 0
    tokens: int = 0

    def minus(self, other: "Use") -> "Use":
        return Use(self.requests - other.requests, self.tokens - other.tokens)


AddUse = Callable[[Mapping[str, Use]], dict[str, Use]]


class Exchanged(NamedTuple):
    """One tenant at the last exchange. quota: whose use was told. own: its use since the start. total: the store's."""

    quota: Quota
    own: Use
    total: Use


class SharedLimits:
    """url: None for nothing shared. quotas: returns those of the version that serves now, by tenant. `open` begins
    inside the event loop."""

    def __init__(self, url: str | None, quotas: Callable[[], Mapping[str, Quota]]) -> None:
        self._connection = None if url is None else ValkeyConnection(*address_of(url, "limits_valkey"))
        self._url, self._quotas = url, quotas
        self._exchanged: dict[str, Exchanged] = {}
        self._task: asyncio.Task[None] | None = None
        self._ending = asyncio.Event()
        self._is_shared = False  # whether the last exchange succeeded

    def open(self, executor: Executor) -> None:
        if self._connection is not None:
            self._task = asyncio.create_task(self._exchange_on(partial(_add, self._connection), executor))

    async def close(self) -> None:
        """Tells the others what was used last."""
        self._ending.set()
        if self._task is not None:
            await self._task
        if self._connection is not None:
            self._connection.close()

    def series(self) -> dict[tuple[str, ...], float]:
        """Returns what `splittime_gateway_limits_shared` tells."""
        return {} if self._connection is None else {(): int(self._is_shared)}

    async def _exchange_on(self, add: AddUse, executor: Executor) -> None:
        has_told = False
        while True:
            is_last = self._ending.is_set()
            try:
                await self._exchange(add, executor)
                self._is_shared, has_told = True, False
            except OSError as error:
                self._is_shared = False
                if not has_told:
                    has_told = True
                    log.error("limits by the minute are this gateway's own: %s: %s", self._url, error)
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), EXCHANGE_S)

    async def _exchange(self, add: AddUse, executor: Executor) -> None:
        quotas = {name: quota for name, quota in self._quotas().items() if _has_limit(quota)}
        own = {name: _own(quota) for name, quota in quotas.items()}
        added = {name: use.minus(self._known(name, quotas[name])) for name, use in own.items()}
        if not added:
            return
        totals = await asyncio.get_running_loop().run_in_executor(executor, add, added)
        for name, total in totals.items():
            before = self._exchanged.get(name)
            if before is not None:
                elsewhere = total.minus(before.total).minus(added[name])  # less than nothing: the store was emptied
                quotas[name].use_elsewhere(max(0, elsewhere.requests), max(0, elsewhere.tokens), time.monotonic_ns())
            self._exchanged[name] = Exchanged(quotas[name], own[name], total)

    def _known(self, name: str, quota: Quota) -> Use:
        """Returns what the store knows of this quota's use; a quota whose limits have changed counts anew."""
        before = self._exchanged.get(name)
        return before.own if before is not None and before.quota is quota else Use()


def _add(connection: ValkeyConnection, added: Mapping[str, Use]) -> dict[str, Use]:
    """Returns the totals. Raises `OSError`."""
    commands: list[tuple[bytes, ...]] = []
    for name, use in added.items():
        key = PREFIX + name.encode()
        commands += [
            (b"HINCRBY", key, b"requests", b"%d" % use.requests),
            (b"HINCRBY", key, b"tokens", b"%d" % use.tokens),
            (b"EXPIRE", key, b"%d" % KEPT_S),
        ]
    told = connection.ask_together(*commands)
    return {name: Use(told[3 * place], told[3 * place + 1]) for place, name in enumerate(added)}


def _has_limit(quota: Quota) -> bool:
    return quota.tenant.requests_per_minute is not None or quota.tenant.tokens_per_minute is not None


def _own(quota: Quota) -> Use:
    return Use(quota.used_requests, quota.used_tokens)
