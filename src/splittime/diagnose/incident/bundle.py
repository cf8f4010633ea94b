"""The file of an incident: a zip of JSON that any tool can open, bounded in size, and safe to read from a stranger.

    README.txt, manifest.json
    NAME/facts.json accounts.jsonl steps.jsonl findings.json timeline.json timeline.txt stats.json metrics.txt

NAME is the kind of the source and its number: `server-1`. Records are in the form that a ledger file has them in.
`pack` leaves out the older half of all requests, again and again, until the file is within its bound. `books_in` reads
no member beyond `MAX_MEMBER_BYTES`, whatever the file says of its sizes.
"""

import io
import lzma
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from splittime.core.errors import ConfigError, NotFound
from splittime.diagnose.books import Books, make_books
from splittime.diagnose.doctor import Diagnosis, diagnose
from splittime.diagnose.incident.gather import Evidence
from splittime.diagnose.incident.timeline import IncidentTimeline, timeline, timeline_text
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord

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
    """Whether the file begins as an incident does. Raises nothing: what it is not, another reader says."""
    try:
        with path.open("rb") as file:
            return file.read(len(ZIP_BEGIN)) == ZIP_BEGIN
    except OSError:
        return False


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
