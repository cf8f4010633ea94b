"""Routing by difficulty: `[[difficulty]]` gives a request to a small model, whose first tokens say whether the large
one is asked in its place (`escalation`). Here: the bound, where it comes from, and how many answers are asked anew.

How sure a model is of its answer is the mean log-probability of its first tokens, read from chats
(`logprobs.content[].logprob`; llama.cpp's completions too) or completions (`logprobs.token_logprobs[]`).

The bound is given, or found in judged prompts (`labels`, also read by `gateway evaluate`): the lowest at which the
answers are worth `target`, by the lower end of their interval. Each line of that file is a JSON object: `small_right`
(true, false, or a judge's number from 0 to 1), `small_logprob`, and, where known, `large_right` and both costs in any
unit. A large model's answer that nobody judged is taken to be right. Errors name a line and never its text.

The share of answers that are asked anew is limited: under other traffic a bound might send everything to both models.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import msgspec
import numpy as np
from numpy.typing import NDArray

from splittime.core.errors import ConfigError
from splittime.core.files import read_small
from splittime.gateway.config import DifficultyConfig, EscalateConfig, GatewayConfig
from splittime.gateway.forwarded import CHAT, ForwardedRequest, with_model
from splittime.gateway.resume import body_of
from splittime.gateway.routing.policy import graded
from splittime.ledger.attempts import DifficultyDecision

MAX_BYTES = 16 * 2**20
MAX_PROMPTS = 10_000
LEAST_PROMPTS = 50
LEAST = -100.0  # of one token: a server's word for "impossible" does not decide alone
ALMOST = 1e-9  # by which a mean may miss the target, as sums do
NORMAL_95 = 1.6449  # of a normal distribution, so many standard deviations below the mean leave 5 %

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Fields = dict[str, Any]
SMALL = DifficultyDecision(choice="small")
LATEST = 100  # answers
FIRST = 10  # answers, of which a share is allowed before there were as many
OVER_SHARE, NO_TIME, NO_PLACE = "share", "deadline", "no_place"  # why an unsure answer is kept


class LabelledPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the file. Worth is from 0 to 1."""

    small_right: float | bool
    small_logprob: float
    large_right: float | bool | None = None
    small_cost: float | None = None
    large_cost: float | None = None


class JudgedWorth(NamedTuple):
    """What both models' answers to each prompt are worth. is_told: whether the file says it of the large one's."""

    small: Floats
    large: Floats
    is_told: Bools


class ChosenBound(msgspec.Struct, frozen=True, kw_only=True):
    """threshold: log-probabilities from which on the small model's answer is had. share_small, quality: as expected.
    quality_low: the lower end of what the answers are worth, which 95 of 100 such files are right about (Wilson, 1927).
    prompts: labelled ones."""

    threshold: float
    share_small: float
    quality: float
    quality_low: float
    prompts: int


def read_labels(path: Path, param: str) -> tuple[LabelledPrompt, ...]:
    """Returns what the file says. Raises `ConfigError` that names `param` for one that cannot be read or used."""
    try:
        data = read_small(path, MAX_BYTES)
    except OSError as error:
        hint = "JSONL: small_right and small_logprob a line"
        raise ConfigError(f"{param}: cannot read {path}: {error}", param=param, value=str(path), hint=hint) from error
    prompts = tuple(_prompts(data, param))
    if not LEAST_PROMPTS <= len(prompts) <= MAX_PROMPTS:
        message, limit = f"{param}: {path} has {len(prompts)} prompts", [LEAST_PROMPTS, MAX_PROMPTS]
        hint = "label more" if len(prompts) < LEAST_PROMPTS else "take a sample of its lines"
        raise ConfigError(message, param=param, value=len(prompts), limit=limit, hint=hint)
    return prompts


def _prompts(data: bytes, param: str) -> Iterator[LabelledPrompt]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            found = msgspec.json.decode(line, type=LabelledPrompt)
            fault = _fault(found)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            fault = str(error)
        if fault:
            hint = 'a line is as {"small_right": true, "small_logprob": -0.2}'
            raise ConfigError(f"{param}: line {number}: {fault}", param=param, value=number, hint=hint)
        yield found


def _fault(line: LabelledPrompt) -> str:
    worth = (line.small_right, 0.0 if line.large_right is None else line.large_right)
    if not all(0 <= one <= 1 for one in worth):
        return "small_right and large_right are true, false, or from 0 to 1"
    if not LEAST <= line.small_logprob <= 0:
        return f"small_logprob is from {LEAST:g} to 0"
    return "" if all(one is None or one >= 0 for one in (line.small_cost, line.large_cost)) else "a cost is below 0"


# ---- what labels promise


def worth_of(prompts: Sequence[LabelledPrompt]) -> JudgedWorth:
    """Returns what the answers are worth; the large model's 1 where the file does not say."""
    told = [one.large_right for one in prompts]
    small = np.array([float(one.small_right) for one in prompts])
    large = np.array([1.0 if one is None else float(one) for one in told])
    return JudgedWorth(small, large, np.array([one is not None for one in told]))


