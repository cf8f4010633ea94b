"""Both books: the lines sum exactly, nobody is lost, and no clock of one host is subtracted from the other's."""

import os
from itertools import count
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run
from splittime.bench.join import ALL, E2E, TTFT, JoinedBooks, join
from splittime.bench.join_view import render_books, render_request
from splittime.ledger.account import Account, ClosedAccount
from splittime.ledger.stages import Cause, Stage

MS = 1_000_000
FEW = st.integers(0, 50 * MS)


def closed(request_id: str, marks, end_ns: int, ready_ns=(), written_ns=(), **facts) -> ClosedAccount:
    (stage, cause, start_ns), *later = marks
    account = Account(request_id, start_ns, stage)
    for stage, cause, at_ns in later:
        account.enter(stage, at_ns, cause)
    account.close(end_ns)
    given_facts = {
        "group_id": f"cmpl-{request_id}",
        "model": "m",
        "endpoint": "completions",
        "started_at_unix_ns": 0,
        "finish_reason": "length",
        "prompt_tokens": 20,
    }
    return ClosedAccount(
        request_id=request_id,
        start_ns=start_ns,
        end_ns=end_ns,
        intervals=tuple(account.intervals()),
        token_steps=tuple(range(len(ready_ns))),
        token_ready_ns=tuple(ready_ns),
        token_written_ns=tuple(written_ns),
        output_tokens=len(ready_ns),
        **(given_facts | facts),
    )


@st.composite
def accounts(draw, request_id: str) -> ClosedAccount:
    """Any life that ends in some tokens, on a clock of its own."""
    now_ns = draw(st.integers(0, 2**60))
    marks = [(Stage.RECEIVE, None, now_ns)]
    for stage in draw(st.lists(st.sampled_from(Stage), max_size=12)):
        now_ns += draw(FEW)
        marks.append((stage, draw(st.none() | st.sampled_from(Cause)), now_ns))
    end_ns = now_ns + draw(FEW)
    start_ns = marks[0][2]
    ready_ns = sorted(draw(st.lists(st.integers(start_ns, end_ns), max_size=5)))
    num_written = draw(st.integers(0, len(ready_ns)))
    written_ns = [draw(st.integers(at_ns, end_ns)) for at_ns in ready_ns[:num_written]]
    prompt_tokens = draw(st.integers(1, 3000))
    return closed(request_id, marks, end_ns, ready_ns, sorted(written_ns), prompt_tokens=prompt_tokens)


@st.composite
def outcomes(draw, index: int) -> Outcome:
    """Any ending, at any instants of the client's clock that are in order."""
    at_ns = draw(st.integers(0, 2**50))
    instants = [at_ns := at_ns + draw(FEW) for _ in range(6)]
    is_sent, has_chunk = draw(st.booleans()), draw(st.booleans())
    return Outcome(
        index=index,
        request_id=f"r-{index}",
        phase=draw(st.sampled_from(Phase)),
        ending=draw(st.sampled_from(Ending)),
        intended_ns=instants[0],
        picked_up_ns=draw(st.none() | st.just(instants[1])),
        held_ns=draw(FEW),
        connect_ns=draw(st.none() | FEW),
        sent_ns=instants[2] if is_sent else None,
        chunk_ns=tuple(instants[3:5]) if is_sent and has_chunk else (),
        end_ns=instants[5] if is_sent else None,
    )


def run_of(outcomes_, accounts_, round_trip_ns=(MS,)) -> Run:
    arm = Arm(url="http://a", kind="splittime", accounts=tuple(accounts_), round_trip_ns=tuple(round_trip_ns))
    return Run(
        begin_ns=0,
        begin_unix_ns=0,
        measured_from_ns=0,
        measured_until_ns=2**62,
        arms=(arm,),
        outcomes=tuple(outcomes_),
    )


@st.composite
def runs(draw) -> Run:
    """Some requests, of which the server has accounts of some (of one or two choices), and accounts of strangers."""
    all_outcomes = [draw(outcomes(index)) for index in range(draw(st.integers(0, 6)))]
    found = []
    for outcome in all_outcomes:
        for choice in range(draw(st.integers(0, 2))):
            name = f"{outcome.request_id}-{choice}"
            account = draw(accounts(name))
            found.append(msgspec.structs.replace(account, group_id=f"chatcmpl-{outcome.request_id}"))
    found += [draw(accounts("stranger"))]
    return run_of(all_outcomes, found, draw(st.lists(st.integers(0, 5 * MS), max_size=3)))


@settings(max_examples=50)
@given(runs())
def test_lines_sum_exactly_and_nobody_is_lost(run: Run) -> None:
    joined = join(run)
    by_index = {outcome.index: outcome for outcome in run.outcomes}
    for request in joined.requests:
        outcome = by_index[request.index]
        if request.ttft is not None:
            assert request.ttft.total_ns == outcome.chunk_ns[0] - outcome.intended_ns
            assert sum(ns for _, _, ns in request.ttft.lines) == request.ttft.total_ns
        if request.e2e is not None:
            assert request.e2e.total_ns == outcome.end_ns - outcome.intended_ns
            assert sum(ns for _, _, ns in request.e2e.lines) == request.e2e.total_ns
        for split in (request.ttft, request.e2e):
            assert split is None or all(ns >= 0 for stage, _, ns in split.lines if stage != "residual")
    measured = run.measured()
    for figure in (TTFT, E2E):
        have = [r for r in joined.requests if (r.ttft if figure == TTFT else r.e2e) is not None]
        assert len(have) + sum(joined.left_out[figure].values()) == len(measured) == joined.intended


