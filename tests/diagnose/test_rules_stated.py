"""What the books state comes before what a rule infers: pauses, a stopped engine, stolen processors, sleep."""

import re

import msgspec
import pytest
from test_rules_client import with_client
from test_rules_queue import names, poisson
from ward import MS, Case, Ward, ids

from splittime.bench.book.records import RunCheck
from splittime.core.errors import ErrorInfo
from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.finding import Abstention
from splittime.diagnose.rules.processor import cpu_quota
from splittime.diagnose.unexplained import MAX_UNEXPLAINED, unexplained
from splittime.ledger.stages import Cause, Stage

CHATS = [Case(150 * i, ids(16, i), 120) for i in range(30)]
PROMPTS = [Case(300 + 400 * i, ids(200, 1000 + i), 4) for i in range(10)]
EVERY = range(0, 6000, 400)


def pauses(ms: float) -> list:
    return [entry for at in EVERY for entry in ((at, {"paused": True}), (at + ms, {"paused": False}))]


def test_a_pause_for_a_quarter_of_the_time():
    diagnosis = diagnose(Ward(token_ms=0.1, knobs=pauses(100)).run(*CHATS, *PROMPTS))
    assert [one.name for one in diagnosis.illnesses] == ["paused"]
    assert 0.15 < diagnosis.illnesses[0].share_of_time < 0.4
    assert diagnosis.illnesses[0].cure.flags == ()


def test_an_engine_that_is_stopped_from_outside():
    diagnosis = diagnose(Ward(token_ms=0.1, stops_ms=[(at, 150) for at in EVERY]).run(*CHATS, *PROMPTS))
    assert [one.name for one in diagnosis.illnesses] == ["engine_stopped"]
    assert diagnosis.illnesses[0].share_of_time > 0.2


@pytest.mark.parametrize(("others", "first"), [(0.1, "engine_stopped"), (1.9, "cpu_starved")])
def test_on_a_machine_full_of_others_who_waits_is_not_taken_for_stopped(others, first):
    """Its thread is off for those of its process that wait, too."""
    stops = [(at, 150) for at in EVERY]
    ward = Ward(token_ms=0.1, stops_ms=stops, wait_share=0.3, beside=(0.0, others), machine=(1, 2))
    assert names(ward.run(*CHATS, *PROMPTS))[0] == first


def test_what_happened_is_told_though_another_run_may_show_less():
    """Most requests were spared: the pause, or the stop, is as true as if it had met all of them."""
    paused = diagnose(Ward(token_ms=0.1, knobs=[(1500, {"paused": True}), (2400, {"paused": False})]).run(*CHATS))
    assert [one.name for one in paused.illnesses] == ["paused"]
    stopped = diagnose(Ward(token_ms=0.1, stops_ms=[(1500, 900)]).run(*CHATS))
    assert [one.name for one in stopped.illnesses] == ["engine_stopped"]


