"""Sick servers of another kind, as the doctor sees them: nine whose illness was made, and three healthy ones.

    python -m benchmarks.scenarios.foreign_servers FOLDER [--only NAME ...] [--again] [--record INTO] [--json]

FOLDER is laid out as `benchmarks/peers/setup_peers.sh` makes it: `venv/vllm` with vLLM's wheel for CPUs, and
`models/small` (`python -m benchmarks.peers.make_models FOLDER/models small`). Each case of `foreign_cases` is asked
three times what its first finding is: from a run of its load, live while that load goes on, and live on the idle server
afterwards, which the doctor then probes. A case that was done is not done again (`FOLDER/foreign`); the whole takes
about twelve minutes on two cores, of which half is vLLM's start.

`--hold` starts the servers of the cases and keeps them until it is stopped; `--held` measures those: so that they
can start at another time than the measurement. What each showed on /metrics is kept too.
"""

import argparse
import asyncio
import contextlib
import gzip
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.peers.servers import ServerEntry, serving
from benchmarks.report import file_result
from benchmarks.scenarios.foreign_cases import CASES, Case
from splittime.bench.book.records import Run, load_run, save
from splittime.bench.draw import draw_for
from splittime.bench.event_loop import run_loop
from splittime.bench.join_view import server_view
from splittime.bench.observation import Observation, observe
from splittime.bench.run import run_schedule
from splittime.diagnose.books import Books, books_from_run
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import Finding
from splittime.diagnose.words import WORDS
from splittime.wire.scrape import server_limits
from splittime.wire.target import RunOptions, Target

THREADS = 2
VOCAB_SIZE = 33_000  # of the model, which vLLM does not tell
OPTIONS = RunOptions(workers=1, sample_interval_s=0.25, timeout_s=120.0)
WARM_UP = {"concurrency": 2, "num_requests": 4, "input_tokens": "100", "output_tokens": "16"}
WAYS = ("run", "live", "idle")
BEGIN_S = 2.0  # of the load, before the doctor looks at the server


def entry_of(case: Case, folder: Path) -> ServerEntry:
    python, model = folder / "venv" / "vllm" / "bin" / "python", folder / "models" / "small"
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--enforce-eager"]
    command += ["--served-model-name", "small"]
    return ServerEntry(case.name, [*command, "--host", "127.0.0.1", *case.flags], [python, model / "config.json"])


async def measure(case: Case, url: str) -> tuple[Run, Observation, Observation]:
    """The run, what was seen live meanwhile, and on the idle server after it."""
    target = Target(url=url)
    limits = (await server_limits(target)).corrected(VOCAB_SIZE, None)
    await run_schedule(draw_for(WARM_UP, limits), [target], OPTIONS)
    loaded = asyncio.create_task(run_schedule(draw_for(case.load, limits), [target], OPTIONS))
    await asyncio.sleep(BEGIN_S)
    watched = await observe(target, is_probing=False)
    run = await loaded
    return run, watched, await observe(target)


def record(case: Case, kept: Path, into: Path) -> None:
    """A test's fixture: the three runs, without what no rule reads."""
    runs = {way: msgspec.to_builtins(_lean(load_run(file_of(case, way, kept)))) for way in WAYS}
    (into / f"{case.name}.json.gz").write_bytes(gzip.compress(json.dumps(runs).encode(), mtime=0))


def _lean(run: Run) -> Run:
    names = tuple(name for words in WORDS["vllm"] for name in (words if isinstance(words, tuple) else (words,)) if name)
    arm = run.arms[0]
    before, after = (
        {key: value for key, value in metrics.items() if key.startswith(names)}
        for metrics in (arm.metrics_before, arm.metrics_after)
    )
    arm = msgspec.structs.replace(arm, metrics_before=before, metrics_after=after, url="http://127.0.0.1", notes=())
    return msgspec.structs.replace(run, arms=(arm,))


