"""A server seen from outside: which it is, what it tells, and that nothing it lacks is an error."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from splittime.bench.book.records import Arm
from splittime.bench.servers import ServerGauges, close_arm, open_arm, sample
from splittime.core.errors import ConfigError, EngineError
from splittime.wire.scrape import server_limits
from splittime.wire.target import Target

FIXTURES = Path(__file__).parent / "fixtures"
Session = aiohttp.ClientSession


def metrics_of(name: str) -> str:
    return (FIXTURES / f"{name}.txt").read_text()


def models(owner: str, **card: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "the-model", "owned_by": owner, **card}]}


SPLITTIME_STATS = {"engine": {"num_waiting": 3, "num_running": 4, "blocks_used": 30, "blocks_total": 40}}
SERVERS: dict[str, dict[str, Any]] = {
    "splittime": {
        "/v1/models": models("splittime", max_model_len=2048),
        "/": {"name": "splittime", "version": "0.1.0"},
        "/stats": SPLITTIME_STATS,
        "/metrics": "splittime_steps_total 5\nvllm:num_requests_waiting 3\n",
    },
    "vllm": {
        "/v1/models": models("vllm", max_model_len=512),
        "/version": {"version": "0.32.0"},
        "/metrics": metrics_of("vllm_during"),
    },
    "sglang": {
        "/v1/models": models("sglang", max_model_len=4096),
        "/server_info": {"version": "0.5.4"},
        "/metrics": metrics_of("sglang_after"),
    },
    "tgi": {
        "/v1/models": models("the-model"),
        "/info": {"model_id": "the-model", "version": "3.3.0", "max_total_tokens": 1024},
        "/metrics": metrics_of("tgi_after"),
    },
    "llama.cpp": {
        "/v1/models": models("llamacpp", meta={"n_ctx": 512}),
        "/props": {"build_info": "b1-abc"},
        "/metrics": metrics_of("llama_cpp_during"),
    },
    "mock": {"/v1/models": models("splittime-mock", max_model_len=9)},
    "unknown": {"/v1/models": models("somebody")},
}
VERSIONS = {"splittime": "0.1.0", "vllm": "0.32.0", "sglang": "0.5.4", "tgi": "3.3.0", "llama.cpp": "b1-abc"}
LENGTHS = {"splittime": 2048, "vllm": 512, "sglang": 4096, "tgi": 1024, "llama.cpp": 512, "mock": 9}


@contextlib.asynccontextmanager
async def serving(answers: dict[str, Any], api_key: str | None = None) -> AsyncIterator[str]:
    """A server with canned answers: JSON for what is no text, 404 for the rest."""

    async def answer(request: web.Request) -> web.StreamResponse:
        if api_key is not None and request.headers.get("Authorization") != f"Bearer {api_key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        found = answers.get(request.path)
        if found is None:
            return web.json_response({"error": "not found"}, status=404)
        return web.Response(text=found) if isinstance(found, str) else web.json_response(found)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


def on(answers: dict[str, Any], work: Callable[[Session, str], Awaitable[Any]], api_key: str | None = None) -> Any:
    async def main() -> Any:
        async with serving(answers, api_key) as url, Session() as session:
            return await work(session, url)

    return asyncio.run(main())


@pytest.mark.parametrize("kind", sorted(SERVERS))
def test_recognises_and_probes(kind: str) -> None:
    arm: Arm = on(SERVERS[kind], lambda session, url: open_arm(session, Target(url=url)))
    assert (arm.kind, arm.model) == (kind, "the-model")
    assert (arm.version, arm.max_model_len) == (VERSIONS.get(kind), LENGTHS.get(kind))
    assert len(arm.connect_ns) == 20
    assert len(arm.round_trip_ns) == 50
    assert all(took_ns > 0 for took_ns in arm.connect_ns + arm.round_trip_ns)
    assert bool(arm.metrics_before) == ("/metrics" in SERVERS[kind])
    assert bool(arm.notes) == (kind == "unknown")


@pytest.mark.parametrize("kind", ["splittime", "vllm", "sglang", "tgi", "llama.cpp"])
def test_recognises_by_metrics_behind_a_gateway(kind: str) -> None:
    """The gateway gives its own list of models."""
    answers = {"/v1/models": models("gateway"), "/metrics": SERVERS[kind]["/metrics"]}
    assert on(answers, lambda session, url: open_arm(session, Target(url=url))).kind == kind


def test_url_with_v1_or_without_a_scheme_and_a_model_of_ones_own() -> None:
    arm = on(SERVERS["vllm"], lambda session, url: open_arm(session, Target(url=url.removeprefix("http://"))))
    assert (arm.kind, len(arm.connect_ns)) == ("vllm", 20)
    arm = on(SERVERS["vllm"], lambda session, url: open_arm(session, Target(url=url + "/v1/", model="mine")))
    assert (arm.kind, arm.model, arm.version) == ("vllm", "mine", "0.32.0")


@pytest.mark.parametrize("kind", ["vllm", "sglang", "tgi", "llama.cpp"])
def test_without_metrics_a_note_says_how_to_get_them(kind: str) -> None:
    answers = {path: answer for path, answer in SERVERS[kind].items() if path != "/metrics"}

    async def work(session: Session, url: str) -> tuple[Arm, Any]:
        arm = await open_arm(session, Target(url=url))
        return arm, await sample(session, arm, Target(url=url))

    arm, gauges = on(answers, work)
    assert arm.metrics_before == {}
    assert len(arm.notes) == 1
    assert kind in arm.notes[0]
    assert gauges == ServerGauges()


GAUGES = {
    "splittime": ServerGauges(3, 4, 0.75),
    "sglang": ServerGauges(7, 3, 0.28),
    "tgi": ServerGauges(6, 4),
    "mock": ServerGauges(),
    "unknown": ServerGauges(),
}


@pytest.mark.parametrize("kind", sorted(GAUGES))
def test_sample_is_the_servers_state(kind: str) -> None:
    async def work(session: Session, url: str) -> Any:
        return await sample(session, await open_arm(session, Target(url=url)), Target(url=url))

    assert on(SERVERS[kind], work) == GAUGES[kind]


def test_sample_of_the_recorded_servers() -> None:
    """While four slots were full."""

    async def work(session: Session, url: str) -> Any:
        return await sample(session, await open_arm(session, Target(url=url)), Target(url=url))

    vllm, llama = on(SERVERS["vllm"], work), on(SERVERS["llama.cpp"], work)
    assert (vllm.running, vllm.waiting >= 0, 0 < vllm.kv_usage < 1, vllm.deferred) == (4, True, True, 0)
    assert (0 < llama.running <= 4, llama.kv_usage, llama.deferred) == (True, None, None)


@pytest.mark.parametrize("kind", sorted(SERVERS))
def test_closing_scrapes_and_probes_again(kind: str) -> None:
    async def work(session: Session, url: str) -> Arm:
        arm = await open_arm(session, Target(url=url))
        return await close_arm(session, arm, Target(url=url), [])

    arm = on(SERVERS[kind], work)
    assert len(arm.round_trip_ns) == 100
    assert arm.metrics_after == arm.metrics_before


async def test_a_server_that_died_is_a_note() -> None:
    async with Session() as session:
        async with serving(SERVERS["splittime"]) as url:
            arm = await open_arm(session, Target(url=url))
        arm = await close_arm(session, arm, Target(url=url), [])
    assert arm.metrics_after == {}
    assert arm.accounts == ()
    assert any("did not answer any more" in note for note in arm.notes)


def test_the_key_is_sent_and_a_wrong_one_refused() -> None:
    def work(key: str | None) -> Callable[[Session, str], Awaitable[Arm]]:
        return lambda session, url: open_arm(session, Target(url=url, api_key=key))

    assert on(SERVERS["vllm"], work("sesame"), api_key="sesame").kind == "vllm"
    for key in ("other", None):
        with pytest.raises(ConfigError, match="refuses"):
            on(SERVERS["vllm"], work(key), api_key="sesame")


def test_nothing_there_is_refused_with_a_way_out() -> None:
    async def main() -> None:
        async with Session() as session:
            async with serving({}) as url:
                pass
            await open_arm(session, Target(url=url))

    with pytest.raises(EngineError, match="nothing answers") as refused:
        asyncio.run(main())
    assert "running" in (refused.value.info.hint or "")


@pytest.mark.parametrize(
    "answers",
    [
        {"/v1/models": "<html>a page</html>"},
        {"/v1/models": []},
        {"/v1/models": {"data": None}},
        {"/v1/models": {"data": ["text"]}},
        {"/v1/models": models("vllm", max_model_len="many"), "/version": ["a list"]},
        {"/v1/models": models("splittime"), "/": "text", "/stats": {"engine": []}, "/ledger/requests": {"accounts": 5}},
        {"/metrics": "not { metrics\nvllm:a 1 2 3\n"},
        {},
    ],
)
def test_odd_answers_are_no_errors(answers: dict[str, Any]) -> None:
    async def work(session: Session, url: str) -> Arm:
        arm = await open_arm(session, Target(url=url))
        await sample(session, arm, Target(url=url))
        return await close_arm(session, arm, Target(url=url), [])

    arm = on(answers, work)
    assert arm.accounts == ()
    assert arm.max_model_len is None


def test_block_size_is_read_from_the_labels_of_metrics() -> None:
    """So that bench knows what a prefix cache should find."""

    async def work(session: Session, url: str) -> Any:
        return (await server_limits(Target(url=url))).block_size

    assert on(SERVERS["vllm"], work) == 128
    assert on(SERVERS["sglang"], work) == 16
    assert on(SERVERS["llama.cpp"], work) is None


def test_a_block_size_that_is_no_number_is_none() -> None:
    """A raised 2 is a digit to Python, and no number."""

    async def work(session: Session, url: str) -> Any:
        return (await server_limits(Target(url=url))).block_size

    odd = {"/metrics": 'vllm:cache_config_info{block_size="\u00b2"} 1.0\n'}
    assert on({**SERVERS["vllm"], **odd}, work) is None
