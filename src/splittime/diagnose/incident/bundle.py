"""The file of an incident: a zip of JSON that any tool can open, bounded in size, and safe to read from a stranger.

    README.txt, manifest.json
    NAME/facts.json accounts.jsonl steps.jsonl findings.json timeline.json timeline.txt stats.json metrics.txt

NAME is the kind of the source and its number: `server-1`. Records are in the form that a ledger file has them in.
`pack` leaves out the older half of all requests, again and again, until the file is within its bound. `books_in` reads
no member beyond `MAX_MEMBER_BYTES`, whatever the file says of its sizes.

What happened when, from shareable books: the moments that changed something, and equal slices of the time between.

All of it is counted or copied from the books; nothing is concluded here, that is the doctor's part.
Instants are of the host's monotonic clock. `unix_ns` is the same by the wall clock, as the latest account tells; None
where there is no account.
"""

import io
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from splittime.core.engine import Part
from splittime.core.errors import ConfigError, NotFound
from splittime.core.files import begins_with
from splittime.diagnose.books import Books, make_books
from splittime.diagnose.doctor import Diagnosis, diagnose
from splittime.diagnose.incident.gather import Evidence
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord

NUM_SLICES = 60
MAX_MOMENTS = 500
LONG_PAUSE_NS = 100_000_000
LONG_GAP_NS = 1_000_000_000
LONG_PARTS = 3  # of a start that are told
MS = 1e6

ToUnix = Callable[[int], int | None]


class Moment(msgspec.Struct, frozen=True):
    """Something that happened. what: a word to search for. text: for people."""

    at_ns: int
    unix_ns: int | None
    what: str
    text: str


class TimeSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the time: what ended in it, and what its steps saw. Percentiles are None where nothing was served."""

    begin_ns: int
    unix_ns: int | None
    ended: int
    refused: int
    failed: int
    output_tokens: int
    preemptions: int
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    e2e_ms_p95: float | None
    queue_ms_p95: float | None
    steps: int
    longest_step_ms: float | None
    most_waiting: int | None
    most_blocks_used: int | None


class IncidentTimeline(msgspec.Struct, frozen=True):
    """slice_ns: the length of each slice. moments: in order; of more than `MAX_MOMENTS` the latest."""

    begin_ns: int
    end_ns: int
    slice_ns: int
    moments: tuple[Moment, ...]
    slices: tuple[TimeSlice, ...]


def timeline(books: Books) -> IncidentTimeline:
    """Returns the timeline of all that the books hold; without any slice where they hold no account."""
    accounts, steps = books.accounts, books.steps
    begin_ns = min((account.start_ns for account in accounts), default=0)
    end_ns = max((account.end_ns for account in accounts), default=0)
    slice_ns = max(1, -(-(end_ns - begin_ns + 1) // NUM_SLICES))
    to_unix = _wall_clock(accounts)
    found = sorted((*_of_processes(books), *_of_requests(accounts), *_of_steps(steps)))
    moments = tuple(Moment(at_ns, to_unix(at_ns), what, text) for at_ns, what, text in found[-MAX_MOMENTS:])
    slices = _slices(accounts, steps, begin_ns, slice_ns, to_unix) if accounts else ()
    return IncidentTimeline(begin_ns, end_ns, slice_ns, moments, tuple(slices))


def timeline_text(told: IncidentTimeline) -> str:
    """Returns the moments, a line each, for people."""
    lines = (f"{_when(moment, told.begin_ns)}  {moment.what:<14} {moment.text}\n" for moment in told.moments)
    return "".join(lines)


# ---- moments

Found = tuple[int, str, str]  # at_ns, what, text


def _of_processes(books: Books) -> Iterator[Found]:
    facts = books.facts
    if facts is None:
        return
    if facts.knobs_changed_ns:
        yield facts.knobs_changed_ns, "knobs_changed", "a setting was changed on the live server, the last time"
    for process in facts.processes:
        yield process.started_ns, "started", f"{process.name}, {process.restarts} restarts so far"
        if process.ready_ns is not None:
            took = _s(process.ready_ns - process.started_ns)
            yield process.ready_ns, "ready", f"{process.name}, {took} later{_most(process.start)}"
        for at_ns, lasted_ns in process.pauses:
            if lasted_ns >= LONG_PAUSE_NS:
                yield at_ns, "gc_pause", f"{process.name} collected garbage for {_s(lasted_ns)}"
        for sleep in process.sleeps:
            lasted = _s(sleep.end_ns - sleep.begin_ns)
            yield sleep.begin_ns, sleep.action, f"{process.name}, level {sleep.level}, {lasted}"


def _most(start: Sequence[Part]) -> str:
    """Says what took longest of a start."""
    longest = sorted(start, key=lambda part: part[1] - part[2])[:LONG_PARTS]
    told = ", ".join(f"{name} {_s(end_ns - begin_ns)}" for name, begin_ns, end_ns in longest)
    return f" ({told})" if told else ""


def _of_requests(accounts: Sequence[ClosedAccount]) -> Iterator[Found]:
    yield from _first_and_last(accounts)
    yield from _of_versions(accounts)
    slowest = max(accounts, key=derive.e2e_ns, default=None)
    if slowest is not None:
        yield slowest.end_ns, "slowest", f"{slowest.request_id} took {_s(derive.e2e_ns(slowest))}"


def _first_and_last(accounts: Sequence[ClosedAccount]) -> Iterator[Found]:
    """Yields of each code of an error when it came first, and how often in all."""
    by_code: dict[str, list[ClosedAccount]] = {}
    for account in accounts:
        if account.error is not None:
            by_code.setdefault(account.error.code, []).append(account)
    for code, failed in by_code.items():
        first, last = failed[0], failed[-1]
        yield first.end_ns, "first_error", f"{code}: {first.request_id}, {len(failed)} in all"
        if last is not first:
            yield last.end_ns, "last_error", f"{code}: {last.request_id}"


def _of_versions(accounts: Sequence[ClosedAccount]) -> Iterator[Found]:
    known = set[str]()
    for account in sorted(accounts, key=lambda account: account.start_ns):
        if account.config_version and account.config_version not in known:
            known.add(account.config_version)
            yield account.start_ns, "config", f"the first request under version {account.config_version}"


def _of_steps(steps: Sequence[StepRecord]) -> Iterator[Found]:
    for step in steps:
        if step.host_gap_ns >= LONG_GAP_NS:
            yield step.begin_ns, "gap", f"nothing ran for {_s(step.host_gap_ns)} before step {step.step_id}"
        if step.victims:
            yield step.begin_ns, "preempted", f"{len(step.victims)} requests, in step {step.step_id}"
    longest = max(steps, key=lambda step: step.end_ns - step.begin_ns, default=None)
    if longest is not None:
        yield longest.begin_ns, "longest_step", f"step {longest.step_id} took {_s(longest.end_ns - longest.begin_ns)}"


# ---- slices


def _slices(
    accounts: Sequence[ClosedAccount], steps: Sequence[StepRecord], begin_ns: int, slice_ns: int, to_unix: ToUnix
) -> Iterator[TimeSlice]:
    ended: list[list[ClosedAccount]] = [[] for _ in range(NUM_SLICES)]
    run: list[list[StepRecord]] = [[] for _ in range(NUM_SLICES)]
    for account in accounts:
        ended[(account.end_ns - begin_ns) // slice_ns].append(account)
    for step in steps:
        if 0 <= (place := (step.begin_ns - begin_ns) // slice_ns) < NUM_SLICES:
            run[place].append(step)
    for number, (those, these) in enumerate(zip(ended, run, strict=True)):
        at_ns = begin_ns + number * slice_ns
        yield _slice(at_ns, to_unix(at_ns), those, these)


def _slice(at_ns: int, unix_ns: int | None, ended: Sequence[ClosedAccount], steps: Sequence[StepRecord]) -> TimeSlice:
    served = [account for account in ended if account.error is None]
    ttft_ns = [ns for account in served if (ns := derive.ttft_ns(account)) is not None]
    queue_ns = [_queue_ns(account) for account in served]
    return TimeSlice(
        begin_ns=at_ns,
        unix_ns=unix_ns,
        ended=len(ended),
        refused=sum(account.is_refused for account in ended),
        failed=sum(account.error is not None and not account.is_refused for account in ended),
        output_tokens=sum(account.output_tokens for account in ended),
        preemptions=sum(len(step.victims) for step in steps),
        ttft_ms_p50=_ms(ttft_ns, 50),
        ttft_ms_p95=_ms(ttft_ns, 95),
        e2e_ms_p95=_ms([derive.e2e_ns(account) for account in served], 95),
        queue_ms_p95=_ms(queue_ns, 95),
        steps=len(steps),
        longest_step_ms=_ms([step.end_ns - step.begin_ns for step in steps], 100),
        most_waiting=max((step.num_waiting for step in steps), default=None),
        most_blocks_used=max((step.blocks_used for step in steps), default=None),
    )


def _queue_ns(account: ClosedAccount) -> int:
    """Returns how long a request waited for its turn: that is `admit` at a gateway, and of a server a moment."""
    by_stage = derive.stage_ns(account)
    return by_stage.get(Stage.QUEUE, 0) + by_stage.get(Stage.ADMIT, 0)


def _ms(values_ns: Sequence[int], percent: float) -> float | None:
    found = derive.percentile(values_ns, percent)
    return None if found is None else round(found / MS, 3)


# ---- clocks


def _wall_clock(accounts: Iterable[ClosedAccount]) -> ToUnix:
    latest = max(accounts, key=lambda account: account.end_ns, default=None)
    if latest is None:
        return lambda at_ns: None
    offset_ns = latest.started_at_unix_ns - latest.start_ns
    return lambda at_ns: at_ns + offset_ns


def _when(moment: Moment, begin_ns: int) -> str:
    if moment.unix_ns is None:
        return f"{(moment.at_ns - begin_ns) / 1e9:+.3f} s"
    at = datetime.fromtimestamp(moment.unix_ns / 1e9, UTC)
    return at.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")


def _s(duration_ns: int) -> str:
    return f"{duration_ns / 1e9:.3f} s"


FORMAT = 1
ZIP_BEGIN = b"PK\x03\x04"
LEAST_BYTES = 64 * 2**10
MAX_MEMBER_BYTES = 2**29  # of one that is read, unpacked
README = """An incident of splittime, made by `splittime incident`.

