"""A server of ours is told whose request it is: by the gateway, whatever clients say."""

import asyncio
from hashlib import sha256

import pytest

from splittime.web.tenants import NOT_BELIEVED, TOLD_TENANT, Tenant, notices_of_head

from .hostile import WHOLE, whole
from .in_process import PATIENT, Saying, asked, gateway_before


def tenant(name: str, more: str) -> str:
    return f'[[tenant]]\nname = "{name}"\nsha256 = "{sha256(name.encode()).hexdigest()}"\n{more}\n'


TENANTS = tenant("ops", "operator = true") + tenant("few", "weight = 2.5")
FORGED = {TOLD_TENANT: "ops;weight=1000", TOLD_TENANT.upper(): "x"}


def told_in(head: bytes) -> list[str]:
    lines = [line.split(": ", 1) for line in head.decode().split("\r\n") if ": " in line]
    return [value for name, value in lines if name.lower() == TOLD_TENANT]


@pytest.mark.parametrize(("kind", "told"), [("splittime", ["few;weight=2.5"]), ("openai", [])])
async def test_servers_of_ours_are_told_the_tenant_and_no_client_says_which(kind, told):
    up = Saying(whole(200, WHOLE))
    async with gateway_before({"up": up}, PATIENT + TENANTS, kind=kind) as (app, _):
        for headers in ({}, FORGED):
            answer = await asked(app, {"authorization": "Bearer few", **headers})
            assert answer.status == 200
        assert [told_in(head) for head, _ in up.asked] == [told, told]
        sent = [line.split(b": ", 1) for line in up.asked[0][0].rstrip().split(b"\r\n")[1:]]
        own, plain = {"headers": sent}, {"headers": [(TOLD_TENANT.encode(), b"x")]}
        assert (notices_of_head(own, Tenant(name="k")), notices_of_head(plain, Tenant(name="k"))) == (
            [],
            [NOT_BELIEVED],
        )


async def test_a_gateway_without_keys_says_nothing_in_the_clients_stead():
    up = Saying(whole(200, WHOLE))
    async with gateway_before({"up": up}, kind="splittime") as (app, _):
        assert (await asked(app, FORGED)).status == 200
        assert told_in(up.asked[0][0]) == []


async def test_what_is_asked_on_a_requests_behalf_is_told_as_its_tenants():
    from splittime.gateway.cache.spare_room import SpareRoom
    from splittime.web.tenants import TENANT

    up = Saying(whole(200, WHOLE))
    async with gateway_before({"up": up}, PATIENT + TENANTS, kind="splittime") as (_, gateway):
        (few,) = [one for one in gateway.keys.tenants if one.name == "few"]
        room = SpareRoom(gateway, "few", {"headers": [], TENANT: few})
        chat = {"model": "m", "messages": [], "max_tokens": 1}
        assert await asyncio.wait_for(room.ask(chat, 5.0), 10)
        assert told_in(up.asked[0][0]) == ["few;weight=2.5"]
