"""What another config would have done with a ledger's requests: rules, aliases and the limits of keys, replayed.

Both configs are replayed, so what differs is due to the configs. A request comes when it came, and takes the time and
tokens that it took: none where no upstream was asked. One that would have been refused frees its place. Budgets follow
the ledger's dates and begin unused. Not replayed: queueing, shedding, breakers, kept answers and first tokens (a
`[[difficulty]]` is told as its small model). A body counts as one answer. A request that was refused before its body
was read has no features: both configs' limits see it as one of no tokens, and no rule does.

`gateway evaluate` draws what routing by difficulty costs and is worth, on prompts for which both answers were judged.
A point of the curve is one bound: mean cost, mean worth, and `gain` over random routing of the same cost. Routing pays
where the gain's interval is above 0. An unsure answer costs both models' prices. Use other prompts than the labels that
the bound was found with.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from splittime.core.errors import ConfigError, Refused
from splittime.gateway.budgets import Calendar, TokenBudgets
from splittime.gateway.config import DifficultyConfig, GatewayConfig
from splittime.gateway.routing.difficulty import SMALL, Bools, ChosenBound, Floats, LabelledPrompt, below_of
from splittime.gateway.routing.policy import RouteFeatures, RoutePolicy, graded
from splittime.ledger.account import ClosedAccount
from splittime.ledger.attempts import RouteDecision
from splittime.web.tenants import ANYBODY, Quota, Tenant

STEPS = 10  # of a curve, each with as many prompts
MAX_EXAMPLES = 3
NOT_READ = "not read: refused at its head"
NO_TENANT = "refused: no such tenant"
NO_MODEL = "refused: model_not_found"


class EstimatedMean(Protocol):
    """A mean and the ends of its interval (95 %)."""

    @property
    def value(self) -> float:
        """The mean."""

    @property
    def low(self) -> float:
        """The lower end."""

    @property
    def high(self) -> float:
        """The upper end."""


Means = Callable[[Floats], Sequence[EstimatedMean]]


class MeanFigure(msgspec.Struct, frozen=True):
    """A mean over the prompts, with its interval (95 %)."""

    value: float
    low: float
    high: float


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """threshold: from which on the small model's answer is had. gain: worth beyond that of random routing of the same
    cost."""

    threshold: float
    share_small: float
    cost: MeanFigure
    worth: MeanFigure
    gain: MeanFigure


class Misroutes(msgspec.Struct, frozen=True, kw_only=True):
    """Where the chosen bound was wrong, beside a choice that knows both answers.

    wasted: the share that the large model had, and the small one had done as well; wasted_cost: what that cost a
    request. lost: the share that the small one had, and the large one had done better; lost_worth: by how much."""

    wasted: MeanFigure
    wasted_cost: MeanFigure
    lost: MeanFigure
    lost_worth: MeanFigure


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """best: with a choice that knows both answers. chosen: with the bound in force. expected: what it was chosen for,
    where labels chose it. at_most: of `escalate`."""

    model: str
    prompts: int
    costs: str
    always_small: CurvePoint
    always_large: CurvePoint
    best: CurvePoint
    chosen: CurvePoint
    misroutes: Misroutes
    by_first_tokens: tuple[CurvePoint, ...]
    expected: ChosenBound | None
    at_most: float


class Costs(NamedTuple):
    """What a request costs where the data do not say."""

    small: float
    large: float


class JudgedPrompts:
    """The data as columns. means: of columns, with intervals from one bootstrap. Raises `ConfigError` where it lacks
    something."""

    def __init__(self, prompts: Sequence[LabelledPrompt], costs: Costs, means: Means) -> None:
        if any(one.large_right is None for one in prompts):
            hint = "evaluate needs small_right and large_right in every line"
            raise ConfigError("large_right is missing in a line", param="large_right", hint=hint)
        self._means = means
        self.small = np.array([float(one.small_right) for one in prompts])
        self.large = np.array([float(one.large_right or 0) for one in prompts])
        self.are_told = all(None not in (one.small_cost, one.large_cost) for one in prompts)
        self.small_cost = np.array([_cost(one.small_cost, costs.small, self.are_told) for one in prompts])
        self.large_cost = np.array([_cost(one.large_cost, costs.large, self.are_told) for one in prompts])

    def points(self, thresholds: Sequence[float], scores: Floats, *, both: bool = False) -> tuple[CurvePoint, ...]:
        """Returns the curve's points. both: who has the large model has paid for the small one too."""
        chosen = [scores >= threshold for threshold in thresholds]
        columns = [column for goes_small in chosen for column in self._columns(goes_small, both)]
        found = iter(self.figures(columns))
        return tuple(
            CurvePoint(
                threshold=threshold,
                share_small=float(goes_small.mean()),
                cost=next(found),
                worth=next(found),
                gain=next(found),
            )
            for threshold, goes_small in zip(thresholds, chosen, strict=True)
        )

    def figures(self, columns: Sequence[Floats]) -> list[MeanFigure]:
        if not columns:
            return []
        return [MeanFigure(one.value, one.low, one.high) for one in self._means(np.stack(columns, axis=1))]

    def misroutes(self, goes_small: Bools) -> Misroutes:
        is_wasted, is_lost = ~goes_small & (self.small >= self.large), goes_small & (self.large > self.small)
        worse = self.large - self.small
        columns = [is_wasted.astype(float), is_wasted * self.large_cost, is_lost.astype(float), is_lost * worse]
        wasted, wasted_cost, lost, lost_worth = self.figures(columns)
        return Misroutes(wasted=wasted, wasted_cost=wasted_cost, lost=lost, lost_worth=lost_worth)

    def _columns(self, goes_small: Bools, both: bool) -> Iterator[Floats]:
        cost = np.where(goes_small, self.small_cost, self.large_cost + (self.small_cost if both else 0.0))
        worth = np.where(goes_small, self.small, self.large)
        yield cost
        yield worth
        yield worth - self._random(float(cost.mean()))

    def _random(self, cost: float) -> Floats:
        """Returns what each prompt is worth to routing by chance that costs as much, or all that it can cost."""
        least, most = float(self.small_cost.mean()), float(self.large_cost.mean())
        share = min(1.0, max(0.0, (cost - least) / (most - least))) if most > least else 1.0
        return self.small + share * (self.large - self.small)


