"""How much a key may use: open requests, and what a minute allows.

What a key asks for in one body counts as what it is: each answer (prompts x n), each text to embed or to rank, is one
of its open requests and one of a minute's. A body with more of them than a limit can ever allow is refused with 400.

What a minute allows is a bucket that fills evenly and holds a minute's worth. Tokens are reserved before they are used
and settled when they are known (`QuotaUse`): prompts by their length, answers by the longest of the key's latest ones,
or by `max_tokens` where that is less. An answer that becomes longer is charged at its end. So the bucket of tokens may
fall below nothing, and lets nobody in until it has filled up again.
"""

from splittime.core.errors import Refused, RequestError
from splittime.web.tenants import Tenant

MINUTE_NS = 60_000_000_000
RESERVED_S = 60.0  # of a wait that is told, at the most, where what open requests have reserved may come back
ASSUMED_OUTPUT_TOKENS = 1024  # of an answer, where none of the key has ended yet
OUTPUT_DECAY = 0.9  # of the longest answer, with each that is shorter


class Bucket:
    """per_minute: None for no limit."""

    def __init__(self, per_minute: int | None) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute or 0)
        self._filled_ns = 0

    def change(self, per_minute: int | None) -> None:
        """Go on with another limit: what was used of the last minute stays used."""
        more = (per_minute or 0) - (self.per_minute or 0)
        self.per_minute, self.level = per_minute, min(float(per_minute or 0), self.level + more)

    def take(self, amount: int, now_ns: int) -> None:
        """amount: below nothing, to put back what was taken and not used."""
        if self.per_minute is not None:
            self._fill(now_ns)
            self.level = min(float(self.per_minute), self.level - amount)

    def take_elsewhere(self, amount: int, now_ns: int) -> None:
        """Takes what others took of the same limit, but no more than to a minute below nothing: what they used long
        ago, and what is told only now, is not to be waited for. amount: below nothing, for what they put back."""
        if self.per_minute is not None:
            self._fill(now_ns)
            most = float(self.per_minute)
            self.level = min(most, max(self.level - amount, min(self.level, -most)))

    def wait_s(self, wanted: int, now_ns: int) -> float:
        """Until it holds so much; 0.0 if it does."""
        if self.per_minute is None:
            return 0.0
        self._fill(now_ns)
        return max(0.0, (wanted - self.level) * 60 / self.per_minute)

    def _fill(self, now_ns: int) -> None:
        assert self.per_minute is not None
        if self._filled_ns:
            gained = max(0, now_ns - self._filled_ns) * self.per_minute / MINUTE_NS
            self.level = min(float(self.per_minute), self.level + gained)
        self._filled_ns = now_ns


