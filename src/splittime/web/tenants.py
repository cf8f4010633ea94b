"""Who asks: the holder of a key, what it may ask for, and how much it may use.

Keys come from `--api-key` (the first is the operator's, `key-1`; each further one an ordinary tenant's, `key-2`, ...)
and from `--api-keys-file`, a TOML file with a table for each:

    [[key]]
    name = "search"                  # in the accounts; letters, digits and . _ : -
    sha256 = "2bb80d53..."           # of the key, in hexadecimal; or: key = "the key itself"
    operator = false                 # default
    salt = "staff"                   # keys of one salt share cached prefixes; default: nobody shares this key's
    weight = 2.0                     # its share of a server beside the others' weights; default: 1
    max_open_requests = 8            # at once, each answer counted; these three default to no limit of its own
    requests_per_minute = 120        # each answer counted
    tokens_per_minute = 60000        # prompt and output tokens

An ordinary key may ask for `TENANT_PATHS`: to generate, to count tokens, and for the accounts of its own requests. All
else tells of everybody's requests, or is everybody's loss, so it is the operator's. A tenant's part of the prefix cache
is its own, since `cached_tokens` would tell what others had sent. The queue is shared: a wait tells that others exist.

All requests of a gateway come with its one key, and a header says whose each is: `x-splittime-tenant: search;weight=2`.
What the server shares (slots, blocks, the time of steps, lanes of texts, its queue) goes to `KEY/TENANT`, by the key's
weight times the tenant's, and accounts say that name. All else stays the key's. The header is believed of an operator's
key, or where no key is asked for; there all weights count alike, with a notice. From another key it is left alone, as
it could take as many shares as it writes names. `core.shares` bounds the names.

Each answer (prompts x n), each text to embed or to rank, is one of a key's open requests and one of a minute's. A body
with more of them than a limit can ever allow is refused with 400. What a minute allows is a bucket that fills evenly.
Tokens are reserved before they are used and settled when they are known (`QuotaUse`): prompts by their length, answers
by the longest of the key's latest ones, or by `max_tokens` where that is less. A longer answer is charged at its end,
so the bucket may fall below nothing, and lets nobody in until it has filled up again.
"""

import hmac
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from splittime.core.errors import ConfigError, Refused, RequestError
from splittime.core.files import read_small
from splittime.web import http
from splittime.web.http import Scope

