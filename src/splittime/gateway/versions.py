"""The versions of a running gateway: the one that serves, the one that a canary's tenants try, and how they change.

Each version is a `GatewayService` of its own; a request keeps the one it came in by, so it ends under the config that
it began with, but for upstreams: where all its models and pools are there still, it gets those of the latest. A change
is one assignment in the event loop: no request sees half of it. A file that is wrong changes nothing.

A version has a number that rises with each change of this process, and the hash of what its config says.

`CanaryMark` is a word on the disk that a canary runs: a gateway that ends in the middle of one says so when it starts
again. It starts with the config of its file, so for its tenants the canary is rolled back; what tried it may have ended
it. The mark lies beside the ledger's file, since that is the gateway's own; without one a canary is forgotten, as
accounts are. It is there before a tenant comes in by the canary, and goes when that has been promoted or rolled back.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.core.errors import Conflict, RequestError, SplittimeError
from splittime.core.files import write_whole
from splittime.gateway.audit import AuditLog
from splittime.gateway.canary import CanaryDecision, CanaryTrial, CompareArms, chosen
from splittime.gateway.config import GatewayConfig
from splittime.gateway.config_file import Secrets, check_canary, check_change, check_reach, read_config, secrets_of
from splittime.gateway.routing.policy import version_of
from splittime.gateway.service import GatewayService
from splittime.ledger.account import ClosedAccount
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger
from splittime.web.tenants import Tenant

log = logging.getLogger("splittime.gateway")

KEPT_CHANGES = 32
MAX_BEFORE = 2048  # accounts that a canary's tenants had before
WATCH_S = 0.1
LEFT = "the gateway ended while this canary ran, and has the config of its file for all."
CHANGES = ("started", "applied", "canary", "promoted", "rolled_back", "refused")
MAX_BYTES = 64 * 1024
UNKNOWN = "?"


class ConfigVersion(msgspec.Struct, frozen=True):
    """digest: the beginning of the SHA-256 of the config, as decisions of routing have it. Keys are not in it."""

    number: int
    digest: str

    def __str__(self) -> str:
        return f"{self.number}:{self.digest}"


def numbered(number: int, config: GatewayConfig) -> ConfigVersion:
    return ConfigVersion(number, version_of(config))


class ConfigChange(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the history. what: started, applied, canary, promoted, rolled_back or refused. by: the tenant whose
    key asked for it, "SIGHUP", or "" for the gateway itself."""

    at_unix_s: float
    what: str
    version: str
    by: str
    why: str = ""


