"""Questions that differ little and have different answers: none is given the other's, unless the verifier says so."""

import asyncio
import json
import tomllib
import unicodedata

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.core.errors import ConfigError
from splittime.gateway.cache.answers import Flight, Wishes, asked_key
from splittime.gateway.cache.service import ResponseCache
from splittime.gateway.cache.stores import Purge
from splittime.gateway.config_file import config_of
from splittime.gateway.forwarded import forwarded
from splittime.gateway.upstream_connections import RoundTrips, UpstreamConnections

from ..conftest import upstream
from .pairs import ALL

CHAT = "/v1/chat/completions"
PLAIN = upstream("one", "http://127.0.0.1:9", "m") + '[[cache_route]]\nmodel = "m"\n'
LIKE = PLAIN + 'semantic = true\n[embedder]\nurl = "http://127.0.0.1:9"\nmodel = "e"\n[verifier]\nmodel = "m"\n'
ANSWER = {"id": "x", "choices": [{"index": 0, "message": {"content": "so it is"}, "finish_reason": "stop"}]}


HALF = [{"role": "user", "content": "\ud800 is a half"}]


class AllNear:
    """An embedder for which every text is the same: nothing but the verifier tells them apart."""

    name = "all-near"

    async def embed(self, text):
        return np.ones(1, dtype=np.float32)


class Scripted:
    """A room in which a model says what is told here."""

    def __init__(self, verdict: str) -> None:
        self.verdict, self.asked = verdict, []

    async def ask(self, chat, within_s):
        self.asked.append(json.loads(chat["messages"][-1]["content"]))
        said = {"message": {"content": json.dumps({"same": self.verdict})}, "finish_reason": "stop"}
        return json.dumps({"choices": [said]}).encode()


def chat(text: str, **more):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "temperature": 0, **more}
    return forwarded(CHAT, json.dumps(body).encode(), 16)


def key_of(request, tenant="t") -> str:
    found = asked_key(request, tenant, takes_sampled=False)
    assert not found.why_not
    return found.key


def given_for(text: str, room: Scripted) -> list[str | None]:
    """The kinds of the hits of the second question of each pair, the first one's answer being kept."""

    async def ask(cache, route, request, tenant="t"):
        found = await cache.look_up(request, tenant, route, Wishes())
        if found.answer is None:
            found = await cache.look_alike(found, route, Wishes(), room)
        return found

    async def one_pair(cache, number, one, other):
        route, first = cache.route("m"), chat(one, seed=number)
        flight = Flight(10**6)
        flight.headers, flight.raw = [(b"content-type", b"application/json")], [(1, json.dumps(ANSWER).encode())]
        await cache.keep(flight, await ask(cache, route, first), first, "t")
        assert (await ask(cache, route, first)).answer is not None
        assert (await ask(cache, route, first, "another")).answer is None
        found = await ask(cache, route, chat(other, seed=number))
        return found.kind if found.answer is not None else None

    async def all_of_them():
        cache = ResponseCache(config_of(tomllib.loads(text)), UpstreamConnections(RoundTrips()))
        cache._embedder = None if cache._embedder is None else AllNear()
        try:
            return [await one_pair(cache, number, one, other) for number, (_, one, other) in enumerate(ALL)]
        finally:
            cache.close()

    return asyncio.run(all_of_them())


def test_none_is_a_hit_by_default():
    room = Scripted("yes")
    assert given_for(PLAIN, room) == [None] * len(ALL)
    assert not room.asked


@pytest.mark.parametrize(("verdict", "kind"), [("yes", "like"), ("no", None), ("YES", None), ("yes, and", None)])
def test_the_verifier_decides_on_what_is_near(verdict, kind):
    """Each pair is asked of once, as it was written, and another tenant's question is in none."""
    room = Scripted(verdict)
    assert given_for(LIKE, room) == [kind] * len(ALL)
    assert room.asked == [{"first": one, "second": other} for _, one, other in ALL]


def test_an_answer_that_is_taken_out_while_the_verifier_thinks_is_not_given():
    class Thinking(Scripted):
        async def ask(self, chat, within_s):
            await cache.purge(Purge())
            return await super().ask(chat, within_s)

    async def all_of_it():
        route, first = cache.route("m"), chat("one")
        flight = Flight(10**6)
        flight.headers, flight.raw = [(b"content-type", b"application/json")], [(1, json.dumps(ANSWER).encode())]
        found = await cache.look_alike(
            await cache.look_up(first, "t", route, Wishes()), route, Wishes(), Scripted("no")
        )
        await cache.keep(flight, found, first, "t")
        second = await cache.look_up(chat("other"), "t", route, Wishes())
        given = await cache.look_alike(second, route, Wishes(), Scripted("yes"))
        return given.answer, (await cache.look_alike(second, route, Wishes(), Thinking("yes"))).answer

    cache = ResponseCache(config_of(tomllib.loads(LIKE)), UpstreamConnections(RoundTrips()))
    cache._embedder = AllNear()
    try:
        given, late = asyncio.run(all_of_it())
    finally:
        cache.close()
    assert given is not None
    assert late is None


