"""One visit: a real `splittime serve`, a load, and what the doctor says of the two books."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from benchmarks.report import conditions
from benchmarks.scenarios.doctor.illnesses import Ward
from benchmarks.scenarios.doctor.large_models import model
from benchmarks.scenarios.doctor.proxies import proxy
from benchmarks.server_process import free_port, get_json, served
from splittime.bench.book.records import Run, save
from splittime.bench.run import run_schedule
from splittime.bench.schedule import Schedule
from splittime.diagnose.books import Books, books_from_answers, books_from_run
from splittime.diagnose.doctor import Diagnosis, diagnose
from splittime.wire.target import Target

SABOTAGE = str(Path(__file__).with_name("sabotage"))
BLOCK_S, BLOCK_EVERY_S = 0.08, 0.15
MEASURED_WITHIN_S = 30.0


@cache
def commit() -> str:
    """With a `+` behind it if the code differs from it."""
    found = conditions()
    return str(found["commit"]) + ("+" if found["is_dirty"] else "")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario's outcome: what was expected to be named first, and what was named, in order."""

    name: str
    expected: str | None
    seed: int
    found: tuple[str, ...]
    shares: tuple[float, ...]
    limits: tuple[str, ...]
    could_not_tell: bool
    requests: int
    steps: int
    seconds: float
    commit: str = ""

    @property
    def is_named(self) -> bool:
        return self.expected in self.found or self.expected in self.limits

    @property
    def is_right(self) -> bool:
        named = (*self.found, *(self.limits if self.expected in self.limits else ()), None)[0]
        return named == self.expected and not (self.expected is None and self.could_not_tell)


def visit(ward: Ward, seed: int, keep: Path | None = None) -> Seen:
    """Begin a server, make the load, diagnose, end the server."""
    begin = time.monotonic()
    with _sabotaged(ward.sabotage), model(ward.model) if ward.model else nullcontext() as folder:
        ward = msgspec.structs.replace(ward, settings=(*([str(folder)] if folder else []), *ward.settings))
        books = _early_books(ward, seed) if ward.is_early else _books(ward, seed, keep)
    return _seen(ward, seed, diagnose(books), time.monotonic() - begin)


def visits(ward: Ward, seeds: list[int], keep: Path | None = None) -> Iterator[Seen]:
    """The same server for several loads."""
    with served(*ward.settings) as url:
        for seed in seeds:
            begin = time.monotonic()
            run = asyncio.run(_run(url, ward, ward.load(seed)))
            _keep(run, ward, seed, keep)
            yield _seen(ward, seed, diagnose(books_from_run(run)), time.monotonic() - begin)


def _seen(ward: Ward, seed: int, diagnosis: Diagnosis, seconds: float) -> Seen:
    return Seen(
        name=ward.name,
        expected=ward.expected,
        seed=seed,
        found=tuple(finding.name for finding in diagnosis.illnesses),
        shares=tuple(round(finding.share_of_time, 3) for finding in diagnosis.illnesses),
        limits=tuple(finding.name for finding in diagnosis.limits),
        could_not_tell=not diagnosis.could_tell,
        requests=diagnosis.num_requests,
        steps=diagnosis.num_steps,
        seconds=round(seconds, 1),
        commit=commit(),
    )


def _books(ward: Ward, seed: int, keep: Path | None) -> Books:
    with served(*ward.settings) as url:
        _until_measured(url)
        run = asyncio.run(_run(url, ward, ward.load(seed)))
    _keep(run, ward, seed, keep)
    return books_from_run(run)


def _until_measured(url: str) -> None:
    """A server that nobody uses yet measures its machine's ceilings; a busy one cannot, and then has no floors."""
    deadline_s = time.monotonic() + MEASURED_WITHIN_S
    while time.monotonic() < deadline_s:
        machine = get_json(f"{url}/ledger/facts")["machine"]
        if machine is not None and machine["read_bytes_per_s"]:
            return
        time.sleep(0.1)


def _keep(run: Run, ward: Ward, seed: int, folder: Path | None) -> None:
    if folder is not None:
        save(run, folder / f"{ward.name.replace(' ', '-')}-{seed}.json")


async def _run(url: str, ward: Ward, schedule: Schedule) -> Run:
    async with _way(url, ward) as address:
        blocking = asyncio.create_task(_block()) if ward.blocks_client else None
        beside = ward.beside(url) if ward.beside is not None else nullcontext()
        try:
            async with beside:
                run = await run_schedule(schedule, [Target(url=address)])
        finally:
            if blocking is not None:
                blocking.cancel()
    return run


@asynccontextmanager
async def _way(url: str, ward: Ward) -> AsyncIterator[str]:
    """The server itself, or a proxy before it."""
    if ward.spoiler is None:
        yield url
        return
    async with proxy(urlsplit(url).port or 80, ward.spoiler()) as address:
        yield address


async def _block() -> None:
    """A client with other work in its event loop."""
    while True:
        await asyncio.sleep(BLOCK_EVERY_S)
        time.sleep(BLOCK_S)


@contextmanager
def _sabotaged(what: str) -> Iterator[None]:
    if not what:
        yield
        return
    before = {name: os.environ.get(name) for name in ("SABOTAGE", "PYTHONPATH")}
    paths = [SABOTAGE, *filter(None, [before["PYTHONPATH"]])]
    os.environ.update(SABOTAGE=what, PYTHONPATH=os.pathsep.join(paths))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


# ---- a load that begins before the server is ready: a load generator would wait for it


def _early_books(ward: Ward, seed: int) -> Books:
    port = free_port()
    command = [sys.executable, "-m", "splittime.cli.main", "serve", "--port", str(port), *ward.settings]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(_early(f"http://127.0.0.1:{port}", ward.load(seed)))
    finally:
        process.terminate()
        process.wait(30)


async def _early(url: str, schedule: Schedule) -> Books:
    async with aiohttp.ClientSession() as session:
        begin_s = time.monotonic()
        asked = [asyncio.create_task(_ask(session, url, planned, begin_s)) for planned in schedule.requests]
        await asyncio.gather(*asked)
        while not await _is_ready(session, url):  # on a busy machine the load may be over before the start is
            await asyncio.sleep(0.1)
        answers = {name: await _get(session, f"{url}/ledger/{name}") for name in ("requests", "steps")}
        facts = await _get(session, f"{url}/ledger/facts")
        return books_from_answers(facts, answers["requests"], answers["steps"], url)


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    with suppress(aiohttp.ClientError):
        async with session.get(f"{url}/ready") as response:
            return response.status == 200
    return False


async def _ask(session: aiohttp.ClientSession, url: str, planned: Any, begin_s: float) -> None:
    await asyncio.sleep(max(0.0, begin_s + planned.at_ns / 1e9 - time.monotonic()))
    body = {"model": "splittime-code", "prompt": list(planned.prompt), "max_tokens": planned.output_tokens}
    with suppress(aiohttp.ClientError):  # not even listening yet
        async with session.post(f"{url}/v1/completions", json=body) as response:
            await response.read()


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url, params={"limit": "10000"} if "facts" not in url else None) as response:
        return await response.json()
