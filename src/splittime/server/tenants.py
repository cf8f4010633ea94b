"""Who asks: the holder of a key, what it may see, and how much it may use.

Keys come from `--api-key` (the first is the operator's, `key-1`; each further one an ordinary tenant's, `key-2`, ...)
and from `--api-keys-file`, a TOML file with a table for each:

    [[key]]
    name = "search"                  # in the accounts; letters, digits and . _ : -
    sha256 = "2bb80d53..."           # of the key, in hexadecimal; or: key = "the key itself"
    operator = false                 # default
    salt = "staff"                   # keys of one salt share cached prefixes; default: nobody shares this key's
    max_open_requests = 8            # at once, whatever `n` they have; these three default to no limit of its own
    requests_per_minute = 120
    tokens_per_minute = 60000        # prompt and output tokens

What an ordinary key may ask for is `TENANT_PATHS`: to generate, to count tokens, and for the accounts of its own
requests. All else, what comes to be served in future included, is the operator's: steps, facts, traces, gauges and the
page tell of everybody's requests, and sleep and knobs are everybody's loss.

A tenant's part of the prefix cache is its own, since `cached_tokens`, and the time that a prompt takes, would tell
whether somebody else had sent the same. What is shared is the queue: a wait tells that others are being served.
"""

from dataclasses import dataclass

from splittime.core.errors import RequestError
from splittime.server.http import Scope

TENANT = "splittime.tenant"  # key in an ASGI scope: who asks
TENANT_PATHS = frozenset(
    {
        "/",
        "/docs",
        "/favicon.ico",
        "/is_sleeping",
        "/ledger/requests",
        "/openapi.json",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/version",
    }
)
TENANT_FOLDERS = ("/v1/models/", "/ledger/requests/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """name: in accounts. salt: no two prompts under different ones share a block of cache."""

    name: str
    salt: str = ""
    is_operator: bool = False
    max_open_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None

    def may_ask_for(self, path: str) -> bool:
        return self.is_operator or path in TENANT_PATHS or path.startswith(TENANT_FOLDERS)

    def cache_salt(self, asked: str) -> str:
        """Its own salt with the request's: no request can name another tenant's, as no tenant's salt has a NUL."""
        return f"{self.salt}\0{asked}" if self.salt else asked

    @property
    def sees(self) -> str | None:
        """Whose accounts it may read; None: everybody's."""
        return None if self.is_operator else self.name


ANYBODY = Tenant(name="", is_operator=True)  # where no key is asked for


def tenant_of(scope: Scope) -> Tenant:
    return scope.get(TENANT, ANYBODY)  # type: ignore[no-any-return]


def forbidden(tenant: Tenant, path: str) -> RequestError:
    message = f"the key {tenant.name!r} may not ask for {path[:64]}"
    hint = "ask with an operator's key: the first --api-key, or one with operator = true in --api-keys-file"
    return RequestError(message, code="operator_only", status=403, value=path[:64], hint=hint)
