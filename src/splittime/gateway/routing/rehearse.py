"""What another config would have done with a ledger's requests: rules, aliases and the limits of keys, replayed.

Both configs are replayed, so that what differs is due to the configs. A request comes when it came, lasts as long as it
lasted and uses the tokens that it used, which are none where no upstream was asked (the cache or a template answered);
one that would have been refused frees its place. Budgets of a day and a month are those of the ledger's dates, unused
when it begins: what `budget_file` held then, nobody knows. What depends on the upstreams of that day, queueing,
shedding and breakers, and on the answers that were kept, is not replayed. A body counts as one answer, as no ledger
says how many it asked for. A request that was refused before its body was read has no features: the limits of both see
it, as one of no tokens, the rules do not. A text is in no ledger, but its score by its labels is, so that another
threshold can be tried and other labels cannot.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

import msgspec

from splittime.core.errors import Refused
from splittime.gateway.budgets import Calendar, TokenBudgets
from splittime.gateway.config import GatewayConfig
from splittime.gateway.routing.difficulty import SMALL, of_score
from splittime.gateway.routing.judge import DifficultyJudge, judges_of
from splittime.gateway.routing.policy import RouteFeatures, RoutePolicy, graded
from splittime.ledger.account import ClosedAccount
from splittime.ledger.attempts import DifficultyDecision, RouteDecision
from splittime.web.quota import Quota
from splittime.web.tenants import ANYBODY, Tenant

MAX_EXAMPLES = 3
NOT_READ = "not read: refused at its head"
NO_TENANT = "refused: no such tenant"
NO_MODEL = "refused: model_not_found"

Judges = Mapping[str, DifficultyJudge]


class ConfigDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which two configs treat requests differently. requests: how many; examples: some of their ids."""

    old: str
    new: str
    requests: int
    examples: tuple[str, ...]


class Rehearsal(msgspec.Struct, frozen=True, kw_only=True):
    """old_policy, new_policy: versions of the configs. requests: replayed. not_read: of these, the ones without
    features. reproduced: decisions that were made under the old config, and that it makes again; strange: that it does
    not. unknown_headers: what the new rules ask for and the ledger does not have. old, new: requests by what became of
    them."""

    old_policy: str
    new_policy: str
    requests: int
    not_read: int
    reproduced: int
    strange: int
    unknown_headers: tuple[str, ...]
    old: dict[str, int]
    new: dict[str, int]
    differences: tuple[ConfigDifference, ...]


class RehearsedConfig:
    """One config with its keys' limits, under the ledger's time."""

    def __init__(self, config: GatewayConfig, judges: Judges) -> None:
        self.policy, self._judges = RoutePolicy(config), judges
        self._difficulties = {route.model: route for route in config.difficulty}
        named = [_tenant(config, number) for number in range(len(config.tenant))]
        self._quotas = {tenant.name: Quota(tenant) for tenant in named or [ANYBODY]}
        self._unix_s = 0.0  # the ledger's date
        self._budgets = TokenBudgets(config.tenant, None, Calendar(lambda: self._unix_s))
        self._open: list[tuple[int, str, int, float]] = []  # ends in ns, whose, tokens, and the end's date

    def outcome(self, account: ClosedAccount) -> str:
        """Returns what becomes of the next request, in the order of their coming."""
        quota = self._quotas.get(account.tenant)
        if quota is None:
            return NO_TENANT
        self._leave_until(account.start_ns)
        self._unix_s = account.started_at_unix_ns / 1e9
        try:
            quota.check(account.start_ns)
            self._budgets.check(account.tenant)
        except Refused as refused:
            return f"refused: {refused.reason}"
        quota.enter(account.start_ns)
        routed = self._routed(account)
        lasted_ns = 0 if routed == NO_MODEL else account.end_ns - account.start_ns
        tokens = 0 if routed == NO_MODEL else _used_tokens(account)
        end_unix_s = (account.started_at_unix_ns + lasted_ns) / 1e9
        heappush(self._open, (account.start_ns + lasted_ns, account.tenant, tokens, end_unix_s))
        return routed

    def _leave_until(self, at_ns: int) -> None:
        while self._open and self._open[0][0] <= at_ns:
            end_ns, tenant, tokens, self._unix_s = heappop(self._open)
            self._quotas[tenant].use_tokens(tokens, end_ns)
            self._quotas[tenant].num_open -= 1
            self._budgets.use(tenant, tokens)

    def _routed(self, account: ClosedAccount) -> str:
        if account.routing is None:
            return NOT_READ
        decision = self.policy.decide(features_of(account))
        if not self.policy.serves(decision):
            return NO_MODEL
        where = f" at {', '.join(decision.upstreams)}" if decision.upstreams else ""
        if decision.model in self._difficulties:
            again = self.by_text(decision, account)
            return f"{decision.model}: by a text that no ledger has" if again is None else again.model
        return f"{decision.model}{where}"

    def by_text(self, decision: RouteDecision, account: ClosedAccount) -> RouteDecision | None:
        """Returns what the text decides; None where the ledger has no score of it by these labels."""
        route, judge = self._difficulties.get(decision.model), self._judges.get(decision.model)
        seen = None if account.routing is None else account.routing.difficulty
        if route is None:
            return decision
        if judge is None:
            return graded(decision, DifficultyDecision(choice=SMALL), route.small)
        if seen is None or (seen.labels, seen.neighbours) != (judge.labels, judge.neighbours):
            return None
        difficulty = of_score(judge, seen.score)
        return graded(decision, difficulty, route.small if difficulty.choice == SMALL else route.large)


