"""The client's questions to itself: each fault is seen where it is made, and no other; only its own faults void."""

import msgspec
import pytest

from splittime.bench.audit import audit
from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run, RunCheck
from splittime.bench.share import Vitals

MS = 1_000_000


def outcome(index=0, *, gaps_ms=(10.0,) * 19, ttft_ms=100.0, lag_ms=0.1, phase=Phase.MEASURED, **fields):
    intended_ns = index * 50 * MS
    sent_ns = intended_ns + int(lag_ms * MS) + fields.get("held_ns", 0) + fields.get("connect_ns", 0)
    chunks = [sent_ns + int(ttft_ms * MS)]
    for gap in gaps_ms:
        chunks.append(chunks[-1] + int(gap * MS))
    usual = {
        "ending": Ending.COMPLETE,
        "prompt_tokens": 100,
        "expected_prompt_tokens": 100,
        "output_tokens": 20,
        "expected_output_tokens": 20,
        "cached_tokens": 0,
        "expected_cached_tokens": 0,
    }
    return Outcome(
        index=index,
        request_id=f"r{index}",
        phase=phase,
        intended_ns=intended_ns,
        picked_up_ns=sent_ns,
        sent_ns=sent_ns,
        chunk_ns=tuple(chunks),
        end_ns=chunks[-1],
        **{**usual, **fields},
    )


def vitals(**fields):
    usual = {
        "worker": 0,
        "loop_lag_ns": (100_000,) * 200,
        "cpu_share": 0.2,
        "most_sockets": 10,
        "sockets_limit": 1024,
        "out_of_sockets": 0,
        "sockets_without_nodelay": 0,
    }
    return Vitals(**{**usual, **fields})


def checks(outcomes, *all_vitals):
    run = Run(
        begin_ns=0,
        begin_unix_ns=0,
        measured_from_ns=0,
        measured_until_ns=10**12,
        arms=(Arm(url="u", kind="mock"),),
        outcomes=tuple(outcomes),
    )
    found = audit(run, all_vitals or (vitals(),))
    return msgspec.structs.replace(run, checks=found), {check.name: check for check in found}


def failed(found):
    return {name for name, check in found.items() if not check.ok}


USUAL = [outcome(i) for i in range(20)]


def test_a_good_run_is_not_void_and_asks_everything():
    run, found = checks(USUAL)
    assert failed(found) == set()
    assert not run.is_void
    asked = {"loop_lag", "start_lag", "cpu", "sockets", "nodelay", "output_length", "prompt_length", "cached"}
    assert set(found) == asked | {"steps_40ms", "buffered"}


@pytest.mark.parametrize(
    ("name", "faulty"),
    [
        ("loop_lag", {"loop_lag_ns": (100_000,) * 190 + (80 * MS,) * 10}),
        ("sockets", {"out_of_sockets": 1}),
        ("nodelay", {"sockets_without_nodelay": 1}),
        ("workers", {"died": "worker 1 of the load died with status -9"}),
    ],
)
def test_the_clients_own_faults_void(name, faulty):
    run, found = checks(USUAL, vitals(), vitals(**faulty))  # the worst process counts
    assert failed(found) == {name}
    assert run.is_void


@pytest.mark.parametrize(
    ("name", "faulty"),
    [
        ("loop_lag", {"loop_lag_ns": (100_000,) * 190 + (8 * MS,) * 10}),
        ("cpu", {"cpu_share": 0.95}),
        ("sockets", {"most_sockets": 1020}),
    ],
)
def test_what_leaves_the_figures_usable_is_noted(name, faulty):
    run, found = checks(USUAL, vitals(), vitals(**faulty))
    assert failed(found) == {name}
    assert not run.is_void


def test_a_late_client_says_by_how_much_the_figures_may_be_off():
    _, found = checks(USUAL, vitals(loop_lag_ns=(100_000,) * 190 + (8 * MS,) * 10))
    assert "8.00 ms late" in found["loop_lag"].sentence
    assert "8% of the median TTFT" in found["loop_lag"].sentence


def test_two_ms_do_not_void_400_ms():
    late = vitals(loop_lag_ns=(2_500_000,) * 200)
    assert failed(checks([outcome(i, ttft_ms=400.0) for i in range(20)], late)[1]) == set()


def closed(outcomes):
    run, _ = checks(outcomes)
    return {check.name: check for check in audit(run, (vitals(),), concurrency=4)}


def test_a_closed_loop_says_what_a_stall_kept_it_from_seeing():
    """One of 60 waits for 2 s where the others take 100 ms: 2 s without questions."""
    stalled = [outcome(i, ttft_ms=2000.0 if i == 30 else 100.0) for i in range(60)]
    check = closed(stalled)["closed_loop"]
    assert not check.ok
    assert not check.voids
    assert "--rate" in check.sentence
    assert closed([outcome(i) for i in range(60)])["closed_loop"].ok
    assert "closed_loop" not in checks(stalled)[1]


