"""The rules of `gateway.toml`, applied: what a request looks like in, a decision out.

A decision depends on its features alone, never on load or time, so that an account that keeps both can be replayed
through this policy or another (`rehearse`). The first rule that matches decides; what none matches keeps the model that
it asked for, by its alias if that is one. An alias is looked up once: none leads to another.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256

import msgspec

from splittime.core.errors import NotFound
from splittime.gateway.config import GatewayConfig, RuleConfig, UpstreamConfig
from splittime.gateway.forwarded import ForwardedRequest, with_model
from splittime.ledger.attempts import DifficultyDecision, RouteDecision
from splittime.web import http

VERSION_CHARS = 16
MAX_HEADER_CHARS = 64  # of a value, in an account; no condition is longer
MAX_MODEL_CHARS = 256
ANY = "*"


class RouteFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """What rules look at. prompt_tokens: as estimated. headers: those that some rule of the config asks for; a header
    that is not there is left out."""

    model: str
    tenant: str
    endpoint: str
    prompt_tokens: int
    headers: tuple[tuple[str, str], ...] = ()


class RoutePolicy:
    """version: the beginning of the SHA-256 of the config that it was made of; two alike decide alike."""

    def __init__(self, config: GatewayConfig) -> None:
        self._rules, self._aliases, self._upstreams = config.rule, config.aliases, config.upstream
        self.version = version_of(config)
        self.header_names = tuple(sorted({name for rule in config.rule for name in rule.headers}))
        self.pools = pools_of(config.rule, config.upstream)
        self._graded = tuple(route.model for route in config.difficulty)
        self._models = frozenset(self._graded).union(*(upstream.models for upstream in config.upstream))

    @property
    def names(self) -> list[str]:
        """Returns every name that a request may ask for without a rule: the upstreams' models, then those of
        `[[difficulty]]`, then aliases."""
        models = [model for upstream in self._upstreams for model in upstream.models]
        return list(dict.fromkeys([*models, *self._graded, *self._aliases]))

    def features(self, request: ForwardedRequest, tenant: str, scope: http.Scope) -> RouteFeatures:
        found = [(name, http.header(scope, name.encode())) for name in self.header_names]
        return RouteFeatures(
            model=request.model,
            tenant=tenant,
            endpoint=request.endpoint,
            prompt_tokens=request.prompt_tokens,
            headers=tuple((name, value[: MAX_HEADER_CHARS + 1]) for name, value in found if value is not None),
        )

    def decide(self, features: RouteFeatures) -> RouteDecision:
        """Returns who may have such a request; `serves` says whether that is anybody."""
        rule = next((rule for rule in self._rules if matches(rule, features)), None)
        asked = self._aliases.get(features.model, features.model)
        return RouteDecision(
            policy=self.version,
            rule="" if rule is None else rule.name,
            asked_model=features.model[:MAX_MODEL_CHARS],
            model=(asked if rule is None else rule.model or asked)[:MAX_MODEL_CHARS],
            upstreams=() if rule is None else rule.upstreams,
            prompt_tokens=features.prompt_tokens,
            headers=features.headers,
        )

    def serves(self, decision: RouteDecision) -> bool:
        """Returns whether there is an upstream for this decision."""
        return pool_of(decision) in self.pools if decision.upstreams else decision.model in self._models

    def routed(self, request: ForwardedRequest, tenant: str, scope: http.Scope) -> ForwardedRequest:
        """Returns the request as it is passed on: decided upon, and with the decided model's name in its body."""
        decision = self.decide(self.features(request, tenant, scope))
        if decision.model != decision.asked_model:
            request = with_model(request, decision.model)
        return msgspec.structs.replace(request, decision=decision, pool=pool_of(decision))

    def require(self, request: ForwardedRequest) -> None:
        """Raises `NotFound` if no upstream may have this request."""
        decision = request.decision
        if decision is None or not self.serves(decision):
            rule = f" of the rule {decision.rule!r}" if decision is not None and decision.rule else ""
            message = f"no upstream{rule} serves {request.model[:64]!r}"
            hint = "GET /v1/models lists the models"
            raise NotFound(message, code="model_not_found", param="model", hint=hint)


def graded(decision: RouteDecision, difficulty: DifficultyDecision, model: str) -> RouteDecision:
    """Returns the decision of a `[[difficulty]]`. model: that of the choice."""
    return msgspec.structs.replace(decision, model=model[:MAX_MODEL_CHARS], difficulty=difficulty)


def version_of(config: GatewayConfig) -> str:
    return sha256(msgspec.json.encode(config, order="deterministic")).hexdigest()[:VERSION_CHARS]


def matches(rule: RuleConfig, features: RouteFeatures) -> bool:
    """Returns whether all that the rule asks for holds; one that asks for nothing always matches."""
    told = dict(features.headers)
    return (
        (not rule.models or any(is_like(features.model, pattern) for pattern in rule.models))
        and (not rule.tenants or features.tenant in rule.tenants)
        and rule.endpoint in (None, features.endpoint)
        and (rule.min_prompt_tokens is None or features.prompt_tokens >= rule.min_prompt_tokens)
        and (rule.max_prompt_tokens is None or features.prompt_tokens <= rule.max_prompt_tokens)
        and all(name in told and value in (ANY, told[name]) for name, value in rule.headers.items())
    )


def is_like(name: str, pattern: str) -> bool:
    """Returns whether this is the name, or begins as a pattern with a star at its end says."""
    return name.startswith(pattern[:-1]) if pattern.endswith(ANY) else name == pattern


def pool_of(decision: RouteDecision) -> str:
    """Returns the name of the line that a request waits in: its model's, or that of a rule that names upstreams."""
    return f"{decision.model} (rule {decision.rule})" if decision.upstreams else decision.model


def pools_of(rules: Sequence[RuleConfig], upstreams: Sequence[UpstreamConfig]) -> Mapping[str, tuple[str, ...]]:
    """Returns the names of the upstreams of each line that a rule makes, for each model that they serve."""
    pools: dict[str, tuple[str, ...]] = {}
    for rule in (rule for rule in rules if rule.upstreams):
        named = [upstream for upstream in upstreams if upstream.name in rule.upstreams]
        for model in dict.fromkeys(model for upstream in named for model in upstream.models):
            able = tuple(upstream.name for upstream in named if model in upstream.models)
            pools[f"{model} (rule {rule.name})"] = able
    return pools
