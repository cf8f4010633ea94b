"""The doctor on a real vLLM with our books: servers whose illness was made, and healthy ones. Goal: 90 % right.

    python -m benchmarks.scenarios.vllm_doctor --vllm FOLDER [--model MODEL] [--only NAME ...] [--record INTO] [--json]

FOLDER is the environment that vLLM and splittime are installed in. Each case of `vllm_cases` is a server of its own,
`splittime attach vllm -- serve MODEL`, asked as `splittime doctor http://...` asks it once its load is over: right is
who names the cause first, with vLLM's own flag, and who finds no illness in the healthy. The pace of the machine is
measured first, with a few requests that do not count. About half an hour on two cores.
"""

import argparse
import asyncio
import contextlib
import gzip
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.report import file_result
from benchmarks.scenarios.vllm_cases import CASES, Ask, Case, Line, Pace, ids
from benchmarks.server_process import get_json, served_vllm
from splittime.assemble import model_source
from splittime.diagnose.books import LIVE_ACCOUNTS, Books, books_from_server
from splittime.diagnose.doctor import Diagnosis, diagnose
from splittime.diagnose.finding import Finding

CASE_S = 240.0  # no load takes longer
SETTLE_S = 1.0  # the last accounts are closed within it
SHOWN = 6  # owners of the requests' time
WARM_UP, SHORT, LONG, ANSWER = 3, 16, 800, 17  # requests that do not count; tokens


async def send(session: aiohttp.ClientSession, ask: Ask) -> float:
    """Returns how long the answer took, or what of it the client waited for."""
    body = {"prompt": ask.prompt, "max_tokens": ask.output, "ignore_eos": True, "stream": True, "temperature": 0.0}
    if ask.priority:
        body["priority"] = ask.priority
    begin_s = time.monotonic()
    with contextlib.suppress(TimeoutError):  # as it is meant: who leaves closes the connection
        async with asyncio.timeout(ask.leaves_s), session.post("/v1/completions", json=body) as response:
            answer = await response.read()
            if response.status not in (200, 503):
                raise RuntimeError(f"vLLM answered {response.status}: {answer[:500]!r}")
    return time.monotonic() - begin_s


async def send_line(session: aiohttp.ClientSession, line: Line) -> None:
    await asyncio.sleep(line.at_s)
    for ask in line.asks:
        await send(session, ask)


async def carry_out(session: aiohttp.ClientSession, lines: Sequence[Line]) -> None:
    async with asyncio.timeout(CASE_S):
        await asyncio.gather(*(send_line(session, line) for line in lines))


