"""How sure a model seems of its answer: the log-probabilities of the first tokens, as its server tells them.

Two forms are read: `logprobs.content[].logprob` of chats (and of llama.cpp's completions), and
`logprobs.token_logprobs[]` of completions.

The bound of a route's first tokens, found from judged prompts as a threshold is: `labels` of an `escalate`.

Each line has `small_logprob`, the mean log-probability of the small model's first tokens for it. Found is the lowest
bound at which the answers are worth the route's `target`, where those below it are the large model's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np

from splittime.core.errors import ConfigError
from splittime.gateway.config import DifficultyConfig, EscalateConfig, GatewayConfig
from splittime.gateway.endpoints import CHAT
from splittime.gateway.forwarded import ForwardedRequest
from splittime.gateway.resume.request import body_of
from splittime.gateway.routing.judge import ChosenThreshold, cheapest, worth_of
from splittime.gateway.routing.labels import read_labels

LEAST = -100.0  # of one token: a server's word for "impossible" does not decide alone
Fields = dict[str, Any]


def why_not_looked_at(body: Fields) -> str:
    """Returns why the first tokens of this request's answer tell nothing; "" if they do."""
    if body.get("echo"):
        return "echo"
    prompt = body.get("prompt")
    has_several = isinstance(prompt, list) and len(prompt) > 1 and type(prompt[0]) is not int
    return "several_answers" if has_several or body.get("n", 1) != 1 or body.get("best_of", 1) != 1 else ""


def asking_for_logprobs(request: ForwardedRequest) -> tuple[ForwardedRequest, bool]:
    """Returns the request that has log-probabilities told, and whether that was added to it."""
    body, is_chat = body_of(request), request.path == CHAT
    if body.get("logprobs") is True or (not is_chat and type(body.get("logprobs")) is int):
        return request, False
    encoded = msgspec.json.encode({**body, "logprobs": True if is_chat else 1})
    return msgspec.structs.replace(request, body=encoded), True


def first_choice(answer: Fields) -> Fields:
    """Returns the first choice of a chunk or an answer, {} if it has none."""
    choices = answer.get("choices")
    return choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}


def logprobs_of(choice: Fields) -> list[float]:
    """Returns those of a choice's tokens, in order; [] if it tells none."""
    told = choice.get("logprobs")
    if not isinstance(told, dict):
        return []
    content, values = told.get("content"), told.get("token_logprobs")
    if isinstance(content, list):
        values = [one.get("logprob") for one in content if isinstance(one, dict)]
    return [min(0.0, max(LEAST, one)) for one in values if _is_number(one)] if isinstance(values, list) else []


def says_something(choice: Fields) -> bool:
    """Returns whether a chunk's choice has a piece of the answer, of whatever kind."""
    delta = choice.get("delta")
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text")) or (isinstance(delta, dict) and any(delta.get(name) for name in names))


def without_logprobs(answer: Fields) -> Fields:
    """Returns the chunk or answer as it is where nobody asked for log-probabilities."""
    choices = answer.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and "logprobs" in choice:
            choice["logprobs"] = None
    return answer


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
