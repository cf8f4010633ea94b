"""One server of a run, from outside: which it is, how far away it is, and what it says of itself.

    arm = await open_arm(session, target)                     before the load: recognise, probe, scrape
    gauges = await sample(session, arm, target)               meanwhile, in one cheap GET
    arm = await close_arm(session, arm, target, outcomes)     after it: scrape, probe again, fetch its own book

Nothing is raised because a server lacks something: it is absent in the arm, and `Arm.notes` says in a sentence what
cannot be told and how it could. Only a server that does not answer at all is refused, by `open_arm`, before the load.
A splittime server also exports three gauges under vLLM's names, so it is asked for first.

What the way to a server costs when it has nothing to do is probed on its own, before and after the load. A connect is
from asking for a connection to having one (with TLS, if the address says https), the name looked up before. A round
trip is one GET of a cheap path on a connection that was open already: so it holds the network both ways, the server's
HTTP layer and this client's, but no queue and no model. It is what `join` allows for the network.

A splittime server's own book of a run's requests is fetched after the load: accounts, steps and facts. An account
closes just after the last byte that the client read, so what is missing is asked for again, for as long as more come
within `PATIENCE_S`. What stays missing is a note: the ring that a server without a ledger file keeps its accounts in is
bounded.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import aiohttp
import msgspec

from splittime.bench.book.records import Arm, Outcome
from splittime.bench.book.requests import sent_as
from splittime.core.errors import ConfigError
from splittime.ledger.account import ClosedAccount
from splittime.ledger.account_json import account_from_json
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord
from splittime.present.terminal import clipped
from splittime.wire.connection import addresses
from splittime.wire.dialects import DIALECTS, Samples, parse
from splittime.wire.scrape import MAX_BODY_BYTES, Response, ask_first, get, get_json
from splittime.wire.target import Address, Target

OWNERS = {"splittime": "splittime", "vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp"}
MOCK = "mock"
MAX_NAME_CHARS = 500
NUM_CONNECTS = 20
NUM_ROUND_TRIPS = 50
PROBE_TIMEOUT_S = 5.0

now_ns = time.monotonic_ns


class ServerGauges(NamedTuple):
    """Requests waiting and running, the used share of the KV cache, and of the waiting ones those that wait for
    something of their own; None for what is not told."""

    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    deferred: float | None = None


NO_GAUGES = ServerGauges()


class FirstAnswers(NamedTuple):
    """What the first questions brought: the answer to /v1/models, its first card, /info, and /metrics."""

    answer: Response
    card: dict[str, Any]
    info: dict[str, Any]
    asked_metrics: Response | None

    @property
    def metrics(self) -> Samples:
        return self.asked_metrics.samples if self.asked_metrics is not None else {}

    @property
    def model(self) -> str | None:
        """The name of the first model, if it is one."""
        name = self.card.get("id") or self.info.get("model_id")
        return name if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS else None


async def open_arm(session: aiohttp.ClientSession, target: Target) -> Arm:
    """Raises `EngineError` if nothing answers there, `ConfigError` if the server wants another key."""
    seen = await _first_answers(session, target)
    kind = recognise(seen)
    version, max_model_len = await _details(session, target, kind, seen)
    path = cheap_path(kind)
    return Arm(
        url=target.url,
        kind=kind,
        model=target.model or seen.model,
        version=version,
        max_model_len=max_model_len,
        connect_ns=await connect_times(target),
        round_trip_ns=await round_trips(session, target, path),
        metrics_before=seen.metrics,
        notes=tuple(_notes(kind, seen, target.model)),
    )


async def _first_answers(session: aiohttp.ClientSession, target: Target) -> FirstAnswers:
    answer = await ask_first(session, target)
    listed = answer.json
    cards = listed.get("data") if isinstance(listed, dict) else None
    card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
    info = None if str(card.get("owned_by")) in OWNERS else await get_json(session, target, "/info")
    return FirstAnswers(answer, card, info if isinstance(info, dict) else {}, await get(session, target, "/metrics"))


def recognise(seen: FirstAnswers) -> str:
    """The kind of server, by who says to own the model, by its metrics' names, by what only it answers."""
    owner = str(seen.card.get("owned_by", "")).lower()
    software = seen.answer.headers.get("Server", "").lower()
    if MOCK in owner or MOCK in software:
        return MOCK
    if owner in OWNERS:
        return OWNERS[owner]
    if any(name.startswith("splittime_") for name in seen.metrics):
        return "splittime"
    for kind, dialect in DIALECTS.items():
        if any(name.startswith(dialect.prefix) for name in seen.metrics):
            return kind
    if "max_total_tokens" in seen.info and "model_id" in seen.info:
        return "tgi"
    return "llama.cpp" if software == "llama.cpp" else "unknown"