def _used_tokens(account: ClosedAccount) -> int:
    """Returns what its tenant was charged: nothing where no upstream was asked."""
    return account.prompt_tokens + account.output_tokens if account.attempts else 0


def features_of(account: ClosedAccount) -> RouteFeatures:
    """Returns what the rules looked at. Raises `ValueError` for an account without a decision."""
    routing = account.routing
    if routing is None:
        raise ValueError(f"account {account.request_id} has no decision")
    return RouteFeatures(
        model=routing.asked_model,
        tenant=account.tenant,
        endpoint=account.endpoint,
        prompt_tokens=routing.prompt_tokens,
        headers=routing.headers,
    )


def rehearse(accounts: Iterable[ClosedAccount], old: GatewayConfig, new: GatewayConfig) -> Rehearsal:
    """Returns what the new config would have done differently; the accounts are of one host since it started. Raises
    `ConfigError` for labels that cannot be read."""
    ordered = sorted(accounts, key=lambda account: account.start_ns)
    before, after = RehearsedConfig(old, judges_of(old)), RehearsedConfig(new, judges_of(new))
    outcomes = [(account.request_id, before.outcome(account), after.outcome(account)) for account in ordered]
    again = Counter(is_again for account in ordered if (is_again := _is_again(account, before)) is not None)
    return Rehearsal(
        old_policy=before.policy.version,
        new_policy=after.policy.version,
        requests=len(ordered),
        not_read=sum(account.routing is None for account in ordered),
        reproduced=again[True],
        strange=again[False],
        unknown_headers=tuple(sorted(set(after.policy.header_names) - set(before.policy.header_names))),
        old=dict(Counter(was for _, was, _ in outcomes).most_common()),
        new=dict(Counter(becomes for _, _, becomes in outcomes).most_common()),
        differences=_differences(outcomes),
    )


def _is_again(account: ClosedAccount, config: RehearsedConfig) -> bool | None:
    """Returns whether a decision of this very policy is made again; None for another's."""
    if account.routing is None or account.routing.policy != config.policy.version:
        return None
    decision: RouteDecision | None = config.policy.decide(features_of(account))
    if decision is not None and account.routing.difficulty is not None:
        decision = config.by_text(decision, account)
    return None if decision is None else decision == account.routing


def _differences(outcomes: Sequence[tuple[str, str, str]]) -> tuple[ConfigDifference, ...]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for request_id, was, becomes in outcomes:
        if was != becomes:
            found[was, becomes].append(request_id)
    ordered = sorted(found.items(), key=lambda entry: -len(entry[1]))
    return tuple(
        ConfigDifference(old=was, new=becomes, requests=len(ids), examples=tuple(ids[:MAX_EXAMPLES]))
        for (was, becomes), ids in ordered
    )


def _tenant(config: GatewayConfig, number: int) -> Tenant:
    told = config.tenant[number]
    return Tenant(
        name=told.name,
        max_open_requests=told.max_open_requests,
        requests_per_minute=told.requests_per_minute,
        tokens_per_minute=told.tokens_per_minute,
    )