class Quota:
    """What one tenant uses now, and what its limits leave.

    expected_output_tokens: how long an answer is taken to become before it is known: as the longest of the latest."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.num_open = 0
        self.used_requests = self.used_tokens = 0  # since the start
        self.reserved_tokens = 0  # taken, and not settled
        self.expected_output_tokens = float(ASSUMED_OUTPUT_TOKENS)
        self._requests, self._tokens = Bucket(tenant.requests_per_minute), Bucket(tenant.tokens_per_minute)

    def change(self, tenant: Tenant) -> None:
        """Go on with other limits: what is open, reserved and used stays so."""
        self.tenant = tenant
        self._requests.change(tenant.requests_per_minute)
        self._tokens.change(tenant.tokens_per_minute)

    def check(self, now_ns: int) -> None:
        """Raises `Refused` if one more may not come in now. Takes nothing."""
        if self.tenant.is_limited:
            self.check_requests(1, 1, now_ns)
            self.check_tokens(1, now_ns)

    def enter(self, now_ns: int, requests: int = 1) -> "QuotaUse":
        """Lets so many in that were checked."""
        self._requests.take(requests, now_ns)
        self.used_requests += requests
        self.num_open += requests
        return QuotaUse(self, requests)

    def use_tokens(self, count: int, now_ns: int, reserved: int = 0) -> None:
        """Takes what was used. reserved: what may be used, taken too; below nothing, to give it back."""
        self._tokens.take(count + reserved, now_ns)
        self.reserved_tokens += reserved
        self.used_tokens += count

    def expect(self, max_tokens: int) -> int:
        """Returns how long an answer of so many tokens at the most is taken to become."""
        return min(max_tokens, round(self.expected_output_tokens))

    def learn_output(self, tokens: int) -> None:
        """Learns how long an answer has become."""
        self.expected_output_tokens = max(float(tokens), 1.0, OUTPUT_DECAY * self.expected_output_tokens)

    def use_elsewhere(self, requests: int, tokens: int, now_ns: int) -> None:
        """Takes what the same tenant has used at other servers."""
        self._requests.take_elsewhere(requests, now_ns)
        self._tokens.take_elsewhere(tokens, now_ns)

    def check_requests(self, more: int, together: int, now_ns: int) -> None:
        open_limit, minutes_limit = self.tenant.max_open_requests, self.tenant.requests_per_minute
        for name, limit in (("max_open_requests", open_limit), ("requests_per_minute", minutes_limit)):
            if limit is not None and together > limit:
                raise self._too_many(name, limit, together)
        if open_limit is not None and self.num_open + more > open_limit:
            raise self._refused("max_open_requests", open_limit, 1.0)
        wait_s = self._requests.wait_s(more, now_ns)
        if wait_s:
            raise self._refused("requests_per_minute", minutes_limit, wait_s)

    def check_tokens(self, count: int, now_ns: int) -> None:
        limit = self.tenant.tokens_per_minute
        count = min(count, limit or 0)
        wait_s = self._tokens.wait_s(count, now_ns)
        if wait_s and self.reserved_tokens:
            wait_s = min(wait_s, max(RESERVED_S, self._tokens.wait_s(count - self.reserved_tokens, now_ns)))
        if wait_s:
            raise self._refused("tokens_per_minute", limit, wait_s)

    def _too_many(self, name: str, limit: int, count: int) -> RequestError:
        words = (
            f"the body asks for {count} answers (prompts x n), and {name} of the key {self.tenant.name!r} is {limit}"
        )
        hint = f"ask for at most {limit} in one body, or have the operator raise {name}"
        return RequestError(words, code="too_many_choices", param="n", value=count, limit=limit, hint=hint)

    def _refused(self, reason: str, limit: int | None, wait_s: float) -> Refused:
        return Refused(
            f"the key {self.tenant.name!r} has used what its {reason} allows",
            reason=reason,
            queued=self.num_open,
            limit=limit,
            retry_after_s=round(max(0.001, wait_s), 3),
        )


class QuotaUse:
    """What one body has of its key's limits, from when it comes in until it leaves. requests: it counts as so many.
    reserved: tokens that were taken for it and are not settled."""

    def __init__(self, quota: Quota, requests: int) -> None:
        self.quota, self.requests, self.reserved = quota, requests, 0

    def count_as(self, requests: int, now_ns: int) -> None:
        """Have it count as so many requests. Raises what `Quota.check` does, with nothing taken."""
        if requests > self.requests:
            more = requests - self.requests
            self.quota.check_requests(more, requests, now_ns)
            self.quota.enter(now_ns, more)
            self.requests = requests

    def reserve(self, tokens: int, now_ns: int, needed: int | None = None) -> None:
        """Take tokens that will be used; `settle` corrects it. Raises `Refused` if there are too few now; one that
        needs more than a minute's worth has to wait until nobody has used any. needed: so many must be left; default:
        all of them."""
        self.quota.check_tokens(tokens if needed is None else needed, now_ns)
        self.quota.use_tokens(0, now_ns, tokens)
        self.reserved += tokens

    def settle(self, used_tokens: int, now_ns: int) -> None:
        """Charge what was used in place of what was reserved."""
        self.quota.use_tokens(used_tokens, now_ns, -self.reserved)
        self.reserved = 0

    def leave(self, used_tokens: int, now_ns: int) -> None:
        """Give back what it has; it used so many tokens that were not settled before."""
        self.settle(used_tokens, now_ns)
        self.quota.num_open -= self.requests
        self.requests = 0