@settings(max_examples=50)
@given(runs())
def test_means_sum_and_buckets_hold_everyone(run: Run) -> None:
    joined = join(run)
    for book in joined.books:
        tolerance = 1e-9 * max(1.0, sum(abs(line.mean_ns) for line in book.lines))
        assert abs(sum(line.mean_ns for line in book.lines) - book.mean_ns) <= tolerance
    for figure in (TTFT, E2E):
        whole = joined.book(figure)
        counts = [book.count for book in joined.books if book.figure == figure and book.bucket != ALL]
        assert sum(counts) == (whole.count if whole else 0)
    assert msgspec.json.decode(msgspec.json.encode(joined), type=JoinedBooks) == joined


def test_known_request_on_two_clocks() -> None:
    """The server's clock is 3 weeks ahead; every line is known."""
    far_ns = 3 * 7 * 86_400 * 10**9
    marks = [
        (Stage.RECEIVE, None, far_ns),
        (Stage.HANDOFF, None, far_ns + 1 * MS),
        (Stage.QUEUE, Cause.BATCH_SLOTS, far_ns + 2 * MS),
        (Stage.QUEUE, Cause.KV_BLOCKS, far_ns + 12 * MS),
        (Stage.PREFILL, None, far_ns + 15 * MS),
        (Stage.DECODE, None, far_ns + 40 * MS),
        (Stage.DELIVER, None, far_ns + 90 * MS),
    ]
    ready_ns, written_ns = (far_ns + 40 * MS, far_ns + 90 * MS), (far_ns + 42 * MS, far_ns + 91 * MS)
    account = closed("r-0", marks, far_ns + 92 * MS, ready_ns, written_ns)
    account = msgspec.structs.replace(account, unseen_ns=3 * MS)
    outcome = Outcome(
        index=0,
        request_id="r-0",
        phase=Phase.MEASURED,
        ending=Ending.COMPLETE,
        intended_ns=5 * MS,
        picked_up_ns=9 * MS,
        held_ns=1 * MS,
        connect_ns=2 * MS,
        sent_ns=12 * MS,
        chunk_ns=(12 * MS + 42 * MS + 7 * MS, 110 * MS),
        end_ns=12 * MS + 92 * MS + 4 * MS,
    )
    joined = join(run_of([outcome], [account], (2 * MS, MS, 9 * MS)))
    assert joined.round_trip_ns == 2 * MS
    (request,) = joined.requests
    ttft = {(stage, cause): ns / MS for stage, cause, ns in request.ttft.lines}
    assert ttft == {
        ("held", None): 1,
        ("client_lag", None): 3,
        ("connect", None): 2,
        ("send", None): 1,
        ("network", None): 2,
        ("receive", None): 1,
        ("handoff", None): 1,
        ("queue", "batch_slots"): 10,
        ("queue", "kv_blocks"): 3,
        ("prefill", None): 25,
        ("deliver", None): 2,
        ("unseen", None): 3,
        ("residual", None): 2,
    }
    e2e = {(stage, cause): ns / MS for stage, cause, ns in request.e2e.lines}
    assert (e2e["decode", None], e2e["deliver", None]) == (50, 2)
    assert (e2e["network", None], e2e["unseen", None], e2e["residual", None]) == (2, 2, 0)


def test_server_that_began_before_the_last_byte_leaves_a_negative_residual() -> None:
    account = closed("r-0", [(Stage.RECEIVE, None, 0), (Stage.PREFILL, None, MS)], 50 * MS, (49 * MS,), (50 * MS,))
    outcome = Outcome(
        index=0,
        request_id="r-0",
        phase=Phase.MEASURED,
        ending=Ending.COMPLETE,
        intended_ns=0,
        picked_up_ns=0,
        sent_ns=20 * MS,
        chunk_ns=(52 * MS,),
        end_ns=52 * MS,
    )
    book = join(run_of([outcome], [account])).book(TTFT)
    assert book is not None
    assert {line.stage: line.mean_ns / MS for line in book.lines}["residual"] == -18
    assert book.residual_abs_mean_ns == 18 * MS
    assert not book.is_within_goal


