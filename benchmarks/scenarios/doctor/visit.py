"""One visit: a real `splittime serve`, a load, and what the doctor says of the two books, with each cure replayed."""

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from benchmarks.report import conditions
from benchmarks.scenarios.doctor.beside import with_quota
from benchmarks.scenarios.doctor.large_models import model
from benchmarks.scenarios.doctor.patients import WRITTEN, Patient
from benchmarks.scenarios.doctor.proxies import proxy
from benchmarks.scenarios.doctor.wards import Ward
from benchmarks.server_process import free_port, get_json, served, wait_until_ready
from splittime.bench.book.records import Run, save
from splittime.bench.book.slo import parse_slo
from splittime.bench.run import run_schedule
from splittime.bench.schedule import Schedule
from splittime.diagnose.books import Books, books_from_answers, books_from_run, books_from_server
from splittime.diagnose.doctor import Diagnosis, diagnose
from splittime.diagnose.sized import sized
from splittime.wire.target import RunOptions, Target

SABOTAGE = str(Path(__file__).with_name("sabotage"))
BLOCK_S, BLOCK_EVERY_S = 0.08, 0.15
MEASURED_WITHIN_S = 30.0
TRIALS = ("speculation_would_pay",)  # told of the healthy: nothing is wrong with a server that does not guess
IN_CACHE = ("weight_bandwidth_bound", "kv_bandwidth_bound")  # no limits of what the processor's own cache holds


@cache
def commit() -> str:
    """With a `+` behind it if the code differs from it."""
    found = conditions()
    return str(found["commit"]) + ("+" if found["is_dirty"] else "")


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario's outcome: what was expected to be named first, and what was named, in the order of its telling.

    false: illnesses that the ward does not have, and limits that are none. cpu_wait: the share of the requests' time
    in which the engine had no processor, which tells how quiet the machine was.
    """

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
    false: tuple[str, ...] = ()
    exit_code: int = 0
    cpu_wait: float = 0.0

    @property
    def is_named(self) -> bool:
        return self.expected in self.found or self.expected in self.limits

    @property
    def is_right(self) -> bool:
        named = (*self.found, *(self.limits if self.expected in self.limits else ()), None)[0]
        return named == self.expected and not (self.expected is None and self.could_not_tell)

    @property
    def is_clean(self) -> bool:
        """Nothing found, enough seen to say so, and no limit that is none."""
        return self.exit_code == 0 and not self.false


class Visit(NamedTuple):
    """seen, and what it was seen in. schedule: what was asked."""

    seen: Seen
    books: Books
    diagnosis: Diagnosis
    schedule: Schedule


def visit(ward: Ward, patient: Patient, seed: int, keep: Path | None = None) -> Visit:
    """Begin a server, make the load, diagnose, end the server."""
    begin = time.monotonic()
    with admitted(ward, patient) as (asked, settings):
        schedule = ward.load(seed, asked)
        books = books_of(ward, asked, schedule, settings)
    if keep is not None and books.run is not None:
        save(books.run, keep / f"{ward.name.replace(' ', '-')}-{seed}.json")
    diagnosis = sized(books, diagnose(books))
    return Visit(_seen(ward, seed, books, diagnosis, time.monotonic() - begin), books, diagnosis, schedule)


@contextmanager
def admitted(ward: Ward, patient: Patient) -> Iterator[tuple[Patient, tuple[str, ...]]]:
    """Who is asked (a model of the ward's own gets the load as it is written down), and the server's arguments."""
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        if ward.model is not None:
            patient = msgspec.structs.replace(WRITTEN, arguments=(str(held.enter_context(model(ward.model))),))
        held.enter_context(_sabotaged(ward.sabotage, patient))
        yield patient, (*patient.arguments, *ward.flags(folder, patient))


def books_of(ward: Ward, patient: Patient, schedule: Schedule, settings: tuple[str, ...]) -> Books:
    """The books of a server with these settings and this load."""
    if ward.is_early or ward.embeds:
        return _books_without_bench(ward, schedule, settings)
    with _begun(ward, settings) as url:
        return asyncio.run(_books(url, ward, patient, schedule))


@contextmanager
def _begun(ward: Ward, settings: tuple[str, ...]) -> Iterator[str]:
    with ExitStack() as held:
        leave = held.enter_context(with_quota(ward.quota)) if ward.quota is not None else lambda: None
        url = held.enter_context(served(*settings))
        leave()
        _until_measured(url)
        yield url


def false_names(ward: Ward, books: Books, diagnosis: Diagnosis) -> tuple[str, ...]:
    """Illnesses that the ward does not have. And limits that are none: memory does not bind what fits into the
    processor's own cache."""
    found = [finding.name for finding in diagnosis.illnesses if finding.name not in (*ward.may_be_named, *TRIALS)]
    facts = books.facts
    if facts is None or facts.machine is None or facts.cost is None:
        return tuple(found)
    block_bytes = facts.settings.get("kv_bytes_per_block") or 0
    kv_bytes = max((step.blocks_used for step in books.steps), default=0) * block_bytes
    held = dict(zip(IN_CACHE, (facts.cost.weight_bytes, kv_bytes), strict=True))
    limits = [f.name for f in diagnosis.limits if f.name in held and f.name != ward.expected]
    return (*found, *(name for name in limits if held[name] < (facts.machine.cache_bytes or 0)))


def _seen(ward: Ward, seed: int, books: Books, diagnosis: Diagnosis, seconds: float) -> Seen:
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
        false=false_names(ward, books, diagnosis),
        exit_code=diagnosis.exit_code,
        cpu_wait=round(sum(one.share for one in diagnosis.spent if one.owner == "cpu_wait"), 3),
    )


