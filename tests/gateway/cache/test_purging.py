"""A purge stalls nobody: look-ups come between its parts, and find nothing of what it takes."""

import asyncio
import tomllib

from splittime.gateway.cache.answers import Wishes
from splittime.gateway.cache.service import ResponseCache
from splittime.gateway.cache.stores import PART, Purge
from splittime.gateway.config_file import config_of
from splittime.gateway.forwarded import forwarded
from splittime.gateway.upstream_connections import RoundTrips, UpstreamConnections

from ..conftest import upstream
from .test_stores import answer

BODY = b'{"model": "m", "messages": [], "temperature": 0}'
NUMBER = 40 * PART
LIFE_S = 10**10


def test_who_looks_up_meanwhile_waits_for_a_part_and_finds_nothing_of_it():
    text = upstream("one", "http://127.0.0.1:9", "m") + '[[cache_route]]\nmodel = "m"\nmax_age_s = 100000000\n'
    cache = ResponseCache(config_of(tomllib.loads(text)), UpstreamConnections(RoundTrips()))
    order: list[str] = []

    async def looked_up(name: str, tenant: str):
        found = await cache.look_up(request, tenant, cache.route("m"), Wishes())
        order.append(name)
        return found.answer

    async def purged(which: Purge) -> int:
        count = await cache.purge(which)
        order.append("purged")
        return count

    async def all_of_it():
        for tenant in ("t", "u"):
            key = (await cache.look_up(request, tenant, cache.route("m"), Wishes())).asked.key
            last = answer(key, tenant=tenant, size=10, at_s=2e9)
            await cache._in_thread(lambda last=last: cache.store.put(last, LIFE_S))
        assert await looked_up("before", "t") is not None
        purging = asyncio.create_task(purged(Purge(tenant="t")))
        await asyncio.sleep(0)
        others = await asyncio.gather(looked_up("its own", "t"), looked_up("another's", "u"))
        return await purging, others

    request = forwarded("/v1/chat/completions", BODY, 16)
    for number in range(NUMBER):
        cache.store.put(answer(f"{number}", size=10), LIFE_S)
    try:
        count, (own, others) = asyncio.run(all_of_it())
    finally:
        cache.close()
    assert count == NUMBER + 1
    assert own is None  # though it is the last that goes
    assert others is not None
    assert order == ["before", "its own", "another's", "purged"]
