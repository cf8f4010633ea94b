"""Whether another revision is as good as the one that serves: what its one replica answered, beside the others.

The comparison is the gateway's for configs (`gateway.versions.canary`), with the replica's revision in the place of
the config's version: a look at so many requests of each, then at twice as many, with less of the chance of error each
time. There is no comparison with before: who is routed where is chance, so both arms have the same clients.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from splittime.gateway.config import CanaryConfig
from splittime.gateway.versions.canary import CanaryDecision, CanaryTrial, CompareArms
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_from_json

MAX_KNOWN = 20_000  # ids of requests that were counted


class RevisionTrial:
    """old, new: revisions. began_s: on a clock that only goes forward."""

    def __init__(self, config: CanaryConfig, old: str, new: str, began_s: float, compare: CompareArms) -> None:
        self.old, self.new = old, new
        self._until_s = began_s + config.max_s
        self._trial = CanaryTrial(config, frozenset(), (), (old, new), compare)
        self._known: dict[str, None] = {}

    def note(self, answer: Mapping[str, Any] | None, revisions: Mapping[str, str]) -> None:
        """Take in what a gateway answers of its latest requests. revisions: by the name of the replica."""
        for told in (answer or {}).get("accounts", ()):
            if told["request_id"] in self._known:
                continue
            account = account_from_json(told)
            revision = _revision(account, revisions)
            if revision is not None:
                self._known[account.request_id] = None
                self._trial.note(msgspec.structs.replace(account, config_version=revision))
        self._forget()

    def look(self, now_s: float) -> CanaryDecision:
        """Returns what is decided; takes a while, and may be called on any thread."""
        if self._trial.is_due:
            decision = self._trial.look()()
            self._trial.last_look = decision.why
            if decision.promotes is not None:
                return decision
        if now_s >= self._until_s:
            return CanaryDecision(False, f"not decided in time. {self._trial.last_look}")
        return CanaryDecision(None, self._trial.last_look)

    def stats(self) -> dict[str, Any]:
        told = self._trial.stats()
        return {name: told[name] for name in ("requests", "requests_of_others", "next_look_at", "last_look")}

    def _forget(self) -> None:
        for request_id in list(self._known)[: max(0, len(self._known) - MAX_KNOWN)]:
            del self._known[request_id]


def _revision(account: ClosedAccount, revisions: Mapping[str, str]) -> str | None:
    """Returns the revision that answered; None where several were tried, or none that is known."""
    found = set(_found(account, revisions))
    return found.pop() if len(found) == 1 else None


def _found(account: ClosedAccount, revisions: Mapping[str, str]) -> Iterable[str | None]:
    return (revisions.get(attempt.upstream) for attempt in account.attempts)