VERSION_AT = {
    "splittime": ("/", "version"),
    "vllm": ("/version", "version"),
    "sglang": ("/server_info", "version"),
    "llama.cpp": ("/props", "build_info"),
}


async def _details(
    session: aiohttp.ClientSession, target: Target, kind: str, seen: FirstAnswers
) -> tuple[str | None, int | None]:
    """Version and longest context, each where this kind of server says it."""
    version = seen.info.get("version")
    if kind in VERSION_AT:
        path, field = VERSION_AT[kind]
        about = await get_json(session, target, path)
        version = about.get(field) if isinstance(about, dict) else None
    meta = seen.card.get("meta")
    n_ctx = meta.get("n_ctx") if isinstance(meta, dict) else None
    length = seen.card.get("max_model_len") or n_ctx or seen.info.get("max_total_tokens")
    return (clipped(str(version)) if version is not None else None), (length if is_whole(length) else None)


def is_whole(value: Any) -> bool:
    """A number that can count something; what else a server says counts as not told."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**53


def cheap_path(kind: str) -> str:
    """A path that answers without the model."""
    if kind in DIALECTS:
        return DIALECTS[kind].cheap_path
    return "/health" if kind == "splittime" else "/v1/models"


def _notes(kind: str, seen: FirstAnswers, model: str | None) -> list[str]:
    notes = []
    named = seen.card.get("id") or seen.info.get("model_id")
    if model is None and named is not None and seen.model is None:
        text = clipped(repr(named)[:MAX_NAME_CHARS])
        notes.append(f"The server calls its first model {text}, which is no name, so none was sent: --model gives one.")
    if kind == "unknown":
        notes.append("The server is none that is known here; it is measured from outside only.")
    if seen.asked_metrics is not None and seen.asked_metrics.is_too_long:
        notes.append(_too_long("/metrics"))
    elif kind in DIALECTS and not seen.metrics:
        hint = DIALECTS[kind].metrics_hint
        notes.append(f"This {kind} server shows no metrics, so it tells nothing of its inside. {hint}".strip())
    return notes


def _too_long(path: str) -> str:
    return f"The server's {path} is longer than {MAX_BODY_BYTES:,} bytes and was not read."


async def sample(session: aiohttp.ClientSession, arm: Arm, target: Target) -> ServerGauges:
    if arm.kind == "splittime":
        return _own_gauges(await get_json(session, target, "/stats"))
    if arm.kind not in DIALECTS or not arm.metrics_before:
        return NO_GAUGES
    answer = await get(session, target, "/metrics")
    if answer is None or answer.status != 200:
        return NO_GAUGES
    dialect = DIALECTS[arm.kind]
    wanted = tuple(name for state in ServerGauges._fields for name in dialect.metrics(state))
    samples = parse(answer.body.decode("utf-8", "replace"), wanted)
    found = {state: dialect.state_values(state, samples) for state in ServerGauges._fields}
    return ServerGauges(**{state: _of_many(state, known) for state, known in found.items() if known})


def _of_many(state: str, known: Sequence[float]) -> float:
    """Over a server's engines: requests together, the use of the fullest cache."""
    return max(known) if state == "kv_usage" else sum(known)


def _own_gauges(stats: Any) -> ServerGauges:
    """From a splittime server's /stats."""
    engine = stats.get("engine") if isinstance(stats, dict) else None
    if not isinstance(engine, dict):
        return NO_GAUGES
    blocks, used = _number(engine.get("blocks_total")), _number(engine.get("blocks_used"))
    usage = used / blocks if blocks and used is not None else None
    return ServerGauges(_number(engine.get("num_waiting")), _number(engine.get("num_running")), usage)