Read it:  splittime doctor THIS-FILE

It holds times, lengths, stages, causes, codes of errors, settings that are numbers, and metrics. It holds no prompt, no
answer, no key, and no message of an error. Ids that clients chose, names of tenants and traces, and hashes of prompts
are renamed by a hash whose key was kept nowhere. How long prompts and answers were, and when they came, is in it.
"""

UNREADABLE = (
    *(OSError, EOFError, KeyError, NotImplementedError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError),
)  # of zipfile, for a damaged member
RecordT = TypeVar("RecordT", ClosedAccount, StepRecord)


class SourceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What the manifest says of one source. left_out: requests that did not fit into the file."""

    name: str
    kind: str
    accounts: int
    steps: int
    are_steps_cut: bool
    left_out: int
    findings: tuple[str, ...]
    notes: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """made_at_unix_s: when. made_with: versions of the machine that made it, by name."""

    format: int
    made_at_unix_s: int
    made_with: dict[str, str]
    sources: tuple[SourceEntry, ...]

    @property
    def names(self) -> list[str]:
        return [source.name for source in self.sources]


class PackedIncident(msgspec.Struct, frozen=True):
    """data: the file."""

    data: bytes
    manifest: Manifest


def pack(
    sources: Sequence[Evidence], made_at_unix_s: int, made_with: Mapping[str, str], max_bytes: int
) -> PackedIncident:
    """Returns the incident within `max_bytes`. Raises `ConfigError` where even no request at all is too large."""
    reports = [_report(source) for source in sources]  # of all requests, also of those that will not fit
    shares = [len(source.books.accounts) for source in sources]
    while True:
        kept = [_latest(source, share) for source, share in zip(sources, shares, strict=True)]
        left_out = [len(s.books.accounts) - len(k.books.accounts) for s, k in zip(sources, kept, strict=True)]
        entries = [_entry(*each) for each in zip(_names(sources), kept, left_out, reports, strict=True)]
        manifest = Manifest(
            format=FORMAT, made_at_unix_s=made_at_unix_s, made_with=dict(made_with), sources=tuple(entries)
        )
        data = _zipped(manifest, kept, reports)
        if len(data) <= max_bytes:
            return PackedIncident(data, manifest)
        if not any(shares):
            message = f"the incident takes {len(data)} bytes without a single request"
            raise ConfigError(message, param="max_bytes", value=max_bytes, limit=len(data))
        shares = [share // 2 for share in shares]


def _latest(source: Evidence, count: int) -> Evidence:
    """Returns the source with its latest so many requests, and the steps in their time."""
    books = source.books
    if count >= len(books.accounts):
        return source
    accounts = books.accounts[len(books.accounts) - count :]
    begin_ns = min((account.start_ns for account in accounts), default=None)
    steps = () if begin_ns is None else tuple(step for step in books.steps if step.end_ns > begin_ns)
    return msgspec.structs.replace(source, books=msgspec.structs.replace(books, accounts=accounts, steps=steps))


class SourceReport(NamedTuple):
    """What a source's books mean, made once from all of them."""

    diagnosis: Diagnosis
    timeline: IncidentTimeline


def _report(source: Evidence) -> SourceReport:
    return SourceReport(diagnose(_diagnosable(source.books, source.are_steps_cut)), timeline(source.books))


def _zipped(manifest: Manifest, sources: Sequence[Evidence], reports: Sequence[SourceReport]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("README.txt", README)
        members.writestr("manifest.json", _json(manifest))
        for entry, source, report in zip(manifest.sources, sources, reports, strict=True):
            for path, data in _members(source, report):
                members.writestr(f"{entry.name}/{path}", data)
    return file.getvalue()


def _names(sources: Iterable[Evidence]) -> list[str]:
    count: dict[str, int] = {}
    names = []
    for source in sources:
        count[source.kind] = count.get(source.kind, 0) + 1
        names.append(f"{source.kind}-{count[source.kind]}")
    return names


def _entry(name: str, source: Evidence, left_out: int, report: SourceReport) -> SourceEntry:
    return SourceEntry(
        name=name,
        kind=source.kind,
        accounts=len(source.books.accounts),
        steps=len(source.books.steps),
        are_steps_cut=source.are_steps_cut,
        left_out=left_out,
        findings=tuple(finding.name for finding in report.diagnosis.findings),
        notes=source.notes,
    )


def _members(source: Evidence, report: SourceReport) -> Iterator[tuple[str, bytes]]:
    books = source.books
    yield "facts.json", _json(books.facts)
    yield "accounts.jsonl", _lines(books.accounts)
    yield "steps.jsonl", _lines(books.steps)
    yield "findings.json", _json(report.diagnosis.as_json())
    yield "timeline.json", _json(report.timeline)
    yield "timeline.txt", timeline_text(report.timeline).encode()
    if source.stats is not None:
        yield "stats.json", _json(source.stats)
    if source.metrics:
        yield "metrics.txt", source.metrics.encode()


def _json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def _lines(records: Iterable[ClosedAccount | StepRecord]) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


# ---- reading


def is_incident(path: Path) -> bool:
    """Returns whether the file begins as an incident does. Raises nothing: what it is not, another reader says."""
    return begins_with(path, ZIP_BEGIN)


def books_in(path: Path, name: str | None, limit: int) -> Books:
    """Returns the books of one source of an incident, the latest `limit` requests. name: which; None where it has one.

    Raises `ConfigError` for a file that is no incident or cannot be read, and where several sources leave open which is
    meant; `NotFound` for a source that it has not.
    """
    try:
        with zipfile.ZipFile(path) as members:
            manifest = msgspec.json.decode(_read(members, "manifest.json"), type=Manifest)
            entry = _chosen(manifest, name, path)
            facts = msgspec.json.decode(_read(members, f"{entry.name}/facts.json"), type=ServerFacts | None)
            accounts = _records(_read(members, f"{entry.name}/accounts.jsonl"), ClosedAccount, limit)
            steps = _records(_read(members, f"{entry.name}/steps.jsonl"), StepRecord)
    except UNREADABLE as error:
        raise _unreadable(path, error) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(path, error) from error
    books = make_books(facts, accounts, steps, f"incident {path.name}, {entry.name}")
    return _diagnosable(books, entry.are_steps_cut)


def _chosen(manifest: Manifest, name: str | None, path: Path) -> SourceEntry:
    if manifest.format > FORMAT:
        message = f"{path} has format {manifest.format}, this splittime reads {FORMAT}"
        raise ConfigError(message, param="file", value=manifest.format, limit=FORMAT, hint="Use a later splittime.")
    if name is None and len(manifest.sources) == 1:
        return manifest.sources[0]
    hint = f"It has {', '.join(manifest.names)}: name one with --source."
    if name is None:
        raise ConfigError(f"{path} is of {len(manifest.sources)} sources", param="source", hint=hint)
    found = next((source for source in manifest.sources if source.name == name), None)
    if found is None:
        raise NotFound(f"{path} has no source {name!r}", param="source", value=name, hint=hint)
    return found


def _read(members: zipfile.ZipFile, name: str) -> bytes:
    with members.open(name) as member:
        data = member.read(MAX_MEMBER_BYTES + 1)
    if len(data) > MAX_MEMBER_BYTES:
        raise zipfile.BadZipFile(f"{name} is larger than {MAX_MEMBER_BYTES} bytes")
    return data


def _records(data: bytes, kind: type[RecordT], limit: int | None = None) -> list[RecordT]:
    """Returns the last `limit` records, or all; no other is decoded."""
    decoder = msgspec.json.Decoder(kind)
    return [decoder.decode(line) for line in data.splitlines()[-limit if limit else None :]]


def _unreadable(path: Path, error: Exception) -> ConfigError:
    hint = "An incident is what `splittime incident` writes."
    return ConfigError(f"{path} is not a readable incident: {error}", param="file", value=str(path), hint=hint)


def _of_the_last_server(books: Books) -> Books:
    """Returns the books without what a server before the last one wrote: the facts are the last one's."""
    processes = books.facts.processes if books.facts is not None else ()
    since_ns = min((process.started_ns for process in processes), default=0)
    accounts = tuple(account for account in books.accounts if account.start_ns >= since_ns)
    steps = tuple(step for step in books.steps if step.begin_ns >= since_ns)
    return msgspec.structs.replace(books, accounts=accounts, steps=steps)


def _diagnosable(books: Books, are_steps_cut: bool) -> Books:
    """Returns the last server's books, without the requests that began before its first known step, where earlier ones
    are missing."""
    books = _of_the_last_server(books)
    if not are_steps_cut or not books.steps:
        return books
    begin_ns = books.steps[0].begin_ns
    accounts = tuple(account for account in books.accounts if account.start_ns >= begin_ns)
    return msgspec.structs.replace(books, accounts=accounts)
