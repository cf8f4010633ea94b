"""Whatever requests, upstreams and operators do: what was reserved is given back, what was used is charged, no limit is
exceeded by more than one request, and no address has more in flight than it may."""

import asyncio
import json
import tempfile
from collections import Counter
from hashlib import sha256
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splittime.gateway.config_file import config_of, secrets_of
from splittime.gateway.upstream_connections import NoConnection, UpstreamAnswer
from splittime.gateway.upstreams import Upstream
from splittime.gateway.versions import GatewayVersions
from splittime.gateway.visit import GatewayVisit
from splittime.ledger.store import Ledger
from splittime.web.tenants import TENANT

URL = "http://127.0.0.1:1"
CHAT = "/v1/chat/completions"
MINUTE, DAY, TOTAL = 900, 700, 10**6
PROMPT_TOKENS = 20
LIMITS = {
    "ops": {"operator": True},
    "minute": {"tokens_per_minute": MINUTE},
    "day": {"tokens_per_day": DAY},
    "free": {"tokens_per_day": TOTAL},
}


class FakeConnection:
    """The upstream's end of one request. What it does stands in the request's `x`, a word a turn of the loop."""

    def __init__(self, upstreams: "FakeUpstreams", body: dict) -> None:
        self._upstreams, self._body, self.answer = upstreams, body, UpstreamAnswer(self)
        self._is_open = True
        upstreams.num_open += 1
        self.task = asyncio.get_running_loop().create_task(self._play())

    async def _play(self) -> None:
        body, answer = self._body, self.answer
        words = list(body["x"])
        while words and self._is_open:
            await asyncio.sleep(0)
            word = words.pop(0)
            if word == "hang":
                await self._upstreams.released.wait()
            elif word in ("500", "429", "400"):
                self._say(int(word), b'{"error": {"message": "no"}}')
            elif word == "die":
                self._over(ConnectionResetError("it died"))
            elif word == "token" and body.get("stream"):
                self._begin("text/event-stream")
                answer.feed(event({"choices": [{"index": 0, "delta": {"content": "x"}}]}))
            elif word == "end":
                self._end()
        self._over(ConnectionResetError("no more words"))

    def _end(self) -> None:
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": self._body["used"]}
        choice = {"index": 0, "finish_reason": "stop"}
        if not self._body.get("stream"):
            told = {"choices": [choice | {"message": {"content": "x"}}], "usage": usage}
            return self._say(200, json.dumps(told).encode())
        self._begin("text/event-stream")
        told = [{"choices": [choice | {"delta": {}}]}]
        told += [{"choices": [], "usage": usage}] if self._body["stream_options"]["include_usage"] else []
        self.answer.feed(b"".join(event(one) for one in told) + b"data: [DONE]\n\n")
        self._over()

    def _begin(self, kind: str) -> None:
        if not self.answer.status:
            self.answer.headers[b"content-type"] = kind.encode()
            self.answer.begin(200)

    def _say(self, status: int, body: bytes) -> None:
        if self._is_open and not self.answer.status:
            self.answer.headers[b"content-type"] = b"application/json"
            self.answer.begin(status)
            self.answer.feed(body)
        self._over()

    def _over(self, error: OSError | None = None) -> None:
        if self._is_open:
            self._is_open = False
            self._upstreams.num_open -= 1
            self.answer.end(error)

    def cut(self) -> None:
        self._over(ConnectionResetError("the gateway left"))

    def pause(self) -> None:
        """Goes on all the same."""

    def resume(self, answer: UpstreamAnswer | None) -> None:
        """Has not paused."""


class FakeUpstreams:
    """Does as the gateway's connections to one upstream."""

    def __init__(self) -> None:
        self.num_open = 0
        self.released = asyncio.Event()
        self.sent: list[dict] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def ask(self, method, address, path, headers, body, *, connect_s):
        told = json.loads(body or b"{}")
        if method == "GET":
            raise NoConnection(OSError("no checks here"))
        self.sent.append(told)
        made = FakeConnection(self, told)
        self._tasks.append(made.task)
        return made.answer

    def close(self) -> None:
        """Nothing is kept open."""


def most_of_one(limit: int) -> int:
    """Returns how many places a body may take of up to 31."""
    return max(1, limit - 1)


def event(value: dict) -> bytes:
    return b"data: %b\n\n" % json.dumps(value).encode()


