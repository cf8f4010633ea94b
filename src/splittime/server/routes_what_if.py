"""`POST /ledger/what-if`: what other settings, or another load, would have made of the latest requests.

Nothing of the server is changed. Only requests that began after the latest change of a knob count: before, the settings
were others than those that the simulation starts from.
"""

import asyncio
import functools
import time
from typing import TYPE_CHECKING

import msgspec
import orjson

from splittime.api.decode import decode_once, whole
from splittime.core.errors import Conflict, RequestError
from splittime.ledger.facts import ServerFacts
from splittime.ledger.store import Ledger
from splittime.server.routes_info import Whole
from splittime.server.service import Service
from splittime.server.simulation import DRAWS
from splittime.simulate.change import Change
from splittime.simulate.recorded import question
from splittime.web import http
from splittime.web.reading import BodySender, read_beside
from splittime.web.tenants import sharer_of, tenant_of

if TYPE_CHECKING:
    from splittime.diagnose.excerpt import Excerpt


TWO_MINUTES_S = 120.0


class WhatIfBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """settings: values by name, as in `PATCH /knobs`, with `num_blocks` of the KV cache. speed: requests come so many
    times as fast."""

    settings: dict[str, bool | Whole | float | str | None] = {}
    speed: float = 1.0


async def what_if(service: Service, scope: http.Scope, receive: http.Receive, send: http.Send) -> None:
    """See the module's docstring. 429 while another is being simulated; 409 where the books do not say enough."""
    http.query_of(scope)
    config = service.config
    raw = await http.read_body_in_time(scope, receive, config.max_body_bytes, config.body_timeout_s)
    body = await read_beside(BodySender(sharer_of(scope, tenant_of(scope)), receive), len(raw), _decoded, raw)
    service.require_model()
    work = functools.partial(_answer, service, service.facts(), body)
    answer = await asyncio.wrap_future(service.simulation.start(work))
    await http.respond(send, answer)


def _decoded(raw: bytes) -> WhatIfBody:
    try:
        body = decode_once(raw, WhatIfBody)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body does not say a change: {error}", code="invalid_json") from error
    return msgspec.structs.replace(body, settings={name: whole(value) for name, value in body.settings.items()})


def _answer(service: Service, facts: ServerFacts | None, body: WhatIfBody) -> bytes:
    """Raises `RequestError` for a change that cannot be, `Conflict` where the books do not say enough."""
    change = Change(body.settings, body.speed)
    excerpt = _excerpt(service.ledger, facts)
    answer = orjson.loads(service.simulation.run(question(excerpt.recorded, change, DRAWS)))
    error, is_bad_change = answer.pop("error"), answer.pop("is_bad_change")
    if error is not None:
        kind, code = (RequestError, "invalid_value") if is_bad_change else (Conflict, "cannot_tell")
        about = {name: error.get(name) for name in ("param", "value", "limit", "hint")}
        raise kind(error["message"], code=code, **about)
    accounts = excerpt.recorded.accounts
    span_ns = accounts[-1].end_ns - min(account.start_ns for account in accounts)
    about = {"settings": body.settings, "speed": body.speed, "span_s": span_ns / 1e9, "num_left_out": excerpt.num_open}
    return orjson.dumps({**about, **answer})


def _excerpt(ledger: Ledger, facts: ServerFacts | None) -> "Excerpt":
    from splittime.diagnose.books import LIVE_ACCOUNTS, LIVE_STEPS, live_books  # here: a start does not wait for it
    from splittime.diagnose.excerpt import latest_excerpt

    since_ns, kept = 0 if facts is None else facts.knobs_changed_ns, ledger.accounts(None, LIVE_ACCOUNTS)
    accounts = [account for account in kept if account.start_ns >= since_ns]
    steps = [step for step in ledger.steps(LIVE_STEPS) if step.begin_ns >= since_ns]
    excerpt = latest_excerpt(live_books(facts, accounts, steps, "the live ledger"))
    if excerpt is None:
        raise _unserved(len(kept) - len(accounts), since_ns)
    return excerpt


def _unserved(earlier: int, since_ns: int) -> Conflict:
    """Returns the error where no request has ended with the settings that there are now. earlier: how many began
    before."""
    if not earlier:
        hint = "Ask again when requests have been served."
        return Conflict("no request has been served yet", code="cannot_tell", hint=hint)
    seconds = (time.monotonic_ns() - since_ns) / 1e9
    ago = f"{seconds / 60:,.0f} minutes" if seconds >= TWO_MINUTES_S else f"{seconds:.0f} seconds"
    words = f"the settings were changed {ago} ago; the latest {earlier:,} requests began before that and do not count"
    hint = "Ask again when requests have been served with the settings that there are now."
    return Conflict(words, code="cannot_tell", hint=hint)