class CanaryMark:
    """ledger_file: beside which it lies; None for none. Its calls wait for a disk."""

    def __init__(self, ledger_file: str | None) -> None:
        self._path = None if ledger_file is None else Path(f"{ledger_file}.canary")

    def put(self, change: ConfigChange) -> None:
        """change: the canary's beginning. Raises `ConfigError` where it cannot be written."""
        if self._path is not None:
            write_whole(self._path, msgspec.json.encode(change), param="ledger_file")

    def take(self) -> ConfigChange | None:
        """Returns the beginning of a canary that an earlier process did not end, and forgets it."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                told = file.read(MAX_BYTES)
        except OSError:
            return None
        self.remove()
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(told, type=ConfigChange)
        return ConfigChange(at_unix_s=0.0, what="canary", version=UNKNOWN, by="", why="tenants unknown")

    def remove(self) -> None:
        if self._path is not None:
            try:
                self._path.unlink(missing_ok=True)
            except OSError as error:
                log.warning("%s cannot be removed (%s): the next start will tell of its canary", self._path, error)


class Applied(NamedTuple):
    """What a version was made of."""

    config: GatewayConfig
    secrets: Secrets


class GatewayVersions:
    """compare: says whether a canary is worse; without it there are none. path: of the file that SIGHUP reads again.
    current: the version that serves; `on_swap` is called when it has changed."""

    def __init__(
        self,
        config: GatewayConfig,
        secrets: Secrets,
        ledger: Ledger,
        *,
        path: Path | None = None,
        compare: CompareArms | None = None,
    ) -> None:
        self._ledger, self._path, self._compare = ledger, path, compare
        self._applied, self._previous = Applied(config, secrets), list[Applied]()  # at most one
        self._own = config  # the latest that came from this host
        self._number = 1
        self.current = GatewayService(config, secrets, ledger, str(numbered(1, config)))
        self.canary: GatewayService | None = None
        self.trial: CanaryTrial | None = None
        self._trying: Applied | None = None
        self._mark = CanaryMark(config.ledger_file)
        self._watching: asyncio.Task[None] | None = None
        self._retired: list[GatewayService] = []
        self._ending = set[asyncio.Task[None]]()
        self._lock = asyncio.Lock()
        self._changes: deque[ConfigChange] = deque(maxlen=KEPT_CHANGES)
        self.counts = dict.fromkeys(CHANGES, 0)
        self.on_swap: Callable[[], None] = lambda: None
        self._adopt(self.current)
        ledger.subscribe(self._on_record)

    async def open(self) -> None:
        await self.current.open()
        self._note("started", self.current.version, "")
        if (left := self._mark.take()) is not None:
            self._note("rolled_back", left.version, "", f"{LEFT} It was tried by {left.why}.")

    def arm_of(self, tenant: Tenant) -> GatewayService:
        """Returns the version that a request of this tenant comes in by now."""
        if self.trial is not None and self.canary is not None and tenant.name in self.trial.tenants:
            return self.canary
        return self.current

    @property
    def living(self) -> list[GatewayService]:
        """The current version, a canary's, and those that still have requests."""
        return [self.current, *([] if self.canary is None else [self.canary]), *self._retired]

    # ---- changes

    async def apply(self, config: GatewayConfig, by: str, share: float | None = None, *, is_own: bool = False) -> None:
        """Change to this config: for all, or for a share of the tenants first. is_own: it comes from a file of this
        host, and may point at others of its files. Raises `ConfigError` and changes nothing where it cannot be, and
        `Conflict` while a canary runs."""
        async with self._lock:
            if self.trial is not None:
                hint = "splittime gateway rollback ends it; then apply"
                raise Conflict("a canary is running", code="canary_runs", param="canary", hint=hint)
            try:
                check_change(self._applied.config, config)
                if share is not None:
                    check_canary(self._applied.config, config)
                if not is_own:
                    check_reach(self._own, config)
                loop = asyncio.get_running_loop()
                secrets = await loop.run_in_executor(self.current.pool, secrets_of, config)
                made = self._made(Applied(config, secrets))
                if share is None:
                    await self._swap(made, Applied(config, secrets), "applied", by)
                else:
                    await self._try(made, Applied(config, secrets), share, by)
                self._own = config if is_own else self._own
            except SplittimeError as error:
                self._note("refused", "", by, error.info.message)
                raise

    async def reread(self) -> None:
        """As `apply` of the file that the gateway was started with; what is wrong with it is logged, and counted."""
        assert self._path is not None, "a gateway that is told of SIGHUP has a file"
        try:
            config = await asyncio.get_running_loop().run_in_executor(self.current.pool, read_config, self._path)
        except SplittimeError as error:
            self._note("refused", "", "SIGHUP", error.info.message)
            return
        try:
            await self.apply(config, "SIGHUP", is_own=True)
        except Conflict as error:
            self._note("refused", "", "SIGHUP", error.info.message)
        except SplittimeError:
            return  # noted there

    async def roll_back(self, by: str) -> None:
        """End the canary, or go back to the config before this one. Raises `RequestError` where there is neither."""
        async with self._lock:
            if self.trial is not None:
                await self._end_trial(CanaryDecision(False, "asked for"), by)
                return
            if not self._previous:
                raise RequestError("there is no config before this one", code="nothing_before", status=409)
            (back,) = self._previous
            await self._swap(self._made(back), back, "rolled_back", by)

    def _made(self, applied: Applied) -> GatewayService:
        version = str(numbered(self._number + 1, applied.config))
        return GatewayService(applied.config, applied.secrets, self._ledger, version, self.current)

    async def _open(self, made: GatewayService) -> None:
        await made.open()
        self._number += 1

    async def _swap(self, made: GatewayService, applied: Applied, what: str, by: str, why: str = "") -> None:
        if made is not self.canary:
            await self._open(made)
        # What is measured of other upstreams goes; those that go with this change are told of until the next.
        known = [one for service in (made, *self.living) for one in service.router.upstreams]
        made.round_trips.keep({(one.address.host, one.address.port) for one in known})
        made.metrics.keep({one.name for one in known})
        old, self.current = self.current, made
        self._lead_waiting(made, (old, *self._retired))
        self._previous, self._applied = [self._applied], applied
        self._adopt(made)
        self._retire(old)
        self._ledger.describe_by(made.facts)
        made.metrics.gateway = made
        self.on_swap()
        self._note(what, made.version, by, why)

    def _lead_waiting(self, made: GatewayService, earlier: Iterable[GatewayService]) -> None:
        """Give the requests of earlier versions whose models and pools are all there still the upstreams of this one:
        those that wait for one that had no room, and retries of what was sent to one that is gone."""
        for service in earlier:
            if {*service.router.models, *service.policy.pools} <= {*made.router.models, *made.policy.pools}:
                service.router = made.router
                service.queue.lead_to(made.router)

    def _adopt(self, service: GatewayService) -> None:
        service.versions, service.queue.on_leave = self, self._dispatch

    def _retire(self, service: GatewayService) -> None:
        """The version takes no more requests; those it has go on."""
        self._retired = [one for one in (*self._retired, service) if one.num_open]
        ending = asyncio.get_running_loop().create_task(service.retire())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _dispatch(self) -> None:
        """A place at an upstream is free, which versions may share."""
        for service in self.living:
            service.queue.dispatch()
        if self._retired:
            self._retired = [one for one in self._retired if one.num_open]

    # ---- the canary

    async def _try(self, made: GatewayService, applied: Applied, share: float, by: str) -> None:
        if self._compare is None:
            raise RequestError("this gateway cannot compare: it was started without", code="no_comparison")
        config, version = self._applied.config, self.current.version
        tenants = chosen([tenant.name for tenant in config.tenant], share, made.policy.version)
        loop = asyncio.get_running_loop()
        read = partial(self._before, tenants, version)
        before = await loop.run_in_executor(self.current.pool, read)
        change = self._change("canary", made.version, by, f"{len(tenants)} of {len(config.tenant)} tenants")
        await loop.run_in_executor(self.current.pool, self._mark.put, change)
        await self._open(made)
        self._adopt(made)
        trial = CanaryTrial(config.canary, tenants, before, (version, made.version), self._compare)
        self.trial, self.canary, self._trying = trial, made, applied
        self._watching = loop.create_task(self._watch(trial, time.monotonic() + config.canary.max_s))
        self._keep(change)

    def _before(self, tenants: frozenset[str], version: str) -> list[ClosedAccount]:
        latest = self._ledger.accounts(limit=MAX_BEFORE)
        return [one for one in latest if one.tenant in tenants and one.config_version == version]

    def _on_record(self, record: ClosedAccount | StepRecord) -> None:
        if self.trial is not None and isinstance(record, ClosedAccount):
            self.trial.note(record)

    async def _watch(self, trial: CanaryTrial, until_s: float) -> None:
        """Look whenever both arms have enough; what is not decided in time is rolled back."""
        decision = CanaryDecision(None, "")
        while decision.promotes is None and time.monotonic() < until_s:
            if trial.is_due:
                decision = await self._looked(trial)
            else:
                await asyncio.sleep(WATCH_S)
        if decision.promotes is None:
            decision = CanaryDecision(False, f"not decided in time. {trial.last_look}")
        async with self._lock:
            if self.trial is trial:
                await self._end_trial(decision, "")

    async def _looked(self, trial: CanaryTrial) -> CanaryDecision:
        """A comparison that fails decides nothing good."""
        try:
            decision = await asyncio.get_running_loop().run_in_executor(self.current.pool, trial.look())
        except Exception as error:
            log.exception("the canary's comparison failed")
            decision = CanaryDecision(False, f"the comparison failed: {type(error).__name__}")
        trial.last_look = decision.why
        return decision

    async def _end_trial(self, decision: CanaryDecision, by: str) -> None:
        made, applied, watching = self.canary, self._trying, self._watching
        assert made is not None
        assert applied is not None
        if decision.promotes:
            await self._swap(made, applied, "promoted", by, decision.why)
        else:
            self._retire(made)
            self._note("rolled_back", made.version, by, decision.why)
        self.trial = self.canary = self._trying = self._watching = None
        if watching is not None and watching is not asyncio.current_task():
            watching.cancel()
        await asyncio.get_running_loop().run_in_executor(self.current.pool, self._mark.remove)

    # ---- what is told

    def _note(self, what: str, version: str, by: str, why: str = "") -> None:
        self._keep(self._change(what, version, by, why))

    def _change(self, what: str, version: str, by: str, why: str) -> ConfigChange:
        return ConfigChange(at_unix_s=round(time.time(), 3), what=what, version=version, by=by, why=why[:1000])

    def _keep(self, change: ConfigChange) -> None:
        self._changes.append(change)
        self.counts[change.what] += 1
        log.info("config %s %s by %s: %s", change.what, change.version, change.by or "the gateway", change.why or "-")
        if self.audit is not None:
            self.audit.note("config", msgspec.to_builtins(change))

    @property
    def audit(self) -> AuditLog | None:
        return self.current.audit

    def stats(self) -> dict[str, Any]:
        """Returns the version that serves, the canary, the audit log's state and the latest changes, oldest first."""
        return {
            "version": self.current.version,
            "canary": None if self.trial is None else self.trial.stats(),
            "audit": None if self.audit is None else self.audit.stats(),
            "changes": msgspec.to_builtins(list(self._changes)),
        }

    # ---- the end

    async def drain(self) -> None:
        for service in self.living:
            service.is_draining = True
        await self.current.drain()

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        for service in self.living:
            await service.retire()
        await asyncio.gather(*self._ending)
        await self.current.close()