def config(folder: str, max_in_flight: int):
    one = {"name": "u", "url": URL, "models": ["m"], "max_in_flight": max_in_flight}
    tenants = [{"name": name, "sha256": sha256(name.encode()).hexdigest(), **more} for name, more in LIMITS.items()]
    told = {"upstream": [one], "tenant": tenants, "budget_file": f"{folder}/b.sqlite", "breaker": {"failures": 1000}}
    told |= {"retries": {"max_attempts": 3, "spare": 1000, "pause_s": 0.0}, "queue": {"shed_from": 1.0}}
    return config_of(told)


class World:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.upstreams = FakeUpstreams()
        first = config(folder, 2)
        self.versions = GatewayVersions(first, secrets_of(first, {}), Ledger())
        self.tenants = {one.name: one for one in self.versions.current.keys.tenants}
        self.asked: list[tuple[dict, asyncio.Task[int], asyncio.Event]] = []

    async def open(self) -> None:
        await self.versions.open()
        self.versions.current.connections = self.upstreams

    def ask(self, tenant: str, words: tuple[str, ...], stream: bool, most: int, used: int, n: int = 1) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 60}], "max_tokens": most, "n": n}
        body |= {"stream": stream, "x": words, "used": min(used, most), "tenant": tenant, "number": len(self.asked)}
        left = asyncio.Event()
        self.asked.append((body, asyncio.get_running_loop().create_task(self._visit(tenant, body, left)), left))

    async def _visit(self, tenant: str, body: dict, left: asyncio.Event) -> int:
        data = json.dumps(body).encode()
        given = [{"type": "http.request", "body": data, "more_body": False}]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], TENANT: self.tenants[tenant]}
        status = [0]

        async def receive() -> dict:
            if given:
                return given.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            status[0] = message.get("status", status[0])

        gateway = self.versions.arm_of(self.tenants[tenant])
        await GatewayVisit(gateway, CHAT, scope, receive, send).serve()
        return status[0]

    async def reload(self, max_in_flight: int) -> None:
        await self.versions.apply(config(self._folder, max_in_flight), "test")

    async def end(self) -> None:
        self.upstreams.released.set()
        await asyncio.wait_for(asyncio.gather(*(task for _, task, _ in self.asked)), 10)

    def used(self) -> Counter:
        """Returns what was charged, by tenant."""
        current = self.versions.current
        told = Counter({name: current.quotas[name].used_tokens for name in LIMITS})
        budgets = current.budgets.used()
        for name in ("day", "free"):
            assert budgets[name, "tokens_per_day"] == told[name]  # both books say the same
        return told


WORDS = [
    *[("end",), ("token", "token", "end"), ("hang", "end"), ("token", "hang", "end")],
    *[("500",), ("429",), ("die",), ("token", "die"), ("400",), ("hang", "500")],
]
STEPS = st.one_of(
    st.tuples(
        st.just("ask"),
        st.sampled_from(["minute", "day", "free"]),
        st.sampled_from(WORDS),
        st.booleans(),
        st.integers(1, 300),
        st.integers(0, 300),
        st.sampled_from([1, 1, 2, 3, 5]),
    ),
    st.tuples(st.just("leave"), st.integers(0, 30)),
    st.tuples(st.just("reload"), st.integers(1, 4)),
    st.tuples(st.just("turns"), st.integers(1, 40)),
)


async def play(steps, folder: str) -> World:
    world = World(folder)
    await world.open()
    try:
        for what, *told in steps:
            if what == "ask":
                world.ask(*told)
            elif what == "leave" and world.asked:
                world.asked[told[0] % len(world.asked)][2].set()
            elif what == "reload":
                await world.reload(told[0])
            elif what == "turns":
                for _ in range(told[0]):
                    await asyncio.sleep(0)
        await world.end()
        nothing_is_left(world)
        charged_is_right(world)
    finally:
        await world.versions.close()
    return world


def nothing_is_left(world: World) -> None:
    current = world.versions.current
    assert world.upstreams.num_open == 0
    assert current.num_open == 0
    (one,) = current.router.upstreams
    load = one.in_flight
    assert (load.requests, load.places, load.tokens, load.plain_tokens, load.waits.tokens) == (0, 0, 0, 0, 0)
    assert (current.queue.requests, current.queue.tokens) == (0, 0)
    assert all((share.in_flight, share.unsettled) == (0, 0) for share in current.queue.shares.values())
    assert all((quota.num_open, quota.reserved_tokens) == (0, 0) for quota in current.quotas.values())
    assert not any(current.budgets._reserved.values())


