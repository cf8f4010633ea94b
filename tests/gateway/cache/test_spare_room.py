"""What is asked in spare room: where it may go, what it costs whom, and that nobody waits for it."""

import asyncio
import json
import tomllib
from types import SimpleNamespace

import pytest

from splittime.gateway.cache import spare_room
from splittime.gateway.cache.spare_room import SpareRoom
from splittime.gateway.config_file import config_of
from splittime.gateway.fair_queue import FairQueue
from splittime.gateway.routing.policy import RoutePolicy
from splittime.gateway.upstreams import Router, Upstream

from ..conftest import upstream

CHAT = {"model": "v", "messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 32}
PROMPT_TOKENS = -(-len(json.dumps(CHAT, separators=(",", ":"))) // 4)
TEXT = (
    upstream("ours", "http://127.0.0.1:1", "v", kind="splittime", max_in_flight=1)
    + upstream("apart", "http://127.0.0.1:2", "v", max_in_flight=1)
    + '[[tenant]]\nname = "kept"\noperator = true\nsha256 = "'
    + "a" * 64
    + '"\n'
    + '[[tenant]]\nname = "t"\nweight = 2\nsha256 = "'
    + "b" * 64
    + '"\n'
    + '[[rule]]\nname = "apart"\ntenants = ["kept"]\nupstreams = ["apart"]\n'
    + '[[rule]]\nname = "rest"\nupstreams = ["ours"]\n'
)


@pytest.fixture
def gateway(monkeypatch):
    """Its parts, but for a socket: `answer` says what an upstream answers; `asked` has what it was sent."""
    config = config_of(tomllib.loads(TEXT))
    policy, made = RoutePolicy(config), SimpleNamespace(asked=[], used=[], answer=(200, b"{}"))
    router = Router([Upstream(one, config.breaker) for one in config.upstream], pools=policy.pools)
    made.policy, made.router, made.connections = policy, router, None
    made.queue = FairQueue(config.queue, router, {one.name: one.weight for one in config.tenant})
    made.quotas = {one.name: SimpleNamespace(use_tokens=lambda n, at_ns: made.used.append(n)) for one in config.tenant}
    made.budgets = SimpleNamespace(use=lambda tenant, n: made.used.append((tenant, n)))

    async def ask_whole(connections, address, path, key, body, *, within_s, max_bytes, headers):
        assert [one.requests for one in router.upstreams if one.address == address] == [1]
        made.asked.append((address.port, json.loads(body)))
        if isinstance(made.answer, BaseException):
            raise made.answer
        return made.answer

    monkeypatch.setattr(spare_room, "ask_whole", ask_whole)
    return made


def ask(gateway, tenant="t"):
    room = SpareRoom(gateway, tenant, {"type": "http", "headers": []})
    return asyncio.run(room.ask(CHAT, 1.0))


def is_given_back(gateway, tenant="t") -> bool:
    share = gateway.queue.shares[tenant]
    places = [(one.requests, one.tokens) for one in gateway.router.upstreams]
    return places == [(0, 0), (0, 0)] and (share.in_flight, share.unsettled) == (0, 0)


def test_what_was_used_is_charged_in_shares_limits_and_budgets(gateway):
    gateway.answer = (200, b'{"usage": {"prompt_tokens": 100, "completion_tokens": 6, "total_tokens": 106}}')
    assert ask(gateway) == gateway.answer[1]
    assert gateway.used == [106, ("t", 106)]
    assert gateway.queue.shares["t"].counter == 106 / 2
    assert is_given_back(gateway)


@pytest.mark.parametrize(
    ("answer", "used"),
    [
        ((200, b"{}"), PROMPT_TOKENS + 32),
        ((200, b'{"usage": {"prompt_tokens": 9}}'), PROMPT_TOKENS + 32),
        ((200, b'{"usage": {"prompt_tokens": 9, "completion_tokens": 0}}'), 9),
        ((200, b"<html>"), PROMPT_TOKENS + 32),
        ((400, b"{}"), PROMPT_TOKENS),
        ((503, b"{}"), PROMPT_TOKENS),
        ((200, None), PROMPT_TOKENS),
        (TimeoutError(), PROMPT_TOKENS),
        (asyncio.CancelledError(), PROMPT_TOKENS),
    ],
)
def test_what_is_not_told_is_charged_by_its_estimate_also_of_what_is_given_up(gateway, answer, used):
    gateway.answer = answer
    is_good = isinstance(answer, tuple) and answer[0] == 200 and answer[1] is not None
    if is_good:
        assert ask(gateway) == answer[1]
    else:
        with pytest.raises((OSError, ValueError, asyncio.CancelledError)) as caught:
            ask(gateway)
        assert isinstance(caught.value, OSError) == (isinstance(answer, TimeoutError) or answer == (503, b"{}"))
    assert gateway.used == [used, ("t", used)]
    assert gateway.queue.shares["t"].counter == used / 2
    assert is_given_back(gateway)
    assert not any(one.breaker.is_open for one in gateway.router.upstreams)


def test_a_tenants_text_goes_where_its_rules_lead(gateway):
    """To a server of ours with the last priority; no other knows that field."""
    ask(gateway, "kept")
    ask(gateway, "t")
    assert [(port, body.get("priority")) for port, body in gateway.asked] == [(2, None), (1, 2**31 - 1)]


def test_where_all_places_are_taken_it_is_not_asked_and_costs_nothing(gateway):
    gateway.router.upstreams[0].enter(5)
    assert ask(gateway) is None
    assert (gateway.asked, gateway.used) == ([], [])


def test_who_waits_comes_first(gateway):
    """A place that is free just now goes to whoever has waited for it."""

    async def all_of_it():
        taken = gateway.queue.place_now("kept", "v (rule rest)", 5)
        waiting = asyncio.ensure_future(gateway.queue.enter("t", "v (rule rest)", 5, until_ns=2**62))
        await asyncio.sleep(0)
        taken.upstream.leave(5)  # nobody has been told yet
        found = await SpareRoom(gateway, "t", {"type": "http", "headers": []}).ask(CHAT, 1.0)
        return found, (await waiting).upstream.name

    assert asyncio.run(all_of_it()) == (None, "ours")
