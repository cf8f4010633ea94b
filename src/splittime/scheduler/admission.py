"""Whether there is room for one more, decided in microseconds from numbers this process already has.

"Queued" is every generation that was admitted here and that no step computes yet: being tokenised, on its way to the
engine, or waiting there. A generation leaves the queue when its first `prefill` mark (or its end) is seen. Its tokens
are estimated from the prompt's own bytes until they are known, and never as more than the context holds; those of a
long text count when they are known, so that what is refused in the end fills nobody's queue meanwhile.

The predicted wait is a simple model. While the queue is not empty, the time from one departure to the next is how long
one place takes to come free. Over the last departures that gives seconds per request and seconds per prompt token;
the wait of a newcomer is what stands before it times either, and the larger holds: per request when slots are scarce,
per token when prefill is. With nothing measured yet it is unknown, and unknown refuses nobody.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from splittime.core.errors import Refused, RequestError

WINDOW_DEPARTURES = 128
MAX_BOUND = 2**40  # the largest value that a bound may be set to while serving
INITIAL_BYTES_PER_TOKEN = 4.0
PLAUSIBLE_BYTES_PER_TOKEN = (1.0, 8.0)  # whatever the texts: the estimate of others' must stay one
_RATIO_WEIGHT = 0.05


@dataclass(slots=True)
class QueueLimits:
    """The bounds that may be changed while serving."""

    max_queued_requests: int
    max_queued_prompt_tokens: int


class ServiceRate:
    """How fast places come free: (time since the last one, prompt tokens) of the latest departures."""

    def __init__(self) -> None:
        self._departures: deque[tuple[int, int]] = deque()
        self._sum_ns = self._sum_tokens = 0

    def add(self, delta_ns: int, tokens: int) -> None:
        self._departures.append((delta_ns, tokens))
        self._sum_ns += delta_ns
        self._sum_tokens += tokens
        if len(self._departures) > WINDOW_DEPARTURES:
            old_ns, old_tokens = self._departures.popleft()
            self._sum_ns -= old_ns
            self._sum_tokens -= old_tokens

    @property
    def seconds_per_request(self) -> float | None:
        return self._sum_ns * 1e-9 / len(self._departures) if self._departures else None

    def wait_s(self, requests: int, tokens: int) -> float | None:
        """Time until so much has left, or None if nothing was measured."""
        if not self._departures:
            return None
        by_request = requests * self._sum_ns / len(self._departures)
        by_token = tokens * self._sum_ns / self._sum_tokens if self._sum_tokens else 0.0
        return max(by_request, by_token) * 1e-9


class Place:
    """The queue places of one HTTP request: `left` generations of `tokens_each` prompt tokens."""

    __slots__ = ("_admission", "left", "tokens_each")

    def __init__(self, admission: "Admission", count: int, tokens: int) -> None:
        self._admission = admission
        self.left = count
        self.tokens_each = [tokens // count] * count

    def correct(self, tokens_each: list[int]) -> None:
        """The prompts' true lengths are known: put them in the estimate's place."""
        self._admission.queued_prompt_tokens += sum(tokens_each) - sum(self.tokens_each)
        self.tokens_each = tokens_each

    def require_room(self, tokens: int) -> None:
        """Raise `Refused` if the others in the queue leave none for so many prompt tokens."""
        self._admission.require_room_for_tokens(tokens, sum(self.tokens_each))

    def leave(self, now_ns: int) -> None:
        """One generation left the queue."""
        if self.left:
            self.left -= 1
            self._admission.depart(self.tokens_each.pop(), now_ns)

    def drop_one(self) -> None:
        """One generation ended without being computed; that says nothing about the service rate."""
        if self.left:
            self.left -= 1
            self._admission.queued_requests -= 1
            self._admission.queued_prompt_tokens -= self.tokens_each.pop()

    def give_up(self) -> None:
        """All that are left ended without being computed."""
        while self.left:
            self.drop_one()


class Admission:
    def __init__(self, bounds: QueueLimits, on_refusal: Callable[[str], None] = lambda reason: None) -> None:
        self.bounds = bounds
        self.queued_requests = 0
        self.queued_prompt_tokens = 0
        self.refusals: Counter[str] = Counter()
        self.rate = ServiceRate()
        self._on_refusal = on_refusal
        self._bytes_per_token = INITIAL_BYTES_PER_TOKEN
        self._busy_since_ns = 0

    def estimate_tokens(self, num_bytes: int) -> int:
        return math.ceil(num_bytes / self._bytes_per_token)

    def learn_ratio(self, num_bytes: int, tokens: int) -> None:
        """Prompts of so many bytes of text were so many tokens."""
        if tokens:
            least, most = PLAUSIBLE_BYTES_PER_TOKEN
            seen = min(max(num_bytes / tokens, least), most)
            self._bytes_per_token += _RATIO_WEIGHT * (seen - self._bytes_per_token)

    def predicted_wait_s(self) -> float | None:
        return self.rate.wait_s(self.queued_requests, self.queued_prompt_tokens)

    def check(self, now_ns: int, *, count: int = 1, tokens: int = 0, deadline_ns: int | None = None) -> None:
        """Raise `Refused` if `count` generations of `tokens` prompt tokens in all have no room, or no time."""
        bounds, wait_s = self.bounds, self.predicted_wait_s()
        if self.queued_requests + count > bounds.max_queued_requests:
            self._refuse("queued_requests", self.queued_requests, bounds.max_queued_requests, wait_s)
        self.require_room_for_tokens(tokens)
        if deadline_ns is not None and wait_s is not None and now_ns + wait_s * 1e9 > deadline_ns:
            self._refuse("deadline", self.queued_requests, None, wait_s)

    def require_room_for_tokens(self, tokens: int, own_tokens: int = 0) -> None:
        """own_tokens: those of the queued that are its own. In a queue of no others any prompt may stand."""
        others, limit = self.queued_prompt_tokens - own_tokens, self.bounds.max_queued_prompt_tokens
        if others and others + tokens > limit:
            self._refuse("queued_prompt_tokens", self.queued_prompt_tokens, limit, self.predicted_wait_s())

    def enter(self, now_ns: int, *, count: int, tokens: int, deadline_ns: int | None) -> Place:
        """Take places in the queue, or raise: `Refused` for now, `RequestError` if it could never fit."""
        if count > self.bounds.max_queued_requests:
            limit = self.bounds.max_queued_requests
            raise RequestError(f"{count} choices are more than the queue holds", param="n", value=count, limit=limit)
        self.check(now_ns, count=count, tokens=tokens, deadline_ns=deadline_ns)
        if self.queued_requests == 0:
            self._busy_since_ns = now_ns
        self.queued_requests += count
        self.queued_prompt_tokens += tokens // count * count
        return Place(self, count, tokens)

    def depart(self, tokens: int, now_ns: int) -> None:
        self.queued_requests -= 1
        self.queued_prompt_tokens -= tokens
        self.rate.add(max(0, now_ns - self._busy_since_ns), tokens)
        self._busy_since_ns = max(now_ns, self._busy_since_ns)

    def refuse(self, refused: Refused) -> Refused:
        """Count a refusal, whoever decided it."""
        self.refusals[refused.reason] += 1
        self._on_refusal(refused.reason)
        return refused

    def _refuse(self, reason: str, queued: int, limit: int | None, wait_s: float | None) -> None:
        one_place_s = self.rate.seconds_per_request or 1.0
        raise self.refuse(
            Refused(
                _MESSAGES[reason],
                reason=reason,
                queued=queued,
                limit=limit,
                predicted_wait_s=wait_s,
                retry_after_s=round(max(0.001, (wait_s or 1.0) if reason == "deadline" else one_place_s), 3),
            )
        )


_MESSAGES = {
    "queued_requests": "as many requests wait as max_queued_requests allows",
    "queued_prompt_tokens": "as many prompt tokens wait as max_queued_prompt_tokens allows",
    "deadline": "the predicted wait is longer than the request's deadline",
}
