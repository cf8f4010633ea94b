"""Small or large: what a request's text decides, where its model is the name of a `[[difficulty]]`.

The text is read and scored by a thread: a long one takes milliseconds. A request without a text goes to the large
model. Where the config names no labels, every request goes to the small one, whose first tokens decide (`escalation`).

A route's escalations while its config serves: its bound, and how many of its latest answers were asked anew.

Without a limit a bound that suits other traffic than today's would send everything to both models, which costs more
than the large one alone, and the large one is chosen for fewer.
"""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from splittime.gateway.config import DifficultyConfig, EscalateConfig
from splittime.gateway.forwarded import ForwardedRequest, with_model
from splittime.gateway.routing.judge import ChosenThreshold, DifficultyJudge
from splittime.gateway.routing.labels import text_of_request
from splittime.gateway.routing.policy import graded
from splittime.ledger.attempts import DifficultyDecision

SMALL, LARGE = "small", "large"
LATEST = 100  # answers
FIRST = 10  # answers, of which a share is allowed before there were as many
OVER_SHARE, NO_TIME, NO_PLACE = "share", "deadline", "no_place"  # why an unsure answer is kept


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
    """What the requests of one config share. judges: by model, of the routes with labels. bounds: likewise, of those
    whose first tokens' bound is found from labels."""

    def __init__(
        self,
        routes: Sequence[DifficultyConfig],
        judges: Mapping[str, DifficultyJudge],
        bounds: Mapping[str, ChosenThreshold],
    ) -> None:
        self._routes, self._judges, self._bounds = {route.model: route for route in routes}, judges, bounds
        self._escalations = {
            route.model: Escalations(route.escalate, below_of(route.escalate, bounds.get(route.model)))
            for route in routes
            if route.escalate is not None
        }
        # It ends with its config: threads of an executor that nobody has any more go by themselves.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="difficulty") if routes else None

    def route(self, request: ForwardedRequest) -> DifficultyConfig | None:
        """Returns the route of a request whose model is not decided upon yet."""
        return self._routes.get(request.model)

    def escalations(self, route: DifficultyConfig) -> Escalations | None:
        """Returns the route's escalations; None where first tokens are not looked at."""
        return self._escalations.get(route.model)

    async def decided(self, route: DifficultyConfig, request: ForwardedRequest) -> ForwardedRequest:
        """Returns the request with the small or the large model, and with the decision."""
        work = partial(decide, self._judges.get(route.model), request.path, request.body)
        difficulty = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return given_to(route.small if difficulty.choice == SMALL else route.large, request, difficulty)

    def stats(self) -> dict[str, Any]:
        """Returns what each route with labels expects, and what came of its first tokens, by its model."""
        found: dict[str, Any] = {model: msgspec.to_builtins(judge.chosen) for model, judge in self._judges.items()}
        for model, escalations in self._escalations.items():
            expected = {"expected": msgspec.to_builtins(self._bounds[model])} if model in self._bounds else {}
            found.setdefault(model, {})["first_tokens"] = {**escalations.stats(), **expected}
        return found


def below_of(escalate: EscalateConfig, bound: ChosenThreshold | None) -> float:
    """Returns the bound in force: the calibrated one where the config gives none."""
    if escalate.below is not None:
        return escalate.below
    assert bound is not None, "the config has one or the other"
    return bound.threshold


def decide(judge: DifficultyJudge | None, path: str, body: bytes) -> DifficultyDecision:
    """Returns the decision on a request: the same for the same labels, config and body."""
    if judge is None:
        return DifficultyDecision(choice=SMALL)
    try:
        text = text_of_request(path, msgspec.json.decode(body, type=dict[str, Any]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # of a field that nobody had to read before
        text = ""
    return of_score(judge, judge.score(text))


def of_score(judge: DifficultyJudge, score: float | None) -> DifficultyDecision:
    """Returns what a score decides, of a text that need not be there any more."""
    threshold = judge.chosen.threshold
    return DifficultyDecision(
        choice=SMALL if score is not None and score >= threshold else LARGE,
        labels=judge.labels,
        neighbours=judge.neighbours,
        score=score,
        threshold=threshold,
    )


def given_to(model: str, request: ForwardedRequest, difficulty: DifficultyDecision) -> ForwardedRequest:
    """Returns the request with this model's name in its body, in the model's line."""
    told = request.decision
    decision = None if told is None else graded(told, difficulty, model)
    return msgspec.structs.replace(with_model(request, model), decision=decision, pool=model)
