"""The bound of a route's first tokens, found from judged prompts as a threshold is: `labels` of an `escalate`.

Each line has `small_logprob`, the mean log-probability of the small model's first tokens for it. Found is the lowest
bound at which the answers are worth the route's `target`, where those below it are the large model's.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from splittime.core.errors import ConfigError
from splittime.gateway.config import DifficultyConfig, EscalateConfig, GatewayConfig
from splittime.gateway.routing.first_tokens import LEAST
from splittime.gateway.routing.judge import ChosenThreshold, cheapest, worth_of
from splittime.gateway.routing.labels import read_labels


def bounds_of(config: GatewayConfig) -> Mapping[str, ChosenThreshold]:
    """Returns the bound of each route whose `escalate` has labels, by the route's model. Raises `ConfigError`."""
    routes = enumerate(config.difficulty)
    return {
        route.model: _bound(f"difficulty[{at}]", route, route.escalate, route.escalate.labels)
        for at, route in routes
        if route.escalate is not None and route.escalate.labels is not None
    }


def _bound(path: str, route: DifficultyConfig, escalate: EscalateConfig, labels: str) -> ChosenThreshold:
    param = f"{path}.escalate.labels"
    prompts = read_labels(Path(labels), param).prompts
    told = [one.small_logprob for one in prompts if one.small_logprob is not None]
    if len(told) < len(prompts) or not all(LEAST <= one <= 0 for one in told):
        message, hint = f"{param}: a line has no small_logprob from {LEAST:g} to 0", "`below` can be given by hand"
        raise ConfigError(message, param=param, value=labels, hint=hint)
    logprobs, worth = np.array(told), worth_of(prompts)
    allowed = [at for at in [LEAST, *np.unique(logprobs).tolist()] if (logprobs < at).mean() <= escalate.at_most]
    found = cheapest(logprobs, worth, route.target, allowed)
    if found.quality_low < route.target:
        most = f"with {escalate.at_most:.0%} of the answers asked anew"
        message = f"{path}.target {route.target:g} is not reached {most}, which reach {found.quality_low:.3f} at least"
        hint = "lower the target, raise at_most, or label more prompts"
        raise ConfigError(message, param=f"{path}.target", value=route.target, limit=found.quality_low, hint=hint)
    return found