def charged_is_right(world: World) -> None:
    least, most, largest = Counter(), Counter(), Counter()
    sent = Counter(body["number"] for body in world.upstreams.sent)
    for body, task, left in world.asked:
        tenant, whole = body["tenant"], PROMPT_TOKENS + body["used"]
        bound = -(-len(json.dumps(body)) // 4) + body["max_tokens"] * body["n"]
        is_whole = task.result() == 200 and body["x"][-1] == "end" and not left.is_set()
        least[tenant] += whole if is_whole else 0
        if sent[body["number"]] and (left.is_set() or task.result() == 200):  # nobody pays for what an upstream fails
            most[tenant] += whole if is_whole else bound
        largest[tenant] = max(largest[tenant], bound)
    used = world.used()
    for tenant in used:
        assert least[tenant] <= used[tenant] <= most[tenant], tenant
    assert used["minute"] <= MINUTE + largest["minute"] + MINUTE  # a minute's worth may have filled up meanwhile
    assert used["day"] <= DAY + largest["day"]


class WatchedUpstream(Upstream):
    """Looks at each grant: no more are in flight then than may be, and who asks for more than a body may take begins
    where nothing else is. It need not be sent first: who is granted the last place after it, as a retry, may be there
    before; and what was granted may be sent when a reload has lowered the bound."""

    def enter(self, tokens: int, answers: int = 1, places: int = 1) -> None:
        assert answers <= most_of_one(self.limit) or not self.in_flight.places, "it has to be alone"
        assert self.in_flight.places + min(answers, most_of_one(self.limit)) <= self.limit, "more than there may be"
        super().enter(tokens, answers, places)


RETRY_FIRST = [("ask", "minute", ("die",), False, 1, 0, 1), ("ask", "minute", ("end",), False, 1, 0, 2)]


@example([*RETRY_FIRST, ("ask", "day", ("end",), False, 1, 0, 1)])  # the first is sent again before the second
@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, min_size=3, max_size=40))
def test_books_agree_whatever_happens(steps):
    with tempfile.TemporaryDirectory() as folder, patch("splittime.gateway.service.Upstream", WatchedUpstream):
        asyncio.run(play(steps, folder))


@pytest.mark.parametrize("tenant", ["minute", "day"])
@pytest.mark.parametrize("stream", [True, False])
def test_many_at_once_use_no_more_than_the_limit_and_one_request(tmp_path, tenant, stream):
    """50 at once, each of which uses all that it may: 25 times the limit came of it."""
    steps = [("ask", tenant, ("hang", "end"), stream, 250, 250)] * 50 + [("turns", 40)]
    world = asyncio.run(play(steps, str(tmp_path)))
    limit = {"minute": MINUTE, "day": DAY}[tenant]
    assert limit - 300 <= world.used()[tenant] <= limit + 270 + 60


def test_after_a_reload_no_address_has_more_in_flight_than_it_may(tmp_path):
    """28 were in flight of a new `max_in_flight` of 4, and 4 more came."""
    hold = ("ask", "free", ("hang", "end"), True, 5, 5)
    steps = [("reload", 28), *[hold] * 28, ("turns", 60), ("reload", 4), *[hold] * 8, ("turns", 60)]
    world = asyncio.run(play(steps, str(tmp_path)))  # which looks at each request that is sent
    assert len(world.upstreams.sent) == 36
    assert Path(tmp_path, "b.sqlite").exists()


async def test_who_leaves_early_gets_no_more_than_its_share(tmp_path):
    """One place at equal weights: A takes its answers, B leaves each of its own just before its end."""
    world, busy = World(str(tmp_path)), Counter()
    await world.open()
    try:
        await world.reload(1)
        for _ in range(60):
            for tenant in ("free", "ops"):
                world.ask(tenant, ("token",) * 20 + ("hang", "end"), False, 30, 20)
        for _ in range(40):
            for _ in range(60):
                await asyncio.sleep(0)
            body = world.upstreams.sent[-1]
            busy[body["tenant"]] += 1
            world.upstreams.released, released = asyncio.Event(), world.upstreams.released
            if body["tenant"] == "ops":
                world.asked[body["number"]][2].set()
            else:
                released.set()
        for one in world.asked:
            one[2].set()
        await world.end()
    finally:
        await world.versions.close()
    assert busy["ops"] <= busy["free"] + 2
    assert busy["ops"] >= 5  # and it is not shut out
