"""Checks across a config's tables: no rule names what is not there, and each ladder of degradation can be climbed."""

import re
from collections.abc import Sequence
from itertools import pairwise

from splittime.core.errors import ConfigError
from splittime.gateway.config import DegradationConfig, DifficultyConfig, GatewayConfig, RuleConfig
from splittime.gateway.routing.policy import MAX_HEADER_CHARS, pools_of
from splittime.gateway.upstreams import held_line

_HEADER = re.compile(r"[a-z0-9-]{1,64}")
_SECRET = re.compile(r"(^|-)(api-?key|key|authorization|auth|token|secret|password|cookie|signature)(-|$)")


def check_routing(config: GatewayConfig) -> None:
    """Raises `ConfigError` naming the first rule or alias that cannot be meant."""
    models = [model for upstream in config.upstream for model in upstream.models]
    for number, route in enumerate(config.difficulty):
        _check_difficulty(f"difficulty[{number}]", route, config, models)
    models += [route.model for route in config.difficulty]
    for alias, model in config.aliases.items():
        if alias in models:
            hint = "take the alias out, or the model from `models`; or write a [[rule]] with models and model"
            raise ConfigError(f"aliases.{alias} is a model itself", param=f"aliases.{alias}", hint=hint)
        _among(f"aliases.{alias}", model, models)
    kept = [held_line(upstream.name) for upstream in config.upstream]
    for pool in (*pools_of(config.rule, config.upstream), *kept):
        if pool in models:
            hint = "give the rule, or the model, another name: requests wait under this one"
            raise ConfigError(f"a model is called {pool!r}, as a line of requests is", param="rule", hint=hint)
    for number, rule in enumerate(config.rule):
        _check_rule(f"rule[{number}]", rule, config)


def _check_rule(path: str, rule: RuleConfig, config: GatewayConfig) -> None:
    upstreams = [one for one in config.upstream if not rule.upstreams or one.name in rule.upstreams]
    for name in rule.upstreams:
        _among(f"{path}.upstreams", name, [upstream.name for upstream in config.upstream])
    for name in rule.tenants:
        _among(f"{path}.tenants", name, [tenant.name for tenant in config.tenant])
    if rule.model is not None:
        graded = [] if rule.upstreams else [route.model for route in config.difficulty]
        served = [model for upstream in upstreams for model in upstream.models]
        _among(f"{path}.model", rule.model, [*served, *graded])
    elif not rule.upstreams:
        hint = "say which model or which upstreams the requests that it matches get"
        raise ConfigError(f"{path} decides nothing", param=f"{path}.model", hint=hint)
    low, high = rule.min_prompt_tokens or 0, rule.max_prompt_tokens
    if high is not None and low > high:
        said = f"{path} matches no length: min_prompt_tokens = {low} is more than max_prompt_tokens"
        raise ConfigError(said, param=f"{path}.min_prompt_tokens", value=low, limit=high, hint="swap them")
    for name, value in rule.headers.items():
        _check_header(f"{path}.headers.{name}", name, value)


def _check_difficulty(path: str, route: DifficultyConfig, config: GatewayConfig, models: Sequence[str]) -> None:
    """Raises `ConfigError` unless its name is its own and both of its models are some upstream's."""
    param, is_twice = f"{path}.model", [one.model for one in config.difficulty].count(route.model) > 1
    if not route.model or route.model in models or is_twice:
        hint = "give it a name of its own; an alias or a [[rule]] can lead other names to it"
        why = "stands twice" if is_twice else "is a model of an upstream" if route.model else "is empty"
        raise ConfigError(f"{param}: {route.model!r} {why}", param=param, value=route.model, hint=hint)
    _among(f"{path}.small", route.small, models)
    _among(f"{path}.large", route.large, models)
    if route.small == route.large:
        raise ConfigError(f"{path}.large is the small one too", param=f"{path}.large", hint="name two models")
    if route.escalate is not None and (route.escalate.below is None) == (route.escalate.labels is None):
        param, hint = f"{path}.escalate.below", 'below = -1.0 is a bound; labels = "judged.jsonl" finds one'
        raise ConfigError(f"{param}: escalate needs it or labels, and not both", param=param, hint=hint)
    if route.labels is None and route.escalate is None:
        hint = 'give labels = "labels.jsonl", or escalate = { below = -1.0 }, or both'
        raise ConfigError(f"{path} decides nothing", param=f"{path}.labels", hint=hint)


def _check_header(param: str, name: str, value: str) -> None:
    if _SECRET.search(name):
        hint = "its value would stand in accounts; a rule can ask for tenants"
        raise ConfigError(f"{param} may hold a secret", param=param, hint=hint)
    if not _HEADER.fullmatch(name):
        raise ConfigError(f"{param} is no name of a header", param=param, hint="in small letters, digits and hyphens")
    if not value or len(value) > MAX_HEADER_CHARS:
        hint = 'the value whole, or "*" for any'
        raise ConfigError(
            f"{param} has a value of {len(value)} characters", param=param, limit=[1, MAX_HEADER_CHARS], hint=hint
        )


def _among(param: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        hint = f"there are {', '.join(dict.fromkeys(known)) or 'none'}"
        raise ConfigError(f"{param} names {name!r}, which is not there", param=param, value=name, hint=hint)


def check_ladder(config: GatewayConfig) -> None:
    """Raises `ConfigError`."""
    models = {model for upstream in config.upstream for model in upstream.models}
    for number, stage in enumerate(config.degradation):
        _check_stage(stage, f"degradation[{number}]", models)
    for number, (lighter, stage) in enumerate(pairwise(config.degradation)):
        if stage.enter_wait_s <= lighter.enter_wait_s:
            param, value = f"degradation[{number + 1}].enter_wait_s", stage.enter_wait_s
            message = f"{param} is {value:g}, not more than that of {lighter.name!r} before it"
            raise ConfigError(message, param=param, value=value, limit=lighter.enter_wait_s, hint="order them by it")


def _check_stage(stage: DegradationConfig, path: str, models: set[str]) -> None:
    if sum(one is not None for one in (stage.max_tokens, stage.model, stage.answer)) != 1:
        message = f"{path} needs one of max_tokens, model and answer"
        raise ConfigError(message, param=path, hint="a stage does one thing; those before it go on")
    if stage.leave_wait_s >= stage.enter_wait_s:
        param, limit = f"{path}.leave_wait_s", stage.enter_wait_s
        message = f"{param} is {stage.leave_wait_s:g}, not below enter_wait_s, {limit:g}"
        raise ConfigError(message, param=param, value=stage.leave_wait_s, limit=limit, hint="half of it is a beginning")
    if stage.model is not None and stage.model not in models:
        hint = "name a model of an [[upstream]]"
        raise ConfigError(f"{path}.model: no upstream serves {stage.model!r}", param=f"{path}.model", hint=hint)