def _cost(told: float | None, assumed: float, are_told: bool) -> float:
    return assumed if told is None or not are_told else told


def evaluate(
    route: DifficultyConfig,
    prompts: Sequence[LabelledPrompt],
    costs: Costs,
    means: Means,
    bound: ChosenBound | None = None,
) -> Evaluation:
    """Returns the evaluation of a route. bound: of its first tokens, where that was found from labels. Raises
    `ConfigError` for data that cannot tell."""
    data, logprobs = JudgedPrompts(prompts, costs, means), np.array([one.small_logprob for one in prompts])
    all_small, all_large = data.points([0.0, 1.0], np.full(len(prompts), 0.5))
    (best,) = data.points([1.0], (data.small >= data.large).astype(float))
    below = below_of(route.escalate, bound)
    shares = np.quantile(logprobs, np.linspace(1, 0, STEPS + 1)[1:], method="inverted_cdf")
    thresholds = [float(np.nextafter(logprobs.max(), np.inf)), *dict.fromkeys(shares.tolist())]
    *curve, chosen = data.points([*thresholds, below], logprobs, both=True)
    return Evaluation(
        model=route.model,
        prompts=len(prompts),
        costs="as the data say" if data.are_told else f"small {costs.small:g}, large {costs.large:g} a request",
        always_small=all_small,
        always_large=all_large,
        best=best,
        chosen=chosen,
        misroutes=data.misroutes(logprobs >= below),
        by_first_tokens=tuple(curve),
        expected=bound,
        at_most=route.escalate.at_most,
    )


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

    def __init__(self, config: GatewayConfig) -> None:
        self.policy = RoutePolicy(config)
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
        return f"{self.begun(decision).model}{where}"

    def begun(self, decision: RouteDecision) -> RouteDecision:
        """Returns the decision of a request before its first tokens have been looked at."""
        route = self._difficulties.get(decision.model)
        return decision if route is None else graded(decision, SMALL, route.small)


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
    """Returns what the new config would have done differently; the accounts are of one host since it started."""
    ordered = sorted(accounts, key=lambda account: account.start_ns)
    before, after = RehearsedConfig(old), RehearsedConfig(new)
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
    decision = config.policy.decide(features_of(account))
    return account.routing == (decision if account.routing.difficulty is None else config.begun(decision))


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
