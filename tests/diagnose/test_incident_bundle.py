"""The file of an incident: what is in it, its bound, and that a damaged or hostile one is refused with a sentence."""

import io
import json
import lzma
import zipfile

import msgspec
import pytest
from kept import ledger_file
from test_rules_queue import poisson
from ward import Ward

from splittime.core.engine import SleepReport
from splittime.core.errors import ConfigError, ErrorInfo, NotFound
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.incident import bundle
from splittime.diagnose.incident.bundle import NUM_SLICES, books_in, is_incident, pack, timeline
from splittime.diagnose.incident.gather import Wanted, from_ledger
from splittime.ledger.facts import Process
from splittime.ledger.stages import Stage

LARGE = 10**8


@pytest.fixture(scope="module")
def ill():
    return Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100))


@pytest.fixture(scope="module")
def evidence(ill, tmp_path_factory):
    return from_ledger(ledger_file(ill, tmp_path_factory.mktemp("books") / "l.sqlite"), Wanted())


@pytest.fixture
def packed(evidence, tmp_path):
    path = tmp_path / "i.zip"
    path.write_bytes(pack([evidence], 1, {"splittime": "9"}, LARGE).data)
    return path


def test_it_holds_what_a_tool_can_open(packed, ill):
    with zipfile.ZipFile(packed) as members:
        read = {name: members.read(name) for name in members.namelist()}
    parts = ("facts.json", "accounts.jsonl", "steps.jsonl", "findings.json", "timeline.json", "timeline.txt")
    assert set(read) == {"README.txt", "manifest.json", *(f"ledger-1/{part}" for part in parts)}
    assert json.loads(read["manifest.json"])["sources"][0]["findings"][0] == "slot_bound"
    assert len(read["ledger-1/accounts.jsonl"].splitlines()) == len(ill.accounts)
    assert json.loads(read["ledger-1/findings.json"])["exit_code"] == 1


def test_the_doctor_reads_from_it_what_it_reads_from_the_ledger(packed, ill):
    assert is_incident(packed)
    before, after = diagnose(ill), diagnose(books_in(packed, None, 1000))
    shares = [(finding.name, finding.share_of_time) for finding in before.findings]
    assert [(finding.name, finding.share_of_time) for finding in after.findings] == shares
    assert len(books_in(packed, "ledger-1", 7).accounts) == 7


def test_a_bound_leaves_the_oldest_requests_out(evidence, tmp_path):
    whole = pack([evidence], 1, {}, LARGE)
    bound = len(whole.data) // 2
    less = pack([evidence], 1, {}, bound)
    entry = less.manifest.sources[0]
    assert len(less.data) <= bound
    assert entry.left_out == len(evidence.books.accounts) - entry.accounts > 0
    path = tmp_path / "i.zip"
    path.write_bytes(less.data)
    assert books_in(path, None, 1000).accounts == evidence.books.accounts[-entry.accounts :]
    assert entry.findings == whole.manifest.sources[0].findings
    with pytest.raises(ConfigError, match="without a single request"):
        pack([evidence], 1, {}, 100)


def test_several_sources_are_told_apart(evidence, tmp_path):
    path = tmp_path / "i.zip"
    server = msgspec.structs.replace(evidence, kind="server")
    path.write_bytes(pack([evidence, server, server], 1, {}, LARGE).data)
    assert len(books_in(path, "server-2", 1000).accounts) == len(evidence.books.accounts)
    with pytest.raises(ConfigError, match="of 3 sources") as refused:
        books_in(path, None, 1000)
    assert "ledger-1, server-1, server-2" in refused.value.info.hint
    with pytest.raises(NotFound, match="no source"):
        books_in(path, "server-3", 1000)