def _until_measured(url: str) -> None:
    """A server that nobody uses yet measures its machine's ceilings; a busy one cannot, and then has no floors."""
    deadline_s = time.monotonic() + MEASURED_WITHIN_S
    while time.monotonic() < deadline_s:
        machine = get_json(f"{url}/ledger/facts")["machine"]
        if machine is not None and machine["read_bytes_per_s"] and machine["operations_per_s"]:
            return
        time.sleep(0.1)


async def _books(url: str, ward: Ward, patient: Patient, schedule: Schedule) -> Books:
    options = RunOptions(max_in_flight=ward.max_in_flight, slo=parse_slo(ward.slo) if ward.slo else {})
    async with _way(url, ward, patient) as address:
        blocking = asyncio.create_task(_block()) if ward.blocks_client else None
        beside = ward.beside(url) if ward.beside is not None else nullcontext()
        try:
            async with beside:
                run: Run = await run_schedule(schedule, [Target(url=address)], options)
        finally:
            if blocking is not None:
                blocking.cancel()
    if ward.has_gateway:  # whose own book is of the way only
        return books_from_server(get_json, url, 10_000)
    return books_from_run(run)


@asynccontextmanager
async def _way(url: str, ward: Ward, patient: Patient) -> AsyncIterator[str]:
    """The server itself, or what is before it."""
    if ward.has_gateway:
        with _gateway(url, patient.served) as address:
            yield address
    elif ward.spoiler is not None:
        async with proxy(urlsplit(url).port or 80, ward.spoiler(patient)) as address:
            yield address
    else:
        yield url


@contextmanager
def _gateway(url: str, name: str) -> Iterator[str]:
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "gateway.toml"
        config.write_text(f'port = {port}\n[[upstream]]\nname = "a"\nurl = "{url}"\nmodels = ["{name}"]\n')
        command = [sys.executable, "-m", "splittime.cli.entry", "gateway", "--config", str(config)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(f"http://127.0.0.1:{port}", process, 60)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


async def _block() -> None:
    """A client with other work in its event loop."""
    while True:
        await asyncio.sleep(BLOCK_EVERY_S)
        time.sleep(BLOCK_S)


@contextmanager
def _sabotaged(what: str, patient: Patient) -> Iterator[None]:
    if not what:
        yield
        return
    before = {name: os.environ.get(name) for name in ("SABOTAGE", "SABOTAGE_STEP_S", "PYTHONPATH")}
    paths = [SABOTAGE, *filter(None, [before["PYTHONPATH"]])]
    step_s = str(patient.pace.step_s)
    os.environ.update(SABOTAGE=what, SABOTAGE_STEP_S=step_s, PYTHONPATH=os.pathsep.join(paths))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value


# ---- loads that `splittime bench` does not make: embeddings, and one that begins before the server is ready


def _books_without_bench(ward: Ward, schedule: Schedule, settings: tuple[str, ...]) -> Books:
    if not ward.is_early:
        with _begun(ward, settings) as url:
            return asyncio.run(_asked(url, schedule, ward.embeds))
    port = free_port()
    command = [sys.executable, "-m", "splittime.cli.main", "serve", "--port", str(port), *settings]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        return asyncio.run(_asked(f"http://127.0.0.1:{port}", schedule))
    finally:
        process.terminate()
        process.wait(30)


async def _asked(url: str, schedule: Schedule, embeds: bool = False) -> Books:
    async with aiohttp.ClientSession() as session:
        begin_s = time.monotonic()
        asked = [asyncio.create_task(_ask(session, url, planned, begin_s, embeds)) for planned in schedule.requests]
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


async def _ask(session: aiohttp.ClientSession, url: str, planned: Any, begin_s: float, embeds: bool) -> None:
    await asyncio.sleep(max(0.0, begin_s + planned.at_ns / 1e9 - time.monotonic()))
    body = {"input": list(planned.prompt)} if embeds else {"prompt": list(planned.prompt)}
    asked = body if embeds else body | {"max_tokens": planned.output_tokens, "ignore_eos": True}
    with suppress(aiohttp.ClientError):  # not even listening yet
        async with session.post(f"{url}/v1/{'embeddings' if embeds else 'completions'}", json=asked) as response:
            await response.read()


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url, params={"limit": "10000"} if "facts" not in url else None) as response:
        return await response.json()