async def pace_of(session: aiohttp.ClientSession) -> Pace:
    """By requests that are alone: the quickest of each kind."""
    for number in range(WARM_UP):
        await send(session, Ask(ids(SHORT, number), ANSWER))
    one_s = min([await send(session, Ask(ids(SHORT, 10 + n), 1)) for n in range(WARM_UP)])
    many_s = min([await send(session, Ask(ids(SHORT, 20 + n), ANSWER)) for n in range(WARM_UP)])
    long_s = min([await send(session, Ask(ids(LONG // 2, 30 + n), 1)) for n in range(WARM_UP)])
    return Pace((many_s - one_s) / (ANSWER - 1), max(1e-4, (long_s - one_s) / (LONG // 2 - SHORT)))


async def load(case: Case, url: str) -> tuple[Pace, int, float]:
    """Returns the pace, when the load began, and how long it took."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # vLLM ends a connection that is quiet for 5 s
    async with aiohttp.ClientSession(url, connector=connector) as session:
        pace = await pace_of(session)
        begin_ns = time.monotonic_ns()
        await carry_out(session, case.load(pace))
        took_s = (time.monotonic_ns() - begin_ns) / 1e9
        await asyncio.sleep(SETTLE_S)
        return pace, begin_ns, took_s


def books_since(url: str, begin_ns: int) -> Books:
    """As the doctor reads a live server, without what came before the load."""
    books = books_from_server(get_json, url, LIVE_ACCOUNTS)
    return msgspec.structs.replace(
        books,
        accounts=tuple(account for account in books.accounts if account.start_ns >= begin_ns),
        steps=tuple(step for step in books.steps if step.begin_ns >= begin_ns),
    )


def record(books: Books, path: Path) -> None:
    """Keeps them as a test's fixture (`tests/diagnose/test_attached_recorded.py`), without where the model lies."""
    assert books.facts is not None
    name = Path(books.facts.model).name
    facts = msgspec.structs.replace(books.facts, model=name)
    accounts = [msgspec.structs.replace(account, model=name) for account in books.accounts]
    kept = {"facts": facts, "accounts": accounts, "steps": books.steps}
    path.write_bytes(gzip.compress(msgspec.json.encode(kept), mtime=0))


def looked_at(case: Case, environment: str, model: str, log: Console, into: Path | None) -> dict[str, Any]:
    with served_vllm(environment, model, *case.flags) as url:
        pace, begin_ns, took_s = asyncio.run(load(case, url))
        books = books_since(url, begin_ns)
    if into is not None:
        record(books, into / f"{case.name}.json.gz")
    told = verdict(case, diagnose(books))
    log.print(f"{case.name}: {'right' if told['right'] else 'WRONG'}, {', '.join(told['illnesses']) or 'no illness'}")
    about = {"step_ms": round(pace.step_s * 1e3, 1), "prompt_token_ms": round(pace.token_s * 1e3, 3)}
    return {"truth": case.truth, **told, "pace": about, "load_s": round(took_s, 1)}


def verdict(case: Case, diagnosis: Diagnosis) -> dict[str, Any]:
    """What the doctor says, and whether that is right."""
    first = next(iter(diagnosis.illnesses), None)
    if case.is_healthy:
        is_right = first is None and diagnosis.could_tell
    else:
        is_right = first is not None and _names_it(case, first)
    return {
        "right": is_right,
        "illnesses": [finding.name for finding in diagnosis.illnesses],
        "limits": [finding.name for finding in diagnosis.limits],
        "claim": first.claim if first is not None else "",
        "cure": f"{first.cure.sentence} {first.cure.command or ''}".strip() if first is not None else "",
        "cost": first.cost if first is not None else "",
        "could_tell": diagnosis.could_tell,
        "requests": diagnosis.num_requests,
        "steps": diagnosis.num_steps,
        "spent": {entry.owner: round(entry.share, 3) for entry in diagnosis.spent[:SHOWN]},
        "abstained": {one.name: one.why for one in diagnosis.abstentions},
    }


def _names_it(case: Case, finding: Finding) -> bool:
    return finding.name in case.names and case.word in f"{finding.cure.sentence} {finding.cure.command}"


def table(found: dict[str, Any]) -> Table:
    shown = Table(title="What the doctor names, the first first")
    for name in ("case", "what was made", "verdict", "illnesses", "cure"):
        shown.add_column(name)
    for name, one in found.items():
        mark = "right" if one["right"] else "WRONG"
        shown.add_row(name, one["truth"], mark, ", ".join(one["illnesses"]) or "-", one["cure"])
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="the environment of vLLM and splittime")
    parser.add_argument("--model", help="its folder; default: the packaged one")
    parser.add_argument("--only", nargs="+", default=[case.name for case in CASES], metavar="NAME")
    parser.add_argument("--record", type=Path, metavar="INTO", help="keep the tests' fixtures there")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model, log = arguments.model or str(model_source.locate(None)), Console(stderr=True, highlight=False)
    cases = [case for case in CASES if case.name in arguments.only]
    found = {case.name: looked_at(case, arguments.vllm, model, log, arguments.record) for case in cases}
    share = sum(one["right"] for one in found.values()) / max(1, len(found))
    log.print(table(found))
    log.print(f"{share:.0%} of {len(found)} right")
    path = file_result("vllm_doctor", {"right": share, "cases": found}, vars(arguments), arguments.json)
    print(f"written to {path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