def test_moments_off_the_processor_are_no_stop():
    """As where the engine's thread waits for another one that has no processor."""
    books = Ward().run(*CHATS)
    off_ns = [(s.end_ns - s.begin_ns) * 2 // 3 if s.step_id % 3 == 0 else 0 for s in books.steps]
    steps = tuple(msgspec.structs.replace(s, off_cpu_ns=ns) for s, ns in zip(books.steps, off_ns, strict=True))
    diagnosis = diagnose(msgspec.structs.replace(books, steps=steps))
    assert "engine_stopped" not in [one.name for one in diagnosis.illnesses]
    assert "engine_stopped" in [one.name for one in diagnosis.abstentions]


def test_a_stop_that_makes_a_queue_is_its_root():
    stops = [(at, 300) for at in EVERY]
    books = Ward(settings={"max_num_seqs": 8}, stops_ms=stops).run(*poisson(20, 100, output=30))
    assert names(books)[0] == "engine_stopped"


def test_a_kernel_that_says_nothing():
    books = Ward(stops_ms=[(at, 150) for at in EVERY]).run(*CHATS, *PROMPTS)
    blind = tuple(msgspec.structs.replace(step, off_cpu_ns=None, cpu_wait_ns=None) for step in books.steps)
    diagnosis = diagnose(msgspec.structs.replace(books, steps=blind))
    assert {"engine_stopped", "cpu_starved"} <= {one.name for one in diagnosis.abstentions}


def test_processors_that_others_have():
    diagnosis = diagnose(Ward(wait_share=0.6).run(*CHATS, *PROMPTS))
    assert [one.name for one in diagnosis.illnesses] == ["cpu_starved"]
    (found,) = diagnosis.illnesses
    assert "Other processes" not in found.claim, "nobody told who ran"
    assert "Nobody tells who had it for" in found.claim
    assert found.confidence < 0.8


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_little_of_it_is_no_illness(share):
    assert names(Ward(wait_share=share).run(*CHATS, *PROMPTS)) == []


def test_a_wait_for_a_processor_that_is_usual_is_told_with_its_reason():
    diagnosis = diagnose(Ward(wait_share=0.18).run(*CHATS, *PROMPTS))
    assert diagnosis.illnesses == ()
    (why,) = (one.why for one in diagnosis.abstentions if one.name == "cpu_starved")
    assert "a client beside it" in why


@pytest.mark.parametrize(
    ("wait", "own", "others", "found"),
    [(0.25, 0.1, 1.0, ["cpu_starved"]), (0.6, 0.1, 0.9, ["cpu_starved"]), (0.6, 0.6, 0.02, []), (0.25, 0.5, 0.3, [])],
)
def test_a_wait_is_for_others_as_far_as_they_ran(wait, own, others, found):
    """Whatever a server's own processes take of two cores is no illness; what others take is from a tenth on."""
    books = Ward(wait_share=wait, beside=(own, others)).run(*CHATS, *PROMPTS)
    diagnosis = diagnose(books)
    assert [one.name for one in diagnosis.illnesses] == found
    if found:
        (first,) = diagnosis.illnesses
        stolen = wait / (1 + wait) * others / (own + others)
        assert first.share_of_time == pytest.approx(stolen, abs=0.05)
        assert "ms for each token" in first.claim
    else:
        (why,) = (one.why for one in diagnosis.abstentions if one.name == "cpu_starved")
        whole = attribution(books).share(Computed.CPU_WAIT)
        assert f"{whole:.0%} of the requests' time: by what they ran" in why
        for_others = whole * others / (own + others)
        assert f"{for_others:.0%} for other processes, {whole - for_others:.0%} for this server's own" in why


@pytest.mark.parametrize(
    ("throttled", "others", "found"),
    [
        (0.0, 0.9, ["cpu_starved"]),
        (0.05, 0.9, ["cpu_starved"]),
        (0.9, 0.9, ["cpu_quota"]),
        (2.0, 0.9, ["cpu_quota"]),  # of several processors at once
        (0.5, 0.9, ["cpu_quota", "cpu_starved"]),
        (0.9, 0.0, ["cpu_quota"]),
        (None, 0.9, ["cpu_starved"]),
    ],
)
def test_a_group_that_is_throttled_waits_for_nobody(throttled, others, found):
    books = Ward(wait_share=1.0, beside=(0.0, others), throttled=throttled).run(*CHATS, *PROMPTS)
    diagnosis = diagnose(books)
    assert [one.name for one in diagnosis.illnesses] == found
    if found[0] == "cpu_quota":
        part = min(1.0, throttled) * attribution(books).share(Computed.CPU_WAIT)
        assert diagnosis.illnesses[0].share_of_time == pytest.approx(part, rel=0.05), "of one processor"


@pytest.mark.parametrize(
    ("counted", "machine", "quota", "at_once"), [(4.0, (4, 4), None, 4), (0.8, (4, 4), None, 4), (2.0, (2, 1), 1.5, 3)]
)
def test_throttled_time_is_summed_over_processors(counted, machine, quota, at_once):
    """Of 4 that were throttled at once the kernel counts 4 seconds in one."""
    ward = Ward(wait_share=0.8, machine=machine, quota=quota, beside=(0.0, 3.5), throttled=counted)
    books = ward.run(*CHATS, *PROMPTS)
    waited, answer = attribution(books).share(Computed.CPU_WAIT), cpu_quota(books)
    low, high = waited * min(1.0, counted / at_once), waited * min(1.0, counted)
    if low < 0.1:
        assert isinstance(answer, Abstention)
        assert answer.why.startswith(f"throttled for {low:.0%} to {high:.0%} of the requests' time")
    else:
        assert answer.share_interval == pytest.approx((low, high), rel=0.05)
        assert answer.share_of_time == answer.share_interval[1]
        assert re.search(r"throttled for [\d.]+ processor-seconds: \d+% to \d+% of all", answer.claim)


@pytest.mark.parametrize(
    ("throttled", "found"), [(1.0, "cpu_quota"), (0.0, "engine_stopped"), (None, "engine_stopped")]
)
def test_a_kernel_by_which_who_is_throttled_does_not_ask_to_run(throttled, found):
    stops = [(at, 60) for at in range(0, 6000, 100)]
    books = Ward(stops_ms=stops, beside=(0.0, 0.0), throttled=throttled).run(*CHATS, *PROMPTS)
    assert names(books) == [found]


@pytest.mark.parametrize(
    ("quota", "machine", "said", "flags"),
    [
        (1.5, (2, 1), "quota of 1.5 cores", ("--num-threads", "1")),
        (0.5, (1, 1), "quota of 0.5 cores", ()),
        (None, (2, 2), "processor quota and", ()),  # it was set, or the server moved there, after the start
    ],
)
def test_a_quota_is_told_with_what_it_takes(quota, machine, said, flags):
    ward = Ward(wait_share=1.0, beside=(0.0, 0.5), throttled=1.8, machine=machine, quota=quota)
    first = diagnose(ward.run(*CHATS, *PROMPTS)).illnesses[0]
    assert first.name == "cpu_quota"
    assert said in first.claim
    assert first.cure.flags == flags
    assert f"{machine[0] + 1} cores or more" in first.cure.sentence


def test_few_steps_with_many_requests_are_evidence_enough():
    """Steps of a quarter of a second, nearly all of it waiting for others' turns."""
    cases = [Case(400 * i, ids(16, i), 1) for i in range(30)]
    books = Ward(step_ms=30, wait_share=6.0, beside=(0.0, 4.0)).run(*cases)
    assert len(books.steps) < 50
    assert names(books) == ["cpu_starved"]


def test_only_what_was_asked_is_said_to_have_been():
    """Requests wait for slots, which a larger batch would not shorten; and without steps nobody can ask that."""
    books = Ward(step_ms=0.01, token_ms=5.0, settings={"max_num_seqs": 4}).run(*poisson(12, 100, prompt=2))
    asked = [Abstention(name="slot_bound", why="32 would serve only 2% more a second")]
    lacks = [Abstention(name="burst", why="no records of steps", was_asked=False)]
    told = [unexplained(books, (), abstentions).cure.sentence for abstentions in (asked, lacks, asked + lacks, ())]
    assert ["What usually helps would not here: slot_bound. " in words for words in told] == [True, False, True, False]
    assert ["What might help could not be asked: burst. " in words for words in told] == [False, True, True, False]
    assert [words.startswith("Look at the requests named here") for words in told] == [False, False, False, True]
    without_steps = diagnose(msgspec.structs.replace(books, steps=())).abstentions
    assert {one.name: one.was_asked for one in without_steps}["kv_bound"] is False


def test_the_load_generator_beside_the_server_is_not_the_others():
    books = Ward(wait_share=0.4, beside=(0.1, 0.9)).run(*CHATS, *PROMPTS)
    cpu = RunCheck(name="cpu", ok=True, value=0.88, limit=0.9, unit="", sentence="", voids=False)
    assert names(with_client(books)) == ["cpu_starved"]
    assert "load generator" not in str(diagnose(books).illnesses[0].evidence), "nobody knows whether it is here"
    assert names(with_client(books, checks=[cpu])) == []
    assert names(with_client(books, checks=[cpu], url="http://elsewhere:8000")) == ["cpu_starved"]


def ran_by_others(books, cores):
    """cores: how many others keep busy, by when."""
    counted, ran_ns, before_ns = [], 0, books.steps[0].begin_ns
    for step in books.steps:
        ran_ns += int(cores(step.end_ns, step.end_ns - before_ns) * (step.end_ns - before_ns))
        before_ns = step.end_ns
        counted.append(msgspec.structs.replace(step, others_ran_ns=ran_ns))
    return msgspec.structs.replace(books, steps=tuple(counted))


@pytest.mark.parametrize(("while_busy", "while_quiet", "found"), [(0.02, 2.0, []), (1.0, 0.0, ["cpu_starved"])])
def test_who_ran_while_nobody_waited_is_not_whom_it_waited_for(while_busy, while_quiet, found):
    """Ten minutes without requests lie between two loads."""
    two = [Case(case.at_ms + 600_000 * (i >= 40), case.prompt, 40) for i, case in enumerate(poisson(4, 80))]
    books = Ward(wait_share=0.6, beside=(0.5, 0.0)).run(*two)
    assert names(ran_by_others(books, lambda at, ns: while_quiet if ns > 10**11 else while_busy)) == found


def test_whom_it_waited_for_is_told_by_the_seconds_in_which_it_waited():
    """A neighbour in every third second, who has all of the waits: over all seconds this server's own ran as much."""
    books = Ward(beside=(0.4, 0.0)).run(*[Case(100 * i, ids(16, i), 20) for i in range(150)])

    def is_there(at_ns):
        return at_ns // 10**9 % 3 == 0

    waited_ns, steps = 0, []
    for step in books.steps:
        wait_ns = int(0.9 * (step.end_ns - step.begin_ns)) if is_there(step.end_ns) else 0
        waited_ns += wait_ns
        steps.append(msgspec.structs.replace(step, cpu_wait_ns=wait_ns, server_ran_ns=step.server_ran_ns - waited_ns))
    starved = msgspec.structs.replace(books, steps=tuple(steps))
    whole = attribution(starved).share(Computed.CPU_WAIT)
    (first,) = diagnose(ran_by_others(starved, lambda at, _: 1.2 * is_there(at))).illnesses
    assert first.name == "cpu_starved"
    assert first.share_of_time == pytest.approx(whole * 0.75, rel=0.1)


def test_a_counter_that_goes_back_is_another_servers():
    """A server's successor has run nothing yet, and what its predecessor ran is then others'."""
    books = Ward(wait_share=0.6, beside=(0.5, 0.05)).run(*CHATS, *PROMPTS)
    half, gone_ns = len(books.steps) // 2, 10**13

    def told(i, step):
        server_ns, others_ns = step.server_ran_ns + gone_ns, step.others_ran_ns
        if i >= half:
            server_ns, others_ns = step.server_ran_ns, step.others_ran_ns + gone_ns
        return msgspec.structs.replace(step, server_ran_ns=server_ns, others_ran_ns=others_ns)

    restarted = msgspec.structs.replace(books, steps=tuple(told(i, step) for i, step in enumerate(books.steps)))
    assert names(books) == names(restarted) == []


def test_other_work_beside_a_starved_engine_is_not_named_for_it():
    """What is left of the host's own work, of a thread that is put aside all the time, is no finding of its own."""
    assert names(Ward(step_ms=0.3, token_ms=0.01, gap_ms=0.4, wait_share=4.0).run(*CHATS)) == ["cpu_starved"]
    assert names(Ward(step_ms=0.3, token_ms=0.01, gap_ms=0.6).run(*CHATS)) == ["host_bound"]


def test_more_threads_than_cores():
    ward = Ward(wait_share=0.6, machine=(8, 2), told={"num_threads": 8})
    diagnosis = diagnose(ward.run(*CHATS, *PROMPTS))
    first = diagnosis.illnesses[0]
    assert first.name == "too_many_threads"
    assert first.cure.flags == ("--num-threads", "2")
    assert "cpu_starved" not in names(ward.run(*CHATS, *PROMPTS))


def test_fewer_threads_than_cores_where_steps_are_long():
    told = {"num_threads": 1, "num_threads_reason": "1, as asked"}
    long = Ward(step_ms=12, machine=(1, 2), told=told).run(*CHATS)
    assert names(long) == ["too_few_threads"]
    assert diagnose(long).illnesses[0].cure.flags == ("--num-threads", "2")
    assert names(Ward(step_ms=1, machine=(1, 2), told=told).run(*CHATS)) == []
    measured = told | {"num_threads_reason": "measured, a decode step and a prompt by threads: 1: 1 ms, 2: 2 ms"}
    assert names(Ward(step_ms=12, machine=(1, 2), told=measured).run(*CHATS)) == []


def test_requests_that_meet_a_sleeping_server():
    books = Ward().run(*poisson(10, 60))
    error = ErrorInfo(kind="overloaded_error", message="the server is asleep", code="asleep", status=503)
    asleep = [msgspec.structs.replace(a, finish_reason="refused", error=error) for a in books.accounts[:10]]
    found = names(msgspec.structs.replace(books, accounts=(*asleep, *books.accounts[10:])))
    assert found == ["sleeping"]


def test_a_wait_that_nobody_knows_a_cure_for_is_told_as_it_is():
    """Every request waits for its images' encoder: stated, and no rule is about it."""
    books = Ward(settings={"max_num_seqs": 2}).run(*poisson(25, 100))
    accounts = tuple(
        msgspec.structs.replace(
            a,
            intervals=tuple(
                msgspec.structs.replace(i, cause=Cause.ENCODER_BUDGET) if i.cause is Cause.BATCH_SLOTS else i
                for i in a.intervals
            ),
        )
        for a in books.accounts
    )
    diagnosis = diagnose(msgspec.structs.replace(books, accounts=accounts))
    assert diagnosis.illnesses == ()
    first = diagnosis.findings[0]
    assert first.name == "no_cure_known"
    assert "encoder_budget" in first.claim
    assert first.share_of_time > MAX_UNEXPLAINED
    assert not diagnosis.could_tell


def test_a_wait_that_a_larger_batch_would_not_cure_is_explained_first():
    """The picture of the page: most of the time in batch_slots, which more slots would not shorten."""
    ward = Ward(step_ms=0.01, token_ms=5.0, settings={"max_num_seqs": 4})
    diagnosis = diagnose(ward.run(*poisson(12, 100, prompt=2)))
    first = diagnosis.findings[0]
    assert diagnosis.spent[0].owner == "batch_slots"
    assert first.name in ("overload", "no_cure_known")
    assert diagnosis.spent[0].explained_by in ("overload", None)


SHORT = [Case(150 * i, ids(8, i), 1) for i in range(60)]
TOGETHER = [Case(200 * (i // 8), ids(8, i), 1) for i in range(480)]


@pytest.mark.parametrize(
    ("ward", "cases", "said"),
    [(Ward(wake_ms=6), SHORT, "woke late"), (Ward(take_ms=4), TOGETHER, "took in others")],
)
def test_an_engine_that_is_late_to_take_in_what_has_come(ward, cases, said):
    first = diagnose(ward.run(*cases)).findings[0]
    assert first.name == "engine_loop_late"
    assert said in first.claim
    assert first.share_of_time > 0.3
    assert first.cure.flags == ()


def before_an_idle_engine(for_ms: float):
    """Ten that the engine hears of at one moment came one by one before that, while nothing ran."""
    heard = [Case(0, ids(16, 100 + i), 20) for i in range(10)]
    books = Ward().run(*heard, *(Case(500 + 200 * i, ids(16, i), 20) for i in range(30)))
    first = sorted(books.accounts, key=lambda account: account.start_ns)[:10]
    earlier_ns = {account.request_id: int(for_ms * MS * (10 - i) / 10) for i, account in enumerate(first)}
    accounts = tuple(_earlier(account, earlier_ns.get(account.request_id, 0)) for account in books.accounts)
    return msgspec.structs.replace(books, accounts=accounts)


def _earlier(account, ns: int):
    """The same, which came so much earlier and lay before the engine that long."""
    moved = [
        msgspec.structs.replace(
            one,
            begin_ns=one.begin_ns - ns,
            end_ns=one.end_ns - ns * (one.stage is not Stage.HANDOFF),
        )
        if one.stage in (Stage.RECEIVE, Stage.TOKENIZE, Stage.HANDOFF)
        else one
        for one in account.intervals
    ]
    return msgspec.structs.replace(account, start_ns=account.start_ns - ns, intervals=tuple(moved))


def test_an_engine_that_is_stopped_while_it_has_nothing_to_do_hears_nobody():
    first = diagnose(before_an_idle_engine(3000)).findings[0]
    assert first.name == "engine_stopped"
    assert "1 times for" in first.claim
    assert first.share_of_time > 0.7


def test_who_lies_before_an_idle_engine_for_a_moment_tells_of_no_stop():
    assert "engine_stopped" not in names(before_an_idle_engine(100))


@pytest.mark.parametrize(("ward", "cases"), [(Ward(wake_ms=0.9), SHORT), (Ward(take_ms=0.02), TOGETHER)])
def test_what_waking_usually_takes_is_no_illness(ward, cases):
    assert names(ward.run(*cases)) == []


def test_an_engine_late_for_want_of_quick_steps_is_told_by_its_root():
    cases = [Case(case.at_ms, case.prompt, 2) for case in poisson(60, 200)]
    assert names(Ward(step_ms=1, gap_ms=8).run(*cases))[0] == "host_bound"