def cheapest(scores: Floats, worth: JudgedWorth, target: float, thresholds: Sequence[float]) -> ChosenBound:
    """Returns the first of these thresholds, which rise, that reaches the target; else the last."""
    for threshold in thresholds:
        found = _expected(threshold, scores >= threshold, worth)
        if found.quality_low >= target - ALMOST:
            break
    return found


def _expected(threshold: float, goes_small: Bools, worth: JudgedWorth) -> ChosenBound:
    had, is_seen = np.where(goes_small, worth.small, worth.large), goes_small | worth.is_told
    seen, taken = int(is_seen.sum()), int((~is_seen).sum())  # of answers that were judged, or taken to be right
    low = (lower_end(float(had[is_seen].mean()), seen) * seen + taken) / len(had) if seen else 1.0
    return ChosenBound(
        threshold=threshold,
        share_small=float(goes_small.mean()),
        quality=float(had.mean()),
        quality_low=low,
        prompts=len(had),
    )


def lower_end(mean: float, count: int) -> float:
    """Returns below what the mean of such values, from 0 to 1, is with a chance of 5 % at the most."""
    square = NORMAL_95**2 / count
    spread = NORMAL_95 * sqrt(max(0.0, mean * (1 - mean)) / count + square / (4 * count))
    return max(0.0, (mean + square / 2 - spread) / (1 + square))


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


def bounds_of(config: GatewayConfig) -> Mapping[str, ChosenBound]:
    """Returns the bound of each route whose `escalate` has labels, by the route's model. Raises `ConfigError`."""
    routes = enumerate(config.difficulty)
    return {
        route.model: _bound(f"difficulty[{at}]", route, route.escalate, route.escalate.labels)
        for at, route in routes
        if route.escalate.labels is not None
    }


def _bound(path: str, route: DifficultyConfig, escalate: EscalateConfig, labels: str) -> ChosenBound:
    prompts = read_labels(Path(labels), f"{path}.escalate.labels")
    logprobs, worth = np.array([one.small_logprob for one in prompts]), worth_of(prompts)
    allowed = [at for at in [LEAST, *np.unique(logprobs).tolist()] if (logprobs < at).mean() <= escalate.at_most]
    found = cheapest(logprobs, worth, route.target, allowed)
    if found.quality_low < route.target:
        most = f"with {escalate.at_most:.0%} of the answers asked anew"
        message = f"{path}.target {route.target:g} is not reached {most}, which reach {found.quality_low:.3f} at least"
        hint = "lower the target, raise at_most, or label more prompts"
        raise ConfigError(message, param=f"{path}.target", value=route.target, limit=found.quality_low, hint=hint)
    return found


class Escalations:
    """below: the bound in force, given or calibrated."""

    def __init__(self, config: EscalateConfig, below: float) -> None:
        self.below, self.tokens, self._at_most = below, config.tokens, config.at_most
        self._latest: deque[bool] = deque(maxlen=LATEST)

    @property
    def has_room(self) -> bool:
        """Returns whether one more may be asked anew now."""
        others = list(self._latest)[-(LATEST - 1) :]  # that will be the latest with it
        return sum(others) + 1 <= self._at_most * max(FIRST, len(others) + 1)

    def note(self, *, is_anew: bool) -> None:
        """An answer has been judged."""
        self._latest.append(is_anew)

    def stats(self) -> dict[str, Any]:
        return {"below": self.below, "judged": len(self._latest), "asked_anew": sum(self._latest)}


class DifficultyRouting:
    """What the requests of one config share. bounds: by model, of the routes whose bound is found from labels."""

    def __init__(self, routes: Sequence[DifficultyConfig], bounds: Mapping[str, ChosenBound]) -> None:
        self._routes, self._bounds = {route.model: route for route in routes}, bounds
        self._escalations = {
            route.model: Escalations(route.escalate, below_of(route.escalate, bounds.get(route.model)))
            for route in routes
        }

    def route(self, request: ForwardedRequest) -> DifficultyConfig | None:
        """Returns the route of a request whose model is not decided upon yet."""
        return self._routes.get(request.model)

    def escalations(self, route: DifficultyConfig) -> Escalations:
        return self._escalations[route.model]

    def stats(self) -> dict[str, Any]:
        """Returns what came of each route's first tokens, and what labels promise, by its model."""
        found = {}
        for model, escalations in self._escalations.items():
            expected = {"expected": msgspec.to_builtins(self._bounds[model])} if model in self._bounds else {}
            found[model] = {"first_tokens": {**escalations.stats(), **expected}}
        return found


def below_of(escalate: EscalateConfig, bound: ChosenBound | None) -> float:
    """Returns the bound in force: the calibrated one where the config gives none."""
    if escalate.below is not None:
        return escalate.below
    assert bound is not None, "the config has one or the other"
    return bound.threshold


def given_to(model: str, request: ForwardedRequest) -> ForwardedRequest:
    """Returns the request with this model's name in its body, in the model's line."""
    told = request.decision
    decision = None if told is None else graded(told, SMALL, model)
    return msgspec.structs.replace(with_model(request, model), decision=decision, pool=model)
