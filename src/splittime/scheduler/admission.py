"""Whether there is room for one more, decided in microseconds from numbers this process already has.

"Queued" is every generation that was admitted here and that no step computes yet: being tokenised, on its way to the
engine, or waiting there. A generation leaves the queue when its first `prefill` mark (or its end) is seen. Its tokens
are estimated from the prompt's own bytes until they are known, and never as more than the context holds; those of a
long text count when they are known, so that what is refused in the end fills nobody's queue meanwhile.

The bounds are shared by key. When the queue is full, a key that has less of it than its share by weight, among the keys
that have some, is let in all the same: what one key has queued turns nobody else away. So the queue may hold more than
its bounds by what the later keys' shares are. Of others' requests those are before a newcomer that would be served
before it by weight (`scheduler.prompt_pass`): of each key as many as of its own.

The wait is predicted by a model of the running engine (`WaitPredictor`; in a server `simulate.wait`). Where that cannot
tell, it is predicted from departures. While the queue is not empty, the time from one departure to the next is how long
one place takes to come free. Over the last departures that gives seconds per request and seconds per prompt token;
the wait of a newcomer is what stands before it times either, and the larger holds: per request when slots are scarce,
per token when prefill is. With nothing measured yet it is unknown, and unknown refuses nobody. Each prediction says
which of the two it is.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

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


class WaitPredictor(Protocol):
    def wait_s(
        self, requests: int, tokens: int, own_tokens: int, key: str | None = None, weight: float = 1.0
    ) -> tuple[float, float] | None:
        """Returns how long one of so many prompt tokens waits behind so many requests of so many prompt tokens in all,
        and how long until its first token; None if it cannot tell. key: that asks, of this weight, if it is known."""
        ...


class ExpectedWait(NamedTuple):
    """wait_s: from now until a newcomer is computed. ttft_s: from now until its first token. estimate: what says so."""

    wait_s: float
    ttft_s: float
    estimate: Literal["model", "departures"]


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


class KeyQueue:
    """What one key has in the queue."""

    __slots__ = ("name", "requests", "tokens", "weight")

    def __init__(self, name: str = "", weight: float = 1.0) -> None:
        self.name, self.weight = name, weight
        self.requests = self.tokens = 0


class Place:
    """The queue places of one HTTP request of a key: `left` generations of `tokens_each` prompt tokens. as_one: they
    are one request together, until the last has left."""

    __slots__ = ("_admission", "_as_one", "key", "left", "tokens_each")

    def __init__(self, admission: "Admission", key: KeyQueue, count: int, tokens: int, *, as_one: bool) -> None:
        self._admission, self.key, self._as_one = admission, key, as_one
        self.left = count
        self.tokens_each = [tokens // count] * count

    @property
    def requests(self) -> int:
        return min(self.left, 1) if self._as_one else self.left

    def _take(self) -> tuple[int, int]:
        """Returns the requests and tokens that one generation takes with it."""
        before, self.left = self.requests, self.left - 1
        return before - self.requests, self.tokens_each.pop()

    def correct(self, tokens_each: list[int]) -> None:
        """The prompts' true lengths are known: put them in the estimate's place."""
        self._admission.count(self.key, 0, sum(tokens_each) - sum(self.tokens_each))
        self.tokens_each = tokens_each

    def require_room(self, tokens: int) -> None:
        """Raise `Refused` if the others in the queue leave none for so many prompt tokens."""
        self._admission.require_room_for_tokens(tokens, sum(self.tokens_each), self.key)

    def leave(self, now_ns: int) -> None:
        """One generation left the queue."""
        if self.left:
            self._admission.depart(self.key, *self._take(), now_ns)

    def drop_one(self) -> None:
        """One generation ended without being computed; that says nothing about the service rate."""
        if self.left:
            requests, tokens = self._take()
            self._admission.count(self.key, -requests, -tokens)

    def give_up(self) -> None:
        """All that are left ended without being computed."""
        while self.left:
            self.drop_one()


class Admission:
    """predictor: asked first; None: waits are predicted from departures alone."""

    def __init__(
        self,
        bounds: QueueLimits,
        on_refusal: Callable[[str], None] = lambda reason: None,
        predictor: WaitPredictor | None = None,
    ) -> None:
        self.bounds = bounds
        self.queued_requests = 0
        self.queued_prompt_tokens = 0
        self._keys: dict[str, KeyQueue] = {}  # of those that have some in the queue
        self.refusals: Counter[str] = Counter()
        self.rate = ServiceRate()
        self._on_refusal, self._predictor = on_refusal, predictor
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

    def count(self, key: KeyQueue, requests: int, tokens: int) -> None:
        """Have so much more of a key in the queue, or less."""
        key.requests += requests
        key.tokens += tokens
        self.queued_requests += requests
        self.queued_prompt_tokens += tokens
        if key.requests:
            self._keys[key.name] = key
        else:
            self._keys.pop(key.name, None)

    def key(self, name: str, weight: float) -> KeyQueue:
        """Returns what a key has in the queue."""
        key = self._keys.get(name) or KeyQueue(name)
        key.weight = weight
        return key

    def _part_of(self, key: KeyQueue) -> float:
        """Returns the share of the bounds that a key has, among those that have some in the queue."""
        return key.weight / sum(each.weight for each in (self._keys | {key.name: key}).values())

    def _before(self, key: KeyQueue, tokens: int) -> tuple[int, int]:
        """Returns how many requests, of how many tokens, are served before a newcomer of a key: all of its own, and of
        each other key as many, by weight."""
        others = [each for each in self._keys.values() if each.name != key.name]
        requests = sum(min(each.requests, math.ceil((key.requests + 1) * each.weight / key.weight)) for each in others)
        own = key.tokens + tokens
        return key.requests + requests, key.tokens + sum(
            min(each.tokens, math.ceil(own * each.weight / key.weight)) for each in others
        )

    def expected_wait(self, tokens: int = 1, key: KeyQueue | None = None) -> ExpectedWait | None:
        """Returns the wait of a newcomer with this many prompt tokens, of this key, or behind all; None if nothing is
        known yet."""
        if key is None:
            return self._expected(self.queued_requests, self.queued_prompt_tokens, tokens)
        return self._expected(*self._before(key, tokens), tokens, key.name, key.weight)

    def _expected(
        self, requests: int, queued_tokens: int, tokens: int, key: str | None = None, weight: float = 1.0
    ) -> ExpectedWait | None:
        """Departures do not say how long the newcomer's own prompt takes: by them `ttft_s` is `wait_s`."""
        predictor, asked = self._predictor, (requests, queued_tokens, tokens, key, weight)
        said = predictor.wait_s(*asked) if predictor is not None else None
        if said is not None:
            return ExpectedWait(*said, "model")
        wait_s = self.rate.wait_s(requests, queued_tokens)
        return None if wait_s is None else ExpectedWait(wait_s, wait_s, "departures")

    def check(
        self,
        now_ns: int,
        *,
        count: int = 1,
        others: int = 0,
        tokens: int = 0,
        deadline_ns: int | None = None,
        first_token_by_ns: int | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> None:
        """Raise `Refused` if `count` generations of `tokens` prompt tokens in all have no room, or no time.
        others: requests of other keys that come before and are not queued yet."""
        limit, key = self.bounds.max_queued_requests, self.key(tenant, weight)
        if self.queued_requests + others + count > limit and key.requests + count > limit * self._part_of(key):
            self._refuse("queued_requests", limit)
        self.require_room_for_tokens(tokens, 0, key)
        if deadline_ns is not None or first_token_by_ns is not None:
            expected = self.expected_wait(tokens // count, key)
            self._require_time(now_ns, expected, deadline_ns, first_token_by_ns)

    def require_room_for_tokens(self, tokens: int, own_tokens: int, key: KeyQueue) -> None:
        """own_tokens: those of the queued that are its own. In a queue of no others any prompt may stand."""
        others, limit = self.queued_prompt_tokens - own_tokens, self.bounds.max_queued_prompt_tokens
        if others and others + tokens > limit and key.tokens - own_tokens + tokens > limit * self._part_of(key):
            self._refuse("queued_prompt_tokens", limit)

    def require_first_token(self, now_ns: int, tokens: int, own: Place, first_token_by_ns: int) -> None:
        """Raise `Refused` if one in the queue, now known to be of so many tokens, has no time behind the others."""
        self.count(own.key, -own.requests, -sum(own.tokens_each))
        expected = self.expected_wait(tokens, own.key)
        self.count(own.key, own.requests, sum(own.tokens_each))
        self._require_time(now_ns, expected, None, first_token_by_ns)

    def _require_time(
        self, now_ns: int, expected: ExpectedWait | None, deadline_ns: int | None, first_token_by_ns: int | None
    ) -> None:
        if expected is None:
            return
        if deadline_ns is not None and now_ns + expected.wait_s * 1e9 > deadline_ns:
            raise self.refuse(_late("deadline", self.queued_requests, expected, expected.wait_s, deadline_ns - now_ns))
        if first_token_by_ns is not None and now_ns + expected.ttft_s * 1e9 > first_token_by_ns:
            left_ns = first_token_by_ns - now_ns
            raise self.refuse(_late("slo_ttft", self.queued_requests, expected, expected.ttft_s, left_ns))

    def enter(
        self,
        now_ns: int,
        *,
        count: int,
        tokens: int,
        deadline_ns: int | None,
        first_token_by_ns: int | None = None,
        tenant: str = "",
        weight: float = 1.0,
        as_one: bool = False,
    ) -> Place:
        """Take places in the queue, or raise: `Refused` for now, `RequestError` if it could never fit. as_one: so many
        generations are queued as one request."""
        places, limit = 1 if as_one else count, self.bounds.max_queued_requests
        if places > limit:
            raise RequestError(f"{count} choices are more than the queue holds", param="n", value=count, limit=limit)
        by_ns = {"deadline_ns": deadline_ns, "first_token_by_ns": first_token_by_ns}
        self.check(now_ns, count=places, others=0, tokens=tokens, tenant=tenant, weight=weight, **by_ns)
        if self.queued_requests == 0:
            self._busy_since_ns = now_ns
        key = self.key(tenant, weight)
        self.count(key, places, tokens // count * count)
        return Place(self, key, count, tokens, as_one=as_one)

    def depart(self, key: KeyQueue, requests: int, tokens: int, now_ns: int) -> None:
        self.count(key, -requests, -tokens)
        self.rate.add(max(0, now_ns - self._busy_since_ns), tokens)
        self._busy_since_ns = max(now_ns, self._busy_since_ns)

    def refuse(self, refused: Refused) -> Refused:
        """Count a refusal, whoever decided it."""
        self.refusals[refused.reason] += 1
        self._on_refusal(refused.reason)
        return refused

    def _refuse(self, reason: str, limit: int) -> None:
        """For want of room, which there is when the next one leaves the queue."""
        expected, next_one = self.expected_wait(), self._expected(0, 0, 1)
        said_s = next_one.wait_s if next_one is not None and next_one.estimate == "model" else None
        retry_after_s = (self.rate.seconds_per_request or 1.0) if said_s is None else said_s
        raise self.refuse(
            Refused(
                _MESSAGES[reason],
                reason=reason,
                queued=self.queued_requests if reason == "queued_requests" else self.queued_prompt_tokens,
                limit=limit,
                predicted_wait_s=None if expected is None else expected.wait_s,
                wait_estimate=None if expected is None else expected.estimate,
                retry_after_s=_rounded(retry_after_s),
            )
        )


def _late(reason: str, queued: int, expected: ExpectedWait, takes_s: float, left_ns: int) -> Refused:
    """Returns the refusal of a request that takes longer than what is left of its time. When the queue has become
    shorter by as much as is missing, another would make it."""
    takes_ms, left_ms = takes_s * 1e3, max(left_ns, 0) / 1e6
    words = f"{_MESSAGES[reason]}: {takes_ms:.0f} ms predicted ({expected.estimate}), {left_ms:.0f} ms allowed"
    missing_s = max(takes_s - max(left_ns, 0) * 1e-9, 0.001)
    is_hopeless = (takes_s - expected.wait_s) * 1e3 > left_ms  # in an empty queue, all the same
    return Refused(
        words,
        reason=reason,
        queued=queued,
        limit=round(left_ms),
        predicted_wait_s=expected.wait_s,
        predicted_ttft_s=expected.ttft_s,
        wait_estimate=expected.estimate,
        retry_after_s=None if is_hopeless else _rounded(missing_s),
        hint=_HOPELESS if is_hopeless else None,
    )


def _rounded(retry_after_s: float) -> float:
    return math.ceil(max(0.001, retry_after_s) * 1000) / 1000


_HOPELESS = "Even without a queue this prompt takes longer: allow more time, or send a shorter one."
_MESSAGES = {
    "queued_requests": "as many requests wait as max_queued_requests allows",
    "queued_prompt_tokens": "as many prompt tokens wait as max_queued_prompt_tokens allows",
    "deadline": "the predicted wait is longer than the request's deadline",
    "slo_ttft": "the first token would come later than x-llm-d-slo-ttft-ms allows",
}