TENANT = "splittime.tenant"  # key in an ASGI scope: who asks
TENANT_PATHS = frozenset(
    {
        *("/", "/cache/purge", "/cache/wrong", "/docs", "/favicon.ico", "/is_sleeping", "/ledger/hops"),
        *("/ledger/requests", "/openapi.json", "/tokenize", "/detokenize", "/tokenizer_info"),
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/messages/count_tokens"),
        *("/v1/models", "/v1/prefill", "/v1/rerank", "/v1/responses", "/v1/score", "/version"),
    }
)
TENANT_FOLDERS = ("/api/", "/v1/models/", "/v1/responses/", "/ledger/requests/", "/ledger/hops/")
TOLD_TENANT = "x-splittime-tenant"
GATEWAY = "splittime-gateway/"  # begins the user agent of one
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1e6
NOT_BELIEVED = f"{TOLD_TENANT} is believed of an operator's key alone"
ALL_ALIKE = (
    f"the weight of {TOLD_TENANT} is believed only of an operator's key: where no key is asked for, all count alike"
)
HOW = f"{TOLD_TENANT}: NAME;weight=2, with 64 letters, digits and . _ : - at the most, and a weight of 0.001 to 1000000"
_TOLD = re.compile(r"([A-Za-z0-9._:-]{1,64})(?:;weight=([0-9]{1,7}(?:\.[0-9]{1,6})?))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """name: in accounts. salt: no two prompts under different ones share a block of cache. weight: its share of what
    several wait for, beside the others' weights."""

    name: str
    salt: str = ""
    is_operator: bool = False
    weight: float = 1.0
    max_open_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def may_ask_for(self, path: str) -> bool:
        return self.is_operator or path in TENANT_PATHS or path.startswith(TENANT_FOLDERS)

    def cache_salt(self, asked: str) -> str:
        """The tenant's salt with the request's: no request can name another tenant's, as no tenant's salt has a NUL."""
        return f"{self.salt}\0{asked}" if self.salt else asked

    @property
    def is_limited(self) -> bool:
        return not (self.max_open_requests is self.requests_per_minute is self.tokens_per_minute is None)

    @property
    def sees(self) -> str | None:
        """Returns whose accounts it may read; None: everybody's."""
        return None if self.is_operator else self.name


ANYBODY = Tenant(name="", is_operator=True)  # where no key is asked for


def tenant_of(scope: Scope) -> Tenant:
    return scope.get(TENANT, ANYBODY)  # type: ignore[no-any-return]


def forbidden(tenant: Tenant, path: str) -> RequestError:
    message = f"the key {tenant.name!r} may not ask for {path[:64]}"
    hint = "ask with an operator's key: the first --api-key, or one with operator = true in --api-keys-file"
    return RequestError(message, code="operator_only", status=403, value=path[:64], hint=hint)


class ApiKeys:
    """Which key is whose. Compares digests, all of them, so that the time it takes says nothing about a key.

    Raises `ConfigError` for two keys of one name, or one key for two tenants.
    """

    def __init__(
        self,
        api_key: Sequence[str] = (),
        api_keys_file: str | None = None,
        metrics_api_key: str | None = None,
        holders: Sequence[tuple[bytes, Tenant]] = (),
        metrics_digest: bytes | None = None,
    ) -> None:
        """holders, metrics_digest: digests of keys, and whose they are, from elsewhere (the gateway's config)."""
        self._holders: list[tuple[bytes, Tenant]] = []
        for known, tenant in holders:
            self._add(known, tenant, "tenant")
        for number, key in enumerate(api_key, 1):
            known = _digest(key)
            tenant = Tenant(name=f"key-{number}", salt=_own_salt(known), is_operator=number == 1)
            self._add(known, tenant, "api_key")
        if api_keys_file is not None:
            for known, tenant in _read_keys_file(api_keys_file):
                self._add(known, tenant, "api_keys_file")
        self._metrics_digest = _digest(metrics_api_key) if metrics_api_key is not None else metrics_digest

    @property
    def tenants(self) -> list[Tenant]:
        return [tenant for _, tenant in self._holders]

    def holder(self, scope: Scope, given: bytes) -> Tenant | None:
        """Returns the tenant whose key was given, or None. Takes as long whichever it is."""
        if scope["path"] == "/metrics" and self._metrics_digest is not None:
            is_for_metrics = hmac.compare_digest(self._metrics_digest, sha256(given).digest())
            return ANYBODY if is_for_metrics else self._find(given)
        return self._find(given) if self._holders else ANYBODY

    def _find(self, given: bytes) -> Tenant | None:
        found, asked = None, sha256(given).digest()
        for known, tenant in self._holders:
            if hmac.compare_digest(known, asked):
                found = tenant
        return found

    def _add(self, known: bytes, tenant: Tenant, param: str) -> None:
        if any(other.name == tenant.name for other in self.tenants):
            raise ConfigError(f"two keys have the name {tenant.name!r}", param=param, value=tenant.name)
        twin = next((other.name for each, other in self._holders if each == known), None)
        if twin is not None:
            raise ConfigError(f"{twin!r} and {tenant.name!r} have the same key", param=param, value=tenant.name)
        self._holders.append((known, tenant))


Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,64}$")]
Limit = Annotated[int, Meta(ge=1)]
Weight = Annotated[float, Meta(ge=0.001, le=1e6)]