def test_steps_that_are_missing_take_their_requests_with_them(evidence, tmp_path):
    books = evidence.books
    half = msgspec.structs.replace(books, steps=books.steps[len(books.steps) // 2 :])
    path = tmp_path / "i.zip"
    path.write_bytes(pack([msgspec.structs.replace(evidence, books=half, are_steps_cut=True)], 1, {}, LARGE).data)
    found = books_in(path, None, 1000)
    assert 0 < len(found.accounts) < len(books.accounts)
    assert min(account.start_ns for account in found.accounts) >= half.steps[0].begin_ns


def rewritten(path, **members):
    """The same incident with other members."""
    file = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            data = members.get(name.rpartition("/")[2].partition(".")[0], old.read(name))
            if data is not None:
                new.writestr(name, data)
    path.write_bytes(file.getvalue())
    return path


@pytest.mark.parametrize(
    "members",
    [
        {"manifest": b"{}"},
        {"manifest": None},
        {"manifest": b"\xff"},
        {"accounts": b"{}\n"},
        {"accounts": None},
        {"steps": b"[" * 100_000},
        {"facts": b"7"},
    ],
    ids=("empty manifest", "no manifest", "no text", "empty account", "no accounts", "nested steps", "other facts"),
)
def test_a_damaged_one_is_refused(packed, members):
    with pytest.raises(ConfigError, match="not a readable incident"):
        books_in(rewritten(packed, **members), None, 1000)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_one_that_was_cut_off_is_refused(packed, share):
    data = packed.read_bytes()
    packed.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ConfigError, match="not a readable incident"):
        books_in(packed, None, 1000)


def test_one_whose_member_is_damaged_is_refused_whatever_packed_it(packed):
    file, name = io.BytesIO(), "manifest.json"
    with zipfile.ZipFile(packed) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as new:
        for each in old.namelist():
            new.writestr(each, old.read(each))
        begin = new.getinfo(name).header_offset + 30 + len(name) + 9  # behind the heads of zip and of LZMA
    data = bytearray(file.getvalue())
    data[begin : begin + 8] = b"\xff" * 8
    packed.write_bytes(data)
    with pytest.raises(ConfigError, match="not a readable incident") as refused:
        books_in(packed, None, 1000)
    assert isinstance(refused.value.__cause__, lzma.LZMAError)


def test_no_more_requests_are_decoded_than_are_asked_for(packed):
    with zipfile.ZipFile(packed) as members:
        lines = members.read("ledger-1/accounts.jsonl").splitlines()
    rewritten(packed, accounts=b"\n".join([b"{}", *lines[1:]]))
    assert len(books_in(packed, None, len(lines) - 1).accounts) == len(lines) - 1
    with pytest.raises(ConfigError, match="not a readable incident"):
        books_in(packed, None, len(lines))


def test_one_that_unpacks_to_too_much_is_refused(packed, monkeypatch):
    monkeypatch.setattr(bundle, "MAX_MEMBER_BYTES", 10_000)
    with pytest.raises(ConfigError, match="larger than 10000"):
        books_in(rewritten(packed, accounts=b" " * 10**6), None, 1000)


def test_one_of_a_later_format_is_refused(packed):
    with zipfile.ZipFile(packed) as members:
        manifest = {**json.loads(members.read("manifest.json")), "format": 2}
    with pytest.raises(ConfigError, match="format 2"):
        books_in(rewritten(packed, manifest=json.dumps(manifest).encode()), None, 1000)


def test_a_span_of_time(ill, tmp_path):
    at_s = 1_700_000_000
    accounts = tuple(msgspec.structs.replace(a, started_at_unix_ns=at_s * 10**9 + a.start_ns) for a in ill.accounts)
    path = ledger_file(msgspec.structs.replace(ill, accounts=accounts), tmp_path / "l.sqlite")
    middle = accounts[50]
    from_s = (middle.started_at_unix_ns) / 1e9
    found = from_ledger(path, Wanted(since_s=from_s))
    assert 0 < len(found.books.accounts) < 100
    assert min(a.end_ns for a in found.books.accounts) >= middle.start_ns
    assert "are of another time" not in str(found.notes)  # the file was asked for that time alone
    before = from_ledger(path, Wanted(until_s=from_s))
    assert max(a.start_ns for a in before.books.accounts) <= middle.start_ns
    assert len(from_ledger(path, Wanted(max_accounts=9)).books.accounts) == 9


def test_requests_of_before_the_host_started_are_left_out(ill, tmp_path):
    def at(account, unix_s):
        return msgspec.structs.replace(account, started_at_unix_ns=unix_s * 10**9 + account.start_ns)

    accounts = tuple(at(account, 10**9 + 10**6 * (i >= 30)) for i, account in enumerate(ill.accounts))
    path = ledger_file(msgspec.structs.replace(ill, accounts=accounts), tmp_path / "l.sqlite")
    found = from_ledger(path, Wanted())
    assert len(found.books.accounts) == 70
    assert "30 requests are of another time" in found.notes[0]


def test_requests_over_the_limit_are_noted(ill, tmp_path):
    path = ledger_file(ill, tmp_path / "l.sqlite")
    assert from_ledger(path, Wanted()).notes == ()
    (note,) = from_ledger(path, Wanted(max_accounts=20)).notes
    assert "80 requests" in note
    assert "over the limit" in note
    few = from_ledger(path, Wanted(max_accounts=9))
    assert len(few.books.accounts) == 9
    assert few.notes[0] == "requests before the latest 90 were not read"
    assert "81 requests" in few.notes[1]


def test_the_wait_at_a_gateway_is_in_the_timeline(ill):
    def at_a_gateway(account):
        moved = tuple(
            msgspec.structs.replace(one, stage=Stage.ADMIT if one.stage is Stage.QUEUE else one.stage)
            for one in account.intervals
        )
        return msgspec.structs.replace(account, intervals=moved)

    def waits(accounts):
        books = msgspec.structs.replace(ill, accounts=tuple(accounts))
        return [each.queue_ms_p95 for each in timeline(books).slices]

    told = waits(ill.accounts)
    assert told == waits(at_a_gateway(account) for account in ill.accounts)
    assert max(each or 0 for each in told) > 0


def test_the_timeline_counts_what_the_books_hold(ill):
    told = timeline(ill)
    assert len(told.slices) == NUM_SLICES
    assert sum(each.ended for each in told.slices) == len(ill.accounts)
    assert sum(each.output_tokens for each in told.slices) == sum(a.output_tokens for a in ill.accounts)
    assert max(each.most_waiting or 0 for each in told.slices) == max(step.num_waiting for step in ill.steps)
    whats = [moment.what for moment in told.moments]
    assert {"started", "ready", "slowest", "longest_step"} <= set(whats)
    assert [moment.at_ns for moment in told.moments] == sorted(moment.at_ns for moment in told.moments)
    empty = timeline(msgspec.structs.replace(ill, accounts=(), steps=(), facts=None))
    assert (empty.moments, empty.slices) == ((), ())


def test_the_timeline_tells_of_processes_and_errors(ill):
    process = Process(
        name="engine",
        started_ns=10,
        restarts=2,
        pauses=((20, 10**9), (30, 10)),
        sleeps=(SleepReport(action="sleep", level=1, begin_ns=40, end_ns=50),),
    )
    facts = msgspec.structs.replace(ill.facts, processes=(process,), knobs_changed_ns=60)
    error = ErrorInfo("k", "m", "late", 504)
    failed = tuple(msgspec.structs.replace(a, error=error) for a in ill.accounts[:3])
    books = msgspec.structs.replace(ill, facts=facts, accounts=(*failed, *ill.accounts[3:]))
    found = {moment.what: moment.text for moment in timeline(books).moments}
    assert found["gc_pause"].endswith("1.000 s")
    assert found["first_error"].endswith("3 in all")
    assert found["started"] == "engine, 2 restarts so far"
    assert {"sleep", "knobs_changed", "last_error"} <= set(found)
    assert sum(each.failed for each in timeline(books).slices) == 3
