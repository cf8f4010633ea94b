"""Whether a ladder can be climbed: each stage says one thing, is left below its entrance, and follows a lighter one."""

from itertools import pairwise

from splittime.core.errors import ConfigError
from splittime.gateway.config import DegradationConfig, GatewayConfig


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