def test_a_closed_loop_does_not_take_long_answers_for_stalls():
    answers = [outcome(i, gaps_ms=(10.0,) * (2000 if i % 10 == 0 else 20)) for i in range(60)]
    assert closed(answers)["closed_loop"].ok


def test_fewer_than_asked_are_told_with_the_reason():
    run, _ = checks(USUAL)
    asked = msgspec.structs.replace(run, settings={"num_requests": 30})
    found = {check.name: check for check in audit(asked, (vitals(),))}
    assert "20 of 30 requests were measured: --duration ended it before" in found["num_requests"].sentence
    enough = msgspec.structs.replace(run, settings={"num_requests": 20})
    assert "num_requests" not in {check.name for check in audit(enough, (vitals(),))}


def test_sending_late_voids():
    run, found = checks([outcome(i, lag_ms=30.0 if i < 2 else 0.1) for i in range(20)])
    assert failed(found) == {"start_lag"}
    assert run.is_void


def test_what_adds_little_is_allowed():
    """6 ms of lag are worth a note at a TTFT of 100 ms, and nothing at one of 2 s."""
    late = {"lag_ms": 6.0}
    assert failed(checks([outcome(i, **late) for i in range(20)])[1]) == {"start_lag"}
    assert failed(checks([outcome(i, ttft_ms=2000.0, **late) for i in range(20)])[1]) == set()


def test_connecting_and_holding_back_are_not_the_clients_lag():
    run, found = checks([outcome(i, held_ns=300 * MS, connect_ns=40 * MS) for i in range(20)])
    assert failed(found) == {"held"}
    assert not run.is_void


def test_only_the_measured_count():
    warm_up = [outcome(100 + i, phase=Phase.WARM_UP, lag_ms=500.0, output_tokens=1) for i in range(10)]
    assert failed(checks([*USUAL, *warm_up])[1]) == set()


def test_prompts_found_in_the_cache_void_unless_expected():
    run, found = checks([outcome(i, cached_tokens=96) for i in range(20)])
    assert failed(found) == {"cached"}
    assert run.is_void
    assert failed(checks([outcome(i, cached_tokens=96, expected_cached_tokens=96) for i in range(20)])[1]) == set()
    assert failed(checks([outcome(i, cached_tokens=0, expected_cached_tokens=96) for i in range(20)])[1]) == set()


@pytest.mark.parametrize(
    ("name", "fields"),
    [("output_length", {"output_tokens": 17}), ("prompt_length", {"prompt_tokens": 113})],
)
def test_other_lengths_than_asked_are_noted(name, fields):
    run, found = checks([outcome(i, **(fields if i == 3 else {})) for i in range(20)])
    assert failed(found) == {name}
    assert not run.is_void
    assert "1 of 20" in found[name].sentence
    untold = dict.fromkeys(fields)
    assert "not known" in checks([outcome(i, **untold) for i in range(20)])[1][name].sentence


def test_steps_of_40_ms_are_noted():
    nagle = [outcome(i, gaps_ms=(2.0, 41.0, 3.0, 2.0) * 5) for i in range(20)]
    run, found = checks(nagle)
    assert "steps_40ms" in failed(found)
    assert not run.is_void
    assert "TCP_NODELAY" in found["steps_40ms"].sentence


@pytest.mark.parametrize("gaps_ms", [(41.0,) * 19, (2.0,) * 30 + tuple(range(20, 60, 2)), (2.0,) * 19])
def test_other_gaps_are_no_steps(gaps_ms):
    assert "steps_40ms" not in failed(checks([outcome(i, gaps_ms=gaps_ms) for i in range(20)])[1])


@pytest.mark.parametrize(
    ("gaps_ms", "ttft_ms", "is_buffered"),
    [
        ((10.0,) * 19, 100.0, False),
        ((5.0, 15.0) * 10, 100.0, False),
        (((0.0,) * 9 + (100.0,)) * 2, 200.0, True),
        ((0.01,) * 19, 300.0, True),
        ((0.3,) * 19, 3000.0, False),
    ],
)
def test_buffered_streams_are_noted(gaps_ms, ttft_ms, is_buffered):
    run, found = checks([outcome(i, gaps_ms=gaps_ms, ttft_ms=ttft_ms) for i in range(20)])
    assert ("buffered" in failed(found)) == is_buffered
    assert not run.is_void


def test_a_run_without_answers_has_an_audit():
    lost = [Outcome(index=0, request_id="r", phase=Phase.MEASURED, ending=Ending.UNSENT, intended_ns=0)]
    assert failed(checks(lost)[1]) == set()
    assert failed(checks([])[1]) == set()


def test_a_note_does_not_void():
    note = RunCheck(name="n", ok=False, value=None, limit=None, unit="", sentence="", voids=False)
    run, _ = checks(USUAL)
    assert not msgspec.structs.replace(run, checks=(note,)).is_void
    assert msgspec.structs.replace(run, checks=(note, msgspec.structs.replace(note, voids=True))).is_void
