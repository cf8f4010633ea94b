"""What stands between a user and an answer: each hop with its owner, time-outs, retries and cap, and what is not set.

    inventory_of(told, accounts, hops, lint)

told: the config as TOML reads it, since a value that stands there was chosen, and a default was not.
accounts, hops: of a ledger file, if there is one: what was seen of each hop stands beside what it is allowed, and the
clients' own hops, which no config names, are listed. lint: of a running gateway, what its prompts carry for nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from splittime.gateway.config import GatewayConfig, UpstreamConfig
from splittime.gateway.config_file import config_of
from splittime.gateway.lint import lint_notes
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.attempts import NO_FAILURE
from splittime.ledger.hops import Hop
from splittime.web.http import is_loopback
from splittime.wire.target import Target

TIMEOUTS = ("connect_s", "first_byte_s", "between_s", "total_s")
OF_GATEWAY = ("owner", "tenant", "ledger_file")
MAX_CLIENT_HOPS = 100


class SeenOfHop(msgspec.Struct, frozen=True):
    """What a ledger has of a hop. lasted_ms, first_byte_ms: percentiles; empty where nobody measured any."""

    count: int
    failed: int
    lasted_ms: dict[str, float]
    first_byte_ms: dict[str, float]


class InventoryHop(msgspec.Struct, frozen=True, kw_only=True):
    """One hop. kind: `gateway`, `upstream`, or that of a client's hop. shared_address: where other gateways listen too.
    timeouts_s: each that there is; none for a hop that the gateway does not make. attempts: of one request, the first
    included. cap: requests at once.

    not_set: keys that the config leaves to their defaults, or unprotected. notes: what the ledger says against it; of
    the gateway, what its prompts carry for nothing.
    """

    name: str
    kind: str
    owner: str | None = None
    address: str = ""
    shared_address: str = ""
    models: tuple[str, ...] = ()
    timeouts_s: dict[str, float] = {}
    attempts: int | None = None
    cap: int | None = None
    not_set: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seen: SeenOfHop | None = None


class Inventory(msgspec.Struct, frozen=True):
    """The hops in the order in which a request meets them."""

    client: list[InventoryHop]
    gateway: InventoryHop
    upstreams: list[InventoryHop]

    @property
    def hops(self) -> list[InventoryHop]:
        return [*self.client, self.gateway, *self.upstreams]


def inventory_of(
    told: Mapping[str, Any],
    accounts: Sequence[ClosedAccount] = (),
    hops: Iterable[Hop] = (),
    lint: dict[str, Any] | None = None,
) -> Inventory:
    """Returns the inventory of a config. Raises `ConfigError` for one that the gateway would not start with."""
    config = config_of(told)
    upstreams = [
        _upstream(config, one, set(told["upstream"][number]), accounts) for number, one in enumerate(config.upstream)
    ]
    gateway = _gateway(config, told, accounts, () if lint is None else lint_notes(lint))
    return Inventory(_client_hops(hops), gateway, upstreams)


def _gateway(
    config: GatewayConfig, told: Mapping[str, Any], accounts: Sequence[ClosedAccount], notes: tuple[str, ...]
) -> InventoryHop:
    not_set = [name for name in OF_GATEWAY if name not in told]
    not_set += ["queue.max_wait_s"] if "max_wait_s" not in told.get("queue", {}) else []
    if not is_loopback(config.host) and config.ssl_certfile is None:
        not_set.append("ssl_certfile")
    lengths = [derive.e2e_ns(account) / 1e6 for account in accounts]
    failed = sum(account.error is not None for account in accounts)
    return InventoryHop(
        name="gateway",
        kind="gateway",
        owner=config.owner,
        address=f"{config.host}:{config.port}",
        shared_address="" if config.shared_port is None else f"{config.host}:{config.shared_port}",
        timeouts_s={"queue.max_wait_s": config.queue.max_wait_s, "body_timeout_s": config.body_timeout_s},
        attempts=config.retries.max_attempts,
        cap=config.queue.max_requests,
        not_set=tuple(not_set),
        notes=notes,
        seen=SeenOfHop(len(accounts), failed, derive.percentiles(lengths, (50, 99)), {}) if accounts else None,
    )


def _upstream(
    config: GatewayConfig, one: UpstreamConfig, given: set[str], accounts: Sequence[ClosedAccount]
) -> InventoryHop:
    not_set = [name for name in ("owner", *TIMEOUTS, "max_in_flight") if name not in given]
    is_near = is_loopback(Target(url=one.url).address.host)
    if not is_near and one.key_env is None and one.key_file is None:
        not_set.append("key_env")
    seen = _seen(one.name, accounts)
    return InventoryHop(
        name=one.name,
        kind="upstream",
        owner=one.owner,
        address=one.url,
        models=one.models,
        timeouts_s={name: getattr(one, name) for name in TIMEOUTS},
        attempts=config.retries.max_attempts,
        cap=one.max_in_flight,
        not_set=tuple(not_set),
        notes=_notes(one, is_near, seen),
        seen=seen,
    )


def _seen(name: str, accounts: Iterable[ClosedAccount]) -> SeenOfHop | None:
    attempts = [attempt for account in accounts for attempt in account.attempts if attempt.upstream == name]
    if not attempts:
        return None
    lengths = [(one.end_ns - one.begin_ns) / 1e6 for one in attempts]
    firsts = [(one.first_byte_ns - one.begin_ns) / 1e6 for one in attempts if one.first_byte_ns is not None]
    failed = sum(one.error not in NO_FAILURE for one in attempts)
    percents = (50, 99)
    return SeenOfHop(len(attempts), failed, derive.percentiles(lengths, percents), derive.percentiles(firsts, percents))


MANY_TIMES = 20
ENOUGH = 100


def _notes(one: UpstreamConfig, is_near: bool, seen: SeenOfHop | None) -> tuple[str, ...]:
    notes = []
    if not is_near and one.url.startswith("http://"):
        notes.append("keys and prompts go there unencrypted (http://)")
    if seen is None or not seen.first_byte_ms:
        return tuple(notes)
    p99_ms, limit_ms = seen.first_byte_ms["p99"], one.first_byte_s * 1e3
    if seen.count >= ENOUGH and p99_ms * MANY_TIMES < limit_ms:
        notes.append(
            f"first_byte_s is {limit_ms / p99_ms:.0f} times the p99 of {seen.count} attempts ({p99_ms:.0f} ms)"
        )
    if p99_ms > limit_ms / 2:
        notes.append(f"first_byte_s is less than twice the p99 of {seen.count} attempts ({p99_ms:.0f} ms)")
    return tuple(notes)


def _client_hops(hops: Iterable[Hop]) -> list[InventoryHop]:
    """Returns what clients posted, by kind and name: the most frequent ones."""
    found: dict[tuple[str, str], list[Hop]] = defaultdict(list)
    for hop in hops:
        found[hop.kind.value, hop.name].append(hop)
    frequent = sorted(found.items(), key=lambda entry: -len(entry[1]))[:MAX_CLIENT_HOPS]
    return [InventoryHop(name=name, kind=kind, seen=_lasted(alike)) for (kind, name), alike in frequent]


def _lasted(hops: Sequence[Hop]) -> SeenOfHop:
    lengths = [hop.duration_ns / 1e6 for hop in hops]
    return SeenOfHop(len(hops), sum(bool(hop.error) for hop in hops), derive.percentiles(lengths, (50, 99)), {})