def test_what_was_not_judged_is_in_no_rate():
    cache = ResponseCache(config_of(tomllib.loads(LIKE)), UpstreamConnections(RoundTrips()))
    cache.shadowed.update(
        {("like", "different"): 1, ("like", "same"): 2, ("like", "unjudged"): 5, ("equal", "same"): 7}
    )
    told = cache.stats()["shadow"]["like"]
    cache.close()
    assert (cache.false_hits("like"), told["unjudged"], told["false_hit_rate"]) == ((1, 3), 5, pytest.approx(1 / 3))


# ---- what an equal request may differ in


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"n": 1}', "{}"),
        ('{"stop": null, "stream": false}', "{}"),
        ('{ "seed" : 1.0 , "user":"\\u00e9"}', '{"user": "é", "seed": 1}'),
    ],
)
def test_what_is_one_value_of_json_is_one_request(one, other):
    assert key_of(raw(one)) == key_of(raw(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"echo": 0}', "{}"),
        ('{"seed": true}', '{"seed": 1}'),
        ('{"seed": "1"}', '{"seed": 1}'),
        ('{"seed": -0.5}', '{"seed": 0.5}'),
        ('{"seed": 9007199254740993}', '{"seed": 9007199254740992}'),
        ('{"stop": []}', "{}"),
        ('{"stop": ["a", "b"]}', '{"stop": ["b", "a"]}'),
        ('{"user": ""}', "{}"),
        ('{"logit_bias": {"1": null}}', '{"logit_bias": {}}'),
    ],
)
def test_what_an_upstream_may_read_otherwise_is_another_request(one, other):
    found = [asked_key(raw(told), "t", takes_sampled=False) for told in (one, other)]
    assert found[0].why_not or found[0].key != found[1].key


def test_what_no_embedder_could_be_sent_is_no_question():
    """A half of a pair of surrogates, which JSON can write: held against no other question."""
    request = msgspec.structs.replace(
        chat("x"), body=json.dumps(json.loads(chat("x").body) | {"messages": HALF}).encode()
    )
    found = asked_key(request, "t", takes_sampled=False)
    assert (found.question, bool(found.key)) == ("", True)
    assert asked_key(chat("x"), "t", takes_sampled=False).question == "x"


def test_a_false_temperature_is_not_zero():
    assert asked_key(raw('{"temperature": false}'), "t", takes_sampled=False).why_not == "sampled"


def test_an_answer_is_one_tenants_one_paths_and_one_pools():
    """A rule's upstreams are a pool of their own: what one of them answered is not given for another's."""
    request = chat("x")
    others = [msgspec.structs.replace(request, **one) for one in ({"pool": "m (rule a)"}, {"path": "/v1/completions"})]
    keys = [key_of(request), key_of(request, "u"), key_of(request, ""), *map(key_of, others)]
    assert len(set(keys)) == len(keys)
    pooled = [asked_key(one, "t", takes_sampled=False).likeness for one in (request, others[0])]
    assert pooled[0] != pooled[1]


@given(st.text(min_size=1, max_size=12), st.text(min_size=1, max_size=12))
def test_two_texts_are_one_only_if_they_are_equal(one, other):
    for text in (other, one.lower(), one.strip(), " ".join(one.split()), unicodedata.normalize("NFC", one)):
        assert (key_of(chat(one)) == key_of(chat(text))) == (one == text)


def raw(told: str):
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    text = json.dumps(body)[:-1] + ("" if "temperature" in told else ', "temperature": 0')
    inside = told.strip()[1:-1].strip()
    return forwarded(CHAT, f"{text}{', ' if inside else ''}{inside}}}".encode(), 16)


# ---- what the config must have


@pytest.mark.parametrize(
    ("without", "named"),
    [
        (("[embedder]", 'url = "http://127.0.0.1:9"\nmodel = "e"'), "no [embedder]"),
        (("[verifier]", 'model = "m"'), "no [verifier]"),
    ],
)
def test_likeness_needs_both(without, named):
    name, keys = without
    text = LIKE.replace(f"{name}\n{keys}\n", "")
    with pytest.raises(ConfigError) as error:
        config_of(tomllib.loads(text))
    assert error.value.info.param == "cache_route[0].semantic"
    assert error.value.info.message.endswith(named)


def test_a_verifier_is_a_model_that_is_served():
    with pytest.raises(ConfigError) as error:
        config_of(tomllib.loads(LIKE.replace('[verifier]\nmodel = "m"', '[verifier]\nmodel = "other"')))
    assert (error.value.info.param, error.value.info.value) == ("verifier.model", "other")