def told(case: Case, books: Books, way: str) -> dict[str, Any]:
    """What the doctor says, and whether that is right: the cause first with its flag, and silence where nothing is.
    An idle server is not ill, so there what is worth knowing counts, and what only a load shows is not missed."""
    diagnosis = diagnose(books)
    ill = [finding.name for finding in diagnosis.illnesses]
    is_idle = way == "idle"
    shown = diagnosis.illnesses or (diagnosis.limits if is_idle else ())
    first = next((finding for finding in shown if finding.name != "client_bound"), None)
    is_silent = not ill if case.is_healthy else is_idle and case.needs_load and not ill
    is_right = is_silent or (not case.is_healthy and first is not None and _names_it(case, first))
    return {
        "right": is_right,
        "illnesses": ill,
        "limits": [finding.name for finding in diagnosis.limits],
        "claim": first.claim if first is not None else "",
        "cure": first.cure.command or first.cure.sentence if first is not None else "",
        "could_tell": diagnosis.could_tell,
        "abstained": {one.name: one.why for one in diagnosis.abstentions if one.name.startswith(("told", "overload"))},
    }


def _names_it(case: Case, finding: Finding) -> bool:
    return finding.name in case.names and case.flag in f"{finding.cure.sentence} {finding.cure.command}"


def look_at(case: Case, url: str, kept: Path) -> None:
    """Keeps the three runs, the last one last: it says that the case is done."""
    begin = time.monotonic()
    run, watched, probed = run_loop(measure(case, url))
    with urllib.request.urlopen(url + "/metrics", timeout=30) as response:
        (kept / f"{case.name}.txt").write_bytes(response.read())
    for way, one in zip(WAYS, (run, watched.run, probed.run), strict=True):
        save(one, file_of(case, way, kept))
    print(f"{case.name}: {time.monotonic() - begin:.0f} s", file=sys.stderr)


def file_of(case: Case, way: str, kept: Path) -> Path:
    return kept / f"{case.name}_{way}.json"


@contextlib.contextmanager
def held(cases: list[Case], folder: Path) -> Iterator[dict[str, str]]:
    """Their servers, all at once; yields where each is."""
    with contextlib.ExitStack() as stack:
        log = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {}
        for case in cases:
            entry = entry_of(case, folder)
            stack.enter_context(serving(entry, THREADS, log / case.name))
            urls[case.name] = entry.url
        yield urls


def _hold(cases: list[Case], folder: Path, place: Path) -> None:
    with held(cases, folder) as urls:
        place.write_text(json.dumps(urls))
        print(f"{len(urls)} servers are ready", file=sys.stderr)
        with contextlib.suppress(KeyboardInterrupt):
            while place.exists():
                time.sleep(1)


def asked(case: Case, kept: Path) -> dict[str, Any]:
    """Anew from what was kept, so that another rule is tried on the same servers."""
    runs = {way: load_run(file_of(case, way, kept)) for way in WAYS}
    return {
        "truth": case.truth,
        "void": runs["run"].is_void,
        **{way: told(case, books_from_run(runs[way]), way) for way in WAYS},
        "view": msgspec.to_builtins(server_view(runs["run"])),
    }


def table(found: dict[str, Any]) -> Table:
    shown = Table(title="The first finding, by the case and by where it was looked at")
    for name in ("case", "run", "live", "idle"):
        shown.add_column(name)
    for name, one in found.items():
        cells = [
            f"{'right' if one[way]['right'] else 'WRONG'}: {', '.join(one[way]['illnesses']) or '-'}" for way in WAYS
        ]
        shown.add_row(name, *cells)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=[case.name for case in CASES], metavar="NAME")
    parser.add_argument("--again", action="store_true", help="also what was done before")
    parser.add_argument("--record", type=Path, metavar="INTO", help="keep the tests' fixtures there")
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--held", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    kept, place = folder / "foreign", folder / "foreign" / "held.json"
    kept.mkdir(exist_ok=True)
    cases = [case for case in CASES if case.name in arguments.only]
    if arguments.hold:
        return _hold(cases, folder, place)
    for case in cases:
        if arguments.again or not file_of(case, WAYS[-1], kept).exists():
            urls = contextlib.nullcontext(json.loads(place.read_text())) if arguments.held else held([case], folder)
            with urls as where:
                look_at(case, where[case.name], kept)
        if arguments.record is not None:
            record(case, kept, arguments.record)
    found = {case.name: asked(case, kept) for case in cases}
    Console(width=140, stderr=arguments.json).print(table(found))
    path = file_result("foreign_servers", found, {"folder": folder.name}, arguments.json)
    print(f"written to {path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