class KeyEntry(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: Name
    key: str | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    operator: bool = False
    salt: Annotated[str, Meta(pattern=r"^[ -~]{1,256}$")] | None = None
    weight: Weight = 1.0
    max_open_requests: Limit | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None

    def known(self) -> bytes:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError(f"{self.name!r} needs key or sha256, one of them")
        if self.key is None:
            return self._known_digest()
        check_key(self.key, f"key of {self.name!r}")
        return _digest(self.key)

    def _known_digest(self) -> bytes:
        known = bytes.fromhex(self.sha256 or "")
        if known == sha256(b"").digest():  # who sends no key would have it
            raise ValueError(f"sha256 of {self.name!r} is that of an empty key")
        return known

    def tenant(self) -> Tenant:
        return Tenant(
            name=self.name,
            salt=_own_salt(self.known()) if self.salt is None else f"salt:{self.salt}",
            is_operator=self.operator,
            weight=self.weight,
            max_open_requests=self.max_open_requests,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
        )


class KeysFile(msgspec.Struct, forbid_unknown_fields=True):
    key: Annotated[list[KeyEntry], Meta(min_length=1)]


def _read_keys_file(path: str) -> list[tuple[bytes, Tenant]]:
    """The digest of each key, and whose it is. Raises `ConfigError`."""
    try:
        read = msgspec.convert(tomllib.loads(read_small(path).decode()), KeysFile)
        return [(entry.known(), entry.tenant()) for entry in read.key]
    except (OSError, ValueError, ConfigError) as error:  # TOML's, msgspec's and UTF-8's errors are ValueErrors
        hint = 'a table for each: [[key]], name = "search", key = "..." or sha256 = "..."'
        message = f"cannot read keys from {path}: {error}"
        raise ConfigError(message, param="api_keys_file", value=path, hint=hint) from error


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


def _own_salt(known: bytes) -> str:
    """Returns a salt by the key and not by its name, which on another server that shares blocks may be another's."""
    return f"key:{known.hex()}"


def check_key(key: str, param: str) -> None:
    """Raise `ConfigError`, without the key, for one that no client could send, or that anybody could guess."""
    if not _KEY.fullmatch(key):
        hint = "use letters, digits and punctuation; several keys: --api-key once for each, or --api-keys-file"
        raise ConfigError(f"{param} is empty, or has a space or a character beyond ASCII", param=param, hint=hint)


_KEY = re.compile(r"[!-~]+")


class Sharer(NamedTuple):
    """One among whom a server shares. name: in accounts too."""

    name: str
    weight: float = 1.0


def told_tenant(tenant: Tenant) -> dict[str, str]:
    """Returns the header that names this tenant of a gateway; none where the gateway asks for no key."""
    weight = f"{tenant.weight:.6f}".rstrip("0").rstrip(".")
    return {TOLD_TENANT: f"{tenant.name};weight={weight}"} if tenant.name else {}


def is_left_alone(scope: http.Scope, tenant: Tenant) -> bool:
    """Returns whether it names a tenant, with a key that is not believed."""
    return not tenant.is_operator and http.header(scope, TOLD_TENANT.encode()) is not None


def sharer_of(scope: http.Scope, tenant: Tenant) -> Sharer:
    """Returns among whom a request counts. Raises `RequestError` for a header that is believed and names nobody."""
    given = http.headers(scope, TOLD_TENANT.encode())
    if not given or is_left_alone(scope, tenant):
        return Sharer(tenant.name, tenant.weight)
    found = _TOLD.fullmatch(given[0]) if len(given) == 1 else None
    weight = float(found[2] or 1) if found else 0.0
    if found is None or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
        words, value = f"{TOLD_TENANT} must be one name, which may have a weight", ", ".join(given)[:64]
        raise RequestError(words, param=TOLD_TENANT, value=value, limit=[LEAST_WEIGHT, MOST_WEIGHT], hint=HOW)
    return Sharer(f"{tenant.name}/{found[1]}", tenant.weight * weight) if tenant.name else Sharer(found[1])


def notices_of_head(scope: http.Scope, tenant: Tenant) -> list[str]:
    """Returns what the client reads beside its answer. A gateway sends the header by itself, and its clients cannot
    mend that."""
    is_gateways = (http.header(scope, b"user-agent") or "").startswith(GATEWAY)
    given = http.header(scope, TOLD_TENANT.encode())
    if given is None or is_gateways or (tenant.is_operator and (tenant.name or ";" not in given)):
        return []
    return [NOT_BELIEVED if is_left_alone(scope, tenant) else ALL_ALIKE]


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
