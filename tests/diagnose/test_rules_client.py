"""What lies between the server's last byte and the user: made by sending the server's own chunks a spoilt way."""

import itertools
import random
from collections.abc import Callable, Sequence

import msgspec
import pytest
from test_rules_queue import poisson
from ward import MS, Case, Ward, ids

from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run, RunCheck
from splittime.core.errors import ErrorInfo
from splittime.diagnose.doctor import diagnose
from splittime.ledger.account import ClosedAccount

Way = Callable[[Sequence[int]], list[int]]
NETWORK_NS = 300_000


def directly(written_ns: Sequence[int]) -> list[int]:
    rng = random.Random(written_ns[0])
    return [at_ns + NETWORK_NS + rng.randrange(100_000) for at_ns in written_ns]


def buffered(written_ns: Sequence[int]) -> list[int]:
    """All at the end, one after the other."""
    return [written_ns[-1] + NETWORK_NS + 20_000 * i for i in range(len(written_ns))]


def in_bursts(written_ns: Sequence[int], each: int = 16) -> list[int]:
    """A buffer that holds so many chunks."""
    ends = [min(len(written_ns) - 1, i // each * each + each - 1) for i in range(len(written_ns))]
    return [written_ns[end] + NETWORK_NS + 1_000 * i for i, end in enumerate(ends)]


def under_nagle(written_ns: Sequence[int]) -> list[int]:
    """What is small waits until the piece before was acknowledged, 40 ms after it went."""
    read, free_ns = [], 0
    for at_ns in written_ns:
        if at_ns >= free_ns:
            free_ns = at_ns + 40 * MS
            read.append(at_ns + NETWORK_NS)
        else:
            read.append(free_ns + NETWORK_NS)
    return sorted(read)


def outcome(index: int, account: ClosedAccount, begin_ns: int, way: Way, lag_ns: int = 0) -> Outcome:
    """By the client's own clock, which begins elsewhere."""
    sent_ns = account.start_ns - begin_ns - NETWORK_NS
    chunks = [at_ns - begin_ns for at_ns in way(account.token_written_ns)]
    return Outcome(
        index=index,
        request_id=account.request_id,
        phase=Phase.MEASURED,
        ending=Ending.COMPLETE,
        intended_ns=sent_ns - lag_ns,
        picked_up_ns=sent_ns,
        sent_ns=sent_ns,
        chunk_ns=tuple(chunks),
        chunk_tokens=(1,) * len(chunks),
        end_ns=max(chunks[-1], account.end_ns - begin_ns) + NETWORK_NS,
        status=200,
    )


def with_client(
    books, way: Way = directly, lag_ns: int = 0, checks=(), has_accounts: bool = True, url: str = "http://127.0.0.1:1"
):
    begin_ns = 17 * MS  # any: the clocks are two
    outcomes = [outcome(i, account, begin_ns, way, lag_ns) for i, account in enumerate(books.accounts)]
    run = Run(
        begin_ns=0,
        begin_unix_ns=0,
        measured_from_ns=0,
        measured_until_ns=10**12,
        arms=(Arm(url=url, kind="splittime" if has_accounts else "vllm", round_trip_ns=(2 * NETWORK_NS,)),),
        outcomes=tuple(outcomes),
        checks=tuple(checks),
    )
    own = {} if has_accounts else {"accounts": (), "steps": (), "facts": None}
    return msgspec.structs.replace(books, run=run, **own)


@pytest.fixture(scope="module")
def healthy():
    return Ward().run(*poisson(8, 80, output=40))


def names(books) -> list[str]:
    return [finding.name for finding in diagnose(books).illnesses]


@pytest.mark.parametrize("has_accounts", [True, False])
def test_a_clean_way(healthy, has_accounts):
    assert names(with_client(healthy, has_accounts=has_accounts)) == []


def in_sockets(books, wait_ns: int, unseen_ns: int):
    """Every request lay so long in its socket before the server saw it, and the server says that it may have."""
    seen = with_client(books)
    outcomes = tuple(msgspec.structs.replace(o, sent_ns=o.sent_ns - wait_ns) for o in seen.run.outcomes)
    run = msgspec.structs.replace(seen.run, outcomes=outcomes)
    accounts = tuple(msgspec.structs.replace(a, unseen_ns=unseen_ns) for a in seen.accounts)
    return msgspec.structs.replace(seen, run=run, accounts=accounts)


def test_a_loop_that_does_not_look_at_its_sockets(healthy):
    wait_ns = 200 * MS
    silent = diagnose(in_sockets(healthy, wait_ns, 0))
    assert [one.name for one in silent.illnesses] == ["slow_way"], "nobody accounts for that time"
    told = diagnose(in_sockets(healthy, wait_ns, wait_ns + 50 * MS))
    assert not told.withheld
    assert [finding.name for finding in told.illnesses] == ["loop_stalls"]


def test_a_loop_that_does_not_look_without_a_client(healthy):
    accounts = tuple(msgspec.structs.replace(a, unseen_ns=300 * MS) for a in healthy.accounts)
    (finding,) = diagnose(msgspec.structs.replace(healthy, accounts=accounts)).illnesses
    assert finding.name == "loop_stalls"
    short = tuple(msgspec.structs.replace(a, unseen_ns=8 * MS) for a in healthy.accounts)
    assert names(msgspec.structs.replace(healthy, accounts=short)) == []


@pytest.mark.parametrize("has_accounts", [True, False])
def test_a_proxy_that_keeps_all_to_the_end(healthy, has_accounts):
    diagnosis = diagnose(with_client(healthy, buffered, has_accounts=has_accounts))
    assert [finding.name for finding in diagnosis.illnesses] == ["buffering_proxy"]
    assert diagnosis.findings[0].confidence > (0.9 if has_accounts else 0.5)


def test_a_proxy_with_a_small_buffer(healthy):
    assert names(with_client(healthy, in_bursts)) == ["buffering_proxy"]


def held_until(ns: int) -> Way:
    """The answer may begin so long after its first chunk was written; what was written meanwhile comes with it."""

    def way(written_ns: Sequence[int]) -> list[int]:
        return [max(at_ns, written_ns[0] + ns) + NETWORK_NS for at_ns in written_ns]

    return way


@pytest.mark.parametrize("output", [20, 40, 80, 200])
@pytest.mark.parametrize("held_ms", [150, 300])
def test_a_proxy_that_holds_the_begin_of_each_answer(output, held_ms):
    """Shorter and longer answers than it holds them for: no buffer, since what comes later flows."""
    books = with_client(Ward().run(*poisson(8, 80, output=output)), held_until(held_ms * MS))
    assert names(books) == ["slow_way"]


@pytest.mark.parametrize("output", [10, 11, 12, 13, 20, 200])
def test_a_buffer_stays_one_however_long_the_answers_are(output):
    books = Ward().run(*poisson(8, 80, output=output))
    assert names(with_client(books, buffered)) == ["buffering_proxy"]


@pytest.mark.parametrize(("ok", "found"), [(True, ["buffering_proxy"]), (False, ["client_bound"])])
def test_a_client_that_read_late_by_its_own_checks_is_no_proxy(ok, found):
    """Short answers, of which both books tell the same burst."""
    books = with_client(Ward().run(*poisson(8, 80, output=10)), buffered)
    check = RunCheck(name="loop_lag", ok=ok, value=9.0, limit=1.0, unit="ms", sentence="it read late", voids=True)
    books = msgspec.structs.replace(books, run=msgspec.structs.replace(books.run, checks=(check,)))
    assert [finding.name for finding in diagnose(books).findings] == found


def test_answers_too_short_to_be_written_in_a_pattern_are_no_buffer_s():
    """A slow start of quick answers: the client alone would take it for a buffer, the server's book knows better."""
    quick = Ward(step_ms=0.3).run(*poisson(8, 80, output=10))
    assert "buffering_proxy" not in names(with_client(quick, buffered))
    assert "buffering_proxy" in names(with_client(quick, buffered, has_accounts=False))


@pytest.mark.parametrize("has_accounts", [True, False])
def test_nagle(healthy, has_accounts):
    assert names(with_client(healthy, under_nagle, has_accounts=has_accounts))[0] == "nagle"


def test_a_server_that_makes_a_token_every_40_ms_is_no_nagle():
    books = Ward(step_ms=40).run(*(Case(900 * i, ids(16, i), 20) for i in range(30)))
    for has_accounts in (True, False):
        assert names(with_client(books, has_accounts=has_accounts)) == []


def test_a_first_chunk_that_waits_for_an_acknowledgement(healthy):
    def way(written_ns: Sequence[int]) -> list[int]:
        return sorted(max(at_ns, written_ns[0] + 40 * MS) + NETWORK_NS for at_ns in written_ns)

    assert names(with_client(healthy, way))[0] == "nagle"


def test_a_client_that_is_late(healthy):
    assert names(with_client(healthy, lag_ns=60 * MS)) == ["client_bound"]


def test_a_client_whose_own_checks_fail(healthy):
    check = RunCheck(name="loop_lag", ok=False, value=40.0, limit=2.0, unit="ms", sentence="the event loop was late")
    diagnosis = diagnose(with_client(healthy, checks=[check]))
    assert diagnosis.healthy, "the client's lag explains next to nothing of what was felt"
    assert [finding.name for finding in diagnosis.limits] == ["client_bound"]
    assert "The event loop was late." in diagnosis.findings[0].claim
    note = msgspec.structs.replace(check, voids=False)
    assert names(with_client(healthy, checks=[note])) == []


def test_a_client_at_fault_comes_before_what_its_clock_says(healthy):
    assert names(with_client(healthy, buffered, lag_ns=60 * MS)) == ["client_bound", "buffering_proxy"]


def test_slow_readers_are_named():
    rng = random.Random(3)
    cases = [waiting(case, rng.choice([0, 0, 800])) for case in poisson(8, 80)]
    first = diagnose(Ward().run(*cases)).findings[0]
    assert first.name == "slow_client"


def waiting(case: Case, client_wait_ms: float) -> Case:
    return Case(case.at_ms, case.prompt, case.output, client_wait_ms=client_wait_ms)


def test_slow_readers_whose_kernels_take_it_all(healthy):
    """The server has written everything, and the chunks trickle into the client's program."""

    def way(written_ns: Sequence[int]) -> list[int]:
        return [at_ns + NETWORK_NS + 15 * MS * i for i, at_ns in enumerate(written_ns)]

    diagnosis = diagnose(with_client(healthy, way))
    assert [finding.name for finding in diagnosis.illnesses] == ["slow_client"]
    assert diagnosis.findings[0].share_of_time > 0.5


def test_those_that_were_dropped_are_named(healthy):
    error = ErrorInfo("slow_reader", "the client did not read", "slow_reader", 408)
    one = msgspec.structs.replace(healthy.accounts[3], error=error, finish_reason="error")
    books = msgspec.structs.replace(healthy, accounts=(*healthy.accounts[:3], one, *healthy.accounts[4:]))
    assert diagnose(books).findings[0].request_ids == (one.request_id,)


def test_without_accounts_it_says_what_cannot_be_told(healthy):
    diagnosis = diagnose(with_client(healthy, has_accounts=False))
    untold = {abstention.name: abstention.why for abstention in diagnosis.abstentions}
    assert {"slot_bound", "kv_bound", "head_of_line", "prefix_broken"} <= set(untold)
    assert "only a splittime server" in untold["kv_bound"]
    assert diagnosis.healthy


def test_time_in_neither_book_withholds_the_server_rules():
    """Every third comes a second late, in good order: no finding explains that."""
    books = Ward(settings={"max_num_seqs": 2}).run(*poisson(12, 80))
    turns = itertools.count()
    late = with_client(
        books, lambda written: [at_ns + 1000 * MS * (i % 3 == 0) for i in [next(turns)] for at_ns in written]
    )
    diagnosis = diagnose(late)
    assert diagnosis.withheld
    assert diagnosis.findings == ()


def test_a_proxy_that_holds_each_request(healthy):
    late = with_client(healthy, lambda written_ns: [at_ns + 300 * MS for at_ns in written_ns])
    diagnosis = diagnose(late)
    assert not diagnosis.withheld
    (finding,) = diagnosis.illnesses
    assert finding.name == "slow_way"
    assert "300 ms" in finding.claim
    assert finding.cure.flags == ()


def test_overload_is_seen_from_outside_too():
    books = Ward(step_ms=0.1, token_ms=2.0).run(*poisson(15, 150))
    first = diagnose(with_client(books, has_accounts=False)).findings[0]
    assert first.name == "overload"


def test_refusals_are_overload(healthy):
    books = with_client(healthy, has_accounts=False)
    refused = [
        msgspec.structs.replace(o, chunk_ns=(), status=429, ending=Ending.REFUSED) if o.index % 3 == 0 else o
        for o in books.run.outcomes
    ]
    books = msgspec.structs.replace(books, run=msgspec.structs.replace(books.run, outcomes=tuple(refused)))
    assert names(books) == ["overload"]
