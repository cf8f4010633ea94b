"""Whose request a gateway passes on: a server of ours is told in one header, and shares among those names.

    x-splittime-tenant: search;weight=2

All requests of a gateway come with its one key. With this header what the server shares (slots, blocks, the time of
steps, lanes of texts, its queue) is shared among `KEY/TENANT`, by the key's weight times the tenant's, and accounts say
that name. All else stays the key's: limits, ids, the prefix cache, kept responses, who may see what.

It is believed of an operator's key, or where no key is asked for: another key could take the shares of as many tenants
as it writes names. Of others it is a hint that is left alone, with a notice, also by a strict server: a gateway with an
ordinary key sends it as well, and gets no notice, which its clients would read. Where no key is asked for, anybody
could write a weight, so that all count alike there, with a notice. `core.shares` bounds how many names are remembered.
"""

import re
from typing import NamedTuple

from splittime.core.errors import RequestError
from splittime.web import http
from splittime.web.tenants import Tenant

TOLD_TENANT = "x-splittime-tenant"
GATEWAY = "splittime-gateway/"  # begins the user agent of one
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1e6
NOT_BELIEVED = f"{TOLD_TENANT} is believed of an operator's key alone"
ALL_ALIKE = (
    f"the weight of {TOLD_TENANT} is believed only of an operator's key: where no key is asked for, all count alike"
)
HOW = f"{TOLD_TENANT}: NAME;weight=2, with 64 letters, digits and . _ : - at the most, and a weight of 0.001 to 1000000"
_TOLD = re.compile(r"([A-Za-z0-9._:-]{1,64})(?:;weight=([0-9]{1,7}(?:\.[0-9]{1,6})?))?")


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
