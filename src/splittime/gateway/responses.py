"""Which upstream keeps which response, by tenant: `previous_response_id` goes back there.

Upstreams see one key, the gateway's, so that this table alone knows whose a response is: where there are tenants, an
id that it does not have for this one is unknown, whoever else may have it. Bounded as `core.shares` says.
"""

import re
import time
from typing import NamedTuple, Protocol

import msgspec

from splittime.core.clock import utc_text
from splittime.core.errors import NotFound, RequestError
from splittime.core.shares import KeptByOwner
from splittime.gateway.config import GatewayConfig
from splittime.gateway.forwarded import RESPONSES, ForwardedRequest, with_model
from splittime.gateway.routing.difficulty import DifficultyRouting
from splittime.gateway.upstreams import Router, Upstream, held_line
from splittime.web.tenants import Tenant

MAX_RESPONSES = 65_536
_ID = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9._:-]{0,127}")  # in a path it is one name, and no way up


class HeldResponse(NamedTuple):
    """Who keeps it, by the config's name, and the model that wrote it."""

    upstream: str
    model: str


class HeldResponses:
    """The responses of every tenant. begun_unix_s: since when."""

    def __init__(self, most: int = MAX_RESPONSES) -> None:
        self.begun_unix_s = time.time()
        self._kept = KeptByOwner[HeldResponse](most)

    def __len__(self) -> int:
        return len(self._kept)

    def note(self, tenant: str, response_id: str, held: HeldResponse) -> None:
        """A response has been made, and is about to be told. An id that is none is not remembered, nor one that another
        tenant has: an upstream may have let the client choose it."""
        is_anothers = bool(set(self._kept.owners_of(response_id)) - {tenant})
        if not is_anothers and _ID.fullmatch(response_id):
            self._kept.put(tenant, response_id, held)

    def get(self, tenant: str, response_id: str) -> HeldResponse | None:
        return self._kept.get(tenant, response_id)

    def forget(self, tenant: str, response_id: str) -> None:
        self._kept.drop(tenant, response_id)


class KeepsResponses(Protocol):
    """A gateway, as far as it is asked who keeps what."""

    config: GatewayConfig
    held: HeldResponses
    router: Router
    difficulty: DifficultyRouting


def bound(gateway: KeepsResponses, request: ForwardedRequest, tenant: Tenant) -> ForwardedRequest:
    """Returns a request that goes on from a response as one for the upstream that keeps it, and any other as it is.
    Under a `[[difficulty]]` it keeps the model that it began with. Raises `NotFound` where nobody may be asked, and
    `RequestError` for an item that is only named where it may be another key's, or another upstream's."""
    if request.reference and _is_shared(gateway, request):
        raise _unknown_item(request.reference)
    if not request.previous_id:
        return request
    held = gateway.held.get(tenant.name, request.previous_id)
    if held is None:
        if _is_shared(gateway, request):
            raise _not_found(gateway, request.previous_id, "previous_response_id", "previous_response_not_found")
        return request
    route = gateway.difficulty.route(request)
    if route is not None and held.model in (route.small, route.large):
        request = msgspec.structs.replace(with_model(request, held.model), pool=held.model)
    if held.upstream not in [one.name for one in gateway.router.of_model(request.pool)]:
        message = f"the previous response is kept by upstream {held.upstream!r}, which may not have this request"
        hint = f"ask for {held.model!r} as before, or send the conversation as input"
        raise NotFound(message, code="previous_response_not_found", param="previous_response_id", hint=hint)
    return msgspec.structs.replace(request, pool=held_line(held.upstream))


def _is_shared(gateway: KeepsResponses, request: ForwardedRequest) -> bool:
    """Returns whether what an upstream keeps may be another key's, or another upstream's."""
    return bool(gateway.config.tenant) or len(gateway.router.of_model(request.pool)) != 1


def keeper_of(gateway: KeepsResponses, tenant: Tenant, response_id: str) -> Upstream:
    """Returns the upstream that keeps a response; the only one there is, where nobody else can be asking. Raises
    `NotFound`."""
    held, upstreams = gateway.held.get(tenant.name, response_id), gateway.router.upstreams
    is_only = held is None and not gateway.config.tenant and len(upstreams) == 1
    found = next((one for one in upstreams if is_only or (held is not None and one.name == held.upstream)), None)
    if found is None or not _ID.fullmatch(response_id):
        raise _not_found(gateway, response_id, "response_id", "not_found")
    return found


def _unknown_item(param: str) -> RequestError:
    message = f"{param}: item_reference is not passed on: the gateway does not know who keeps the item, nor whose it is"
    hint = "send the item itself, or name its response as previous_response_id"
    return RequestError(message, code="unsupported_field", param=param, hint=hint)


def _not_found(gateway: KeepsResponses, response_id: str, param: str, code: str) -> NotFound:
    began = utc_text(gateway.held.begun_unix_s)
    hint = (
        f"POST {RESPONSES} with the conversation as input: the gateway started at {began}, and knows none from before"
    )
    message = f"no response {response_id[:64]!r} of this key is known"
    return NotFound(message, code=code, param=param, value=response_id[:64], hint=hint)