def _number(value: Any) -> float | None:
    """Returns what a server says of a quantity, if it is one."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**53 else None


async def close_arm(session: aiohttp.ClientSession, arm: Arm, target: Target, outcomes: Sequence[Outcome]) -> Arm:
    """The arm with all that can be known after the load. Never raises: what the server does not tell is a note."""
    asked_metrics = await get(session, target, "/metrics")
    metrics = asked_metrics.samples if asked_metrics is not None else {}
    connects, trips = await connect_times(target), await round_trips(session, target, cheap_path(arm.kind))
    notes = list(arm.notes)
    if arm.round_trip_ns and not trips:
        notes.append("The server did not answer any more after the load.")
    if asked_metrics is not None and asked_metrics.is_too_long and _too_long("/metrics") not in notes:
        notes.append(_too_long("/metrics"))
    arm = msgspec.structs.replace(
        arm,
        connect_ns=arm.connect_ns + connects,
        round_trip_ns=arm.round_trip_ns + trips,
        metrics_after=metrics,
        notes=tuple(notes),
    )
    if not trips or not await _keeps_books(session, arm, target):
        return arm
    return await fetch(session, arm, target, outcomes)


async def _keeps_books(session: aiohttp.ClientSession, arm: Arm, target: Target) -> bool:
    """Returns whether the server has a ledger: our own has, and a vLLM that our books are attached to."""
    if arm.kind == "vllm":
        facts = await get_json(session, target, "/ledger/facts")
        return isinstance(facts, dict) and "engine" in facts
    return arm.kind == "splittime"


async def connect_times(target: Target, count: int = NUM_CONNECTS) -> tuple[int, ...]:
    """Returns how long each of `count` fresh connections took, one after another, to the first address that takes
    any."""
    address = target.address
    times_ns: list[int] = []
    for place in await _places(address):
        with contextlib.suppress(OSError, TimeoutError):
            for _ in range(count):
                times_ns.append(await _connect(place, address))
        if times_ns:
            break
    return tuple(times_ns)


async def _places(address: Address) -> list[str]:
    """Returns where the name leads, each once: `localhost` may be two addresses with a server on one of them."""
    with contextlib.suppress(ConfigError):
        return list(dict.fromkeys(str(place[0]) for _, place in await addresses(address)))
    return []


async def _connect(place: str, address: Address) -> int:
    begin_ns = now_ns()
    name = address.host if address.is_tls else None
    async with asyncio.timeout(PROBE_TIMEOUT_S):
        _, writer = await asyncio.open_connection(place, address.port, ssl=address.is_tls, server_hostname=name)
    took_ns = now_ns() - begin_ns
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            await writer.wait_closed()
    return took_ns


async def round_trips(
    session: aiohttp.ClientSession, target: Target, path: str, count: int = NUM_ROUND_TRIPS
) -> tuple[int, ...]:
    """Returns how long each of `count` GETs took after one that opened the connection; ends at the first that fails."""
    times_ns: list[int] = []
    for _ in range(count + 1):
        begin_ns = now_ns()
        if await get(session, target, path, PROBE_TIMEOUT_S) is None:
            break
        times_ns.append(now_ns() - begin_ns)
    return tuple(times_ns[1:])


MAX_LIMIT = 10_000  # of /ledger/requests and /ledger/steps
MARGIN = 200  # accounts of others that may lie between ours
LIST_TIMEOUT_S = 120.0  # thousands of accounts are tens of megabytes
MAX_LIST_BYTES = 512 * 2**20
PATIENCE_S = 2.0
PAUSE_S = 0.05
AT_ONCE = 8

Accounts = dict[str, list[ClosedAccount]]


def by_request(accounts: Sequence[ClosedAccount]) -> Accounts:
    """Accounts by the id that was sent, several where there are several choices; of two with one name the later."""
    latest = {account.request_id: account for account in accounts}
    found: Accounts = {}
    for account in latest.values():
        found.setdefault(sent_as(account), []).append(account)
    return found


async def fetch(session: aiohttp.ClientSession, arm: Arm, target: Target, outcomes: Sequence[Outcome]) -> Arm:
    """Never raises: what cannot be had is a note."""
    wanted = [outcome.request_id for outcome in outcomes if outcome.sent_ns is not None]
    found = await _accounts(session, target, wanted)
    accounts = tuple(account for request_id in wanted for account in found.get(request_id, ()))
    steps, step_notes = await _steps(session, target, accounts)
    facts = converted(await get_json(session, target, "/ledger/facts"), ServerFacts)
    missing = len(wanted) - len(found)
    notes = [*arm.notes, *step_notes]
    if missing:
        hint = "start the server with --ledger-file, which keeps more than its memory does"
        notes.append(f"The server has no account of {missing} of {len(wanted)} requests; if they were served, {hint}.")
    return msgspec.structs.replace(arm, accounts=accounts, steps=steps, facts=facts, notes=tuple(notes))


async def _accounts(session: aiohttp.ClientSession, target: Target, wanted: Sequence[str]) -> Accounts:
    """The latest accounts in one GET; then one by one, as long as more come or patience lasts."""
    limit = min(MAX_LIMIT, len(wanted) + MARGIN)
    listed = await get_json(session, target, f"/ledger/requests?limit={limit}", LIST_TIMEOUT_S, MAX_LIST_BYTES)
    accounts, ours = _read_all(listed), set(wanted)
    found = {name: choices for name, choices in by_request(accounts).items() if name in ours}
    if len(accounts) == limit:
        found.pop(sent_as(accounts[0]), None)  # the list may begin in the middle of its choices
    until = time.monotonic() + PATIENCE_S
    while missing := [name for name in wanted if name not in found]:
        for start in range(0, len(missing), AT_ONCE):
            names = missing[start : start + AT_ONCE]
            answers = await asyncio.gather(*(_one(session, target, name) for name in names))
            came = {name: choices for name, choices in zip(names, answers, strict=True) if choices}
            found.update(came)
            if came:
                until = time.monotonic() + PATIENCE_S
            elif time.monotonic() > until:
                return found
        await asyncio.sleep(PAUSE_S)
    return found


async def _one(session: aiohttp.ClientSession, target: Target, request_id: str) -> list[ClosedAccount]:
    answer = await get_json(session, target, f"/ledger/requests/{quote(request_id, safe='')}", PATIENCE_S)
    if not isinstance(answer, dict):
        return []
    return _read_all({"accounts": answer.get("choices", [answer])})


def _read_all(listed: Any) -> list[ClosedAccount]:
    """Returns what of a server's answer is accounts; [] if it is not what is expected of one."""
    try:
        return [account_from_json(entry) for entry in listed["accounts"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):  # msgspec's errors are ValueErrors
        return []


async def _steps(
    session: aiohttp.ClientSession, target: Target, accounts: Sequence[ClosedAccount]
) -> tuple[tuple[StepRecord, ...], list[str]]:
    """The steps in the accounts' time, and a note if the first of them are no longer kept."""
    if not accounts:
        return (), []
    listed = await get_json(session, target, f"/ledger/steps?limit={MAX_LIMIT}", LIST_TIMEOUT_S, MAX_LIST_BYTES)
    records = converted(listed.get("steps") if isinstance(listed, dict) else None, list[StepRecord]) or []
    begin_ns, end_ns = min(a.start_ns for a in accounts), max(a.end_ns for a in accounts)
    during = tuple(step for step in records if step.end_ns > begin_ns and step.begin_ns < end_ns)
    first = min((step_id for account in accounts for step_id in account.token_steps), default=0)
    if during and during[0].step_id > first and len(records) == MAX_LIMIT:
        return during, [f"The server gave its last {MAX_LIMIT:,} steps; the run's first ones are not among them."]
    return during, []


def converted(data: Any, to: Any) -> Any:
    """Returns None for data of another kind."""
    try:
        return msgspec.convert(data, to)
    except msgspec.ValidationError:
        return None
