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

What an ordinary key may ask for is `TENANT_PATHS`: to generate, to count tokens, and for the accounts of its own
requests. All else, what comes to be served in future included, is the operator's: steps, facts, traces, gauges and the
page tell of everybody's requests, and sleep and knobs are everybody's loss.

A tenant's part of the prefix cache is its own, since `cached_tokens`, and the time that a prompt takes, would tell
whether somebody else had sent the same. What is shared is the queue: a wait tells that others are being served.

How the limits are kept says `web.quota`.

A gateway tells a server of ours in one header whose request it passes on, and that shares among those names.

    x-splittime-tenant: search;weight=2

All requests of a gateway come with its one key. With this header what the server shares (slots, blocks, the time of
steps, lanes of texts, its queue) is shared among `KEY/TENANT`, by the key's weight times the tenant's, and accounts say
that name. All else stays the key's: limits, ids, the prefix cache, kept responses, who may see what.

It is believed of an operator's key, or where no key is asked for: another key could take the shares of as many tenants
as it writes names. Of others it is a hint that is left alone, with a notice, also by a strict server: a gateway with an
ordinary key sends it as well, and gets no notice, which its clients would read. Where no key is asked for, anybody
could write a weight, so that all count alike there, with a notice. `core.shares` bounds how many names are remembered.
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

from splittime.core.errors import ConfigError, RequestError
from splittime.core.small_file import read_small
from splittime.web import http
from splittime.web.http import Scope

TENANT = "splittime.tenant"  # key in an ASGI scope: who asks
TENANT_PATHS = frozenset(
    {
        "/",
        "/cache/purge",
        "/cache/wrong",
        "/docs",
        "/favicon.ico",
        "/is_sleeping",
        "/ledger/hops",
        "/ledger/requests",
        "/openapi.json",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/prefill",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/version",
    }
)
TENANT_FOLDERS = ("/v1/models/", "/v1/responses/", "/ledger/requests/", "/ledger/hops/")
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