def test_who_has_nothing_of_a_line_counts_as_0() -> None:
    """Of two requests one waited 8 ms in the queue: the mean is 4, the median (nearest rank) 0."""
    waited = closed("r-0", [(Stage.QUEUE, None, 0), (Stage.PREFILL, None, 8 * MS)], 9 * MS, (9 * MS,), (9 * MS,))
    served = closed("r-1", [(Stage.PREFILL, None, 0)], 9 * MS, (9 * MS,), (9 * MS,))
    instants = {"intended_ns": 0, "picked_up_ns": 0, "sent_ns": 0, "chunk_ns": (9 * MS,), "end_ns": 9 * MS}
    facts = {"phase": Phase.MEASURED, "ending": Ending.COMPLETE, **instants}
    outcomes_ = [Outcome(index=index, request_id=f"r-{index}", **facts) for index in range(2)]
    book = join(run_of(outcomes_, [waited, served])).book(TTFT)
    assert book is not None
    (queue,) = (line for line in book.lines if line.stage == "queue")
    assert (queue.mean_ns, queue.p50_ns, queue.p99_ns) == (4 * MS, 0, 8 * MS)
    assert queue.share == 8 / 18


def test_choices_of_one_request() -> None:
    """TTFT is of the choice that was first, E2E of the one that ended last."""
    first = closed("r-0-0", [(Stage.RECEIVE, None, 0), (Stage.DECODE, None, 9)], 60, (10, 60), (11, 60))
    last = closed("r-0-1", [(Stage.RECEIVE, None, 0), (Stage.DECODE, None, 19)], 80, (20, 80), (21, 80))
    both = [msgspec.structs.replace(account, group_id="cmpl-r-0") for account in (first, last)]
    outcome = Outcome(
        index=0,
        request_id="r-0",
        phase=Phase.MEASURED,
        ending=Ending.COMPLETE,
        intended_ns=0,
        sent_ns=0,
        chunk_ns=(11,),
        end_ns=80,
    )
    (request,) = join(run_of([outcome], both, round_trip_ns=(0,))).requests
    assert request.ttft.residual_ns == request.e2e.residual_ns == 0
    assert request.output_tokens == 4


def test_what_is_left_out_says_why() -> None:
    base = {"phase": Phase.MEASURED, "intended_ns": 0}
    numbers = count()

    def outcome(ending, **more):
        index = next(numbers)
        return Outcome(index=index, request_id=f"r-{index}", ending=ending, **base, **more)

    answered = {"sent_ns": 1, "chunk_ns": (2,), "end_ns": 3}
    run = run_of(
        [
            outcome(Ending.UNSENT),
            outcome(Ending.REFUSED, sent_ns=1, end_ns=3),
            outcome(Ending.CANCELLED, **answered),
            outcome(Ending.COMPLETE, **answered),
        ],
        [closed("r-2", [(Stage.RECEIVE, None, 0)], 9, (5,), (6,))],
    )
    joined = join(run)
    assert joined.left_out == {
        TTFT: {"not sent": 1, "refused": 1, "no account": 1},
        E2E: {"not sent": 1, "refused": 1, "cancelled": 1, "no account": 1},
    }
    assert [request.request_id for request in joined.requests] == ["r-2"]


def text_of(shown: RenderableType) -> str:
    with Path(os.devnull).open("w") as nowhere:
        console = Console(width=100, record=True, file=nowhere)
        console.print(shown)
        return console.export_text()


def test_view_of_one_request() -> None:
    marks = [(Stage.RECEIVE, None, 0), (Stage.QUEUE, Cause.KV_BLOCKS, MS), (Stage.PREFILL, None, 5 * MS)]
    account = closed("r-0", marks, 9 * MS, (8 * MS,), (9 * MS,))
    sent = {"sent_ns": 0, "chunk_ns": (10 * MS,), "end_ns": 12 * MS, "picked_up_ns": 0}
    outcome = Outcome(index=0, request_id="r-0", phase=Phase.MEASURED, ending=Ending.COMPLETE, intended_ns=0, **sent)
    (request,) = join(run_of([outcome], [account])).requests
    lines = {
        line.split()[0]: line.split()[1:] for line in text_of(render_request(request)).splitlines() if line.split()
    }
    assert lines["sum"] == ["10.000", "12.000"]
    assert lines["residual"] == ["0.000", "2.000"]
    assert lines["queue:"] == ["kv_blocks", "4.000", "4.000"]


def test_view_names_every_line() -> None:
    marks = [(Stage.RECEIVE, None, 0), (Stage.QUEUE, Cause.KV_BLOCKS, MS), (Stage.PREFILL, None, 5 * MS)]
    account = closed("r-0", marks, 9 * MS, (8 * MS,), (9 * MS,))
    sent = {"sent_ns": 0, "chunk_ns": (10 * MS,), "end_ns": 10 * MS}
    outcome = Outcome(
        index=0, request_id="r-0", phase=Phase.MEASURED, ending=Ending.COMPLETE, intended_ns=0, picked_up_ns=0, **sent
    )
    text = text_of(render_books(join(run_of([outcome], [account]))))
    assert "queue: kv_blocks" in text
    assert "residual" in text
    assert "within the goal" in text
    nothing = text_of(render_books(join(run_of([outcome], []))))
    assert "1 no account" in nothing


@given(runs())
@settings(max_examples=20)
def test_view_shows_any_run(run: Run) -> None:
    assert text_of(render_books(join(run)))
