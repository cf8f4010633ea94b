"""What a change would have done: found where the truth is known, refused where it cannot be told."""

import math
import random
import statistics

import msgspec
import pytest
from known_runs import TIGHT, record_run

from splittime.core.errors import ConfigError
from splittime.scheduler.admission import QueueLimits
from splittime.simulate import what_if
from splittime.simulate.change import Change, changed
from splittime.simulate.draws import OTHER_HOUR, DrawFigures, hours
from splittime.simulate.figures import figures
from splittime.simulate.recorded import Recorded, latest_run
from splittime.simulate.replica import AnyReplica, replica_of
from splittime.simulate.trace import TracedRequest
from splittime.simulate.what_if import Prediction, predict, predict_of, recorded_load, requests_of

LIMITS = QueueLimits(256, 10**6)


def run(max_num_seqs: int = 4, plans_ahead: bool = False, guess_ns: int | None = None) -> Recorded:
    config = msgspec.structs.replace(TIGHT, max_num_seqs=max_num_seqs, num_blocks=60)
    how = {"have_deadlines": False, "plans_ahead": plans_ahead, "guess_ns": guess_ns}
    return record_run(config, seed=9, count=150, **how)


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return run()


@pytest.fixture(scope="module")
def prediction(recorded: Recorded) -> Prediction:
    return predict(recorded, Change({"max_num_seqs": 8}), draws=6)


@pytest.mark.parametrize("name", ["itl_ms_p50", "e2e_ms_p50", "output_tokens_per_s", "steps"])
def test_the_same_settings_give_the_same_figures(recorded: Recorded, prediction: Prediction, name: str) -> None:
    figure = prediction.figure(name)
    assert figure.recorded == figures(list(recorded.accounts), list(recorded.steps))[name]
    assert figure.before == pytest.approx(figure.recorded, rel=0.15)


@pytest.mark.parametrize("name", ["queue_ms_p90", "ttft_ms_p90", "mean_running"])
def test_a_change_does_what_it_does_in_truth(prediction: Prediction, name: str) -> None:
    truth = run(max_num_seqs=8)
    figure, true = prediction.figure(name), figures(list(truth.accounts), list(truth.steps))[name]
    assert figure.after == pytest.approx(true, rel=0.25)
    assert (figure.ratio > 1) == (true > figure.recorded)
    assert figure.low <= figure.ratio <= figure.high


def test_an_engine_that_plans_ahead_is_simulated_ahead() -> None:
    recorded, truth = run(plans_ahead=True), run(max_num_seqs=8, plans_ahead=True)
    seen, true = (figures(list(each.accounts), list(each.steps)) for each in (recorded, truth))
    prediction = predict(recorded, Change({"max_num_seqs": 8}), draws=6)
    for name in ("itl_ms_p50", "e2e_ms_p50", "output_tokens_per_s", "steps"):
        assert prediction.figure(name).before == pytest.approx(seen[name], rel=0.15)
    for name in ("queue_ms_p90", "ttft_ms_p90", "mean_running"):
        assert prediction.figure(name).after == pytest.approx(true[name], rel=0.25)
    simulated = replica_of(recorded).run(requests_of(recorded, 256), Change(), seed=0)
    assert all(step.ahead_ns is not None for step in simulated.steps)


def test_what_a_change_does_to_a_server_that_guesses_ahead() -> None:
    recorded, truth = run(guess_ns=5), run(max_num_seqs=8, guess_ns=5)
    seen, true = (figures(list(each.accounts), list(each.steps)) for each in (recorded, truth))
    prediction = predict(recorded, Change({"max_num_seqs": 8}), draws=6)
    for name in ("itl_ms_p90", "e2e_ms_p50", "output_tokens_per_s", "steps"):
        assert prediction.figure(name).before == pytest.approx(seen[name], rel=0.15)
    for name in ("queue_ms_p90", "ttft_ms_p90", "mean_running", "steps"):
        assert prediction.figure(name).after == pytest.approx(true[name], rel=0.25)
    simulated = replica_of(recorded).run(requests_of(recorded, 256), Change(), seed=0)
    verified = [
        sum(drafts for step in steps for _, drafts, _ in step.verified) for steps in (recorded.steps, simulated.steps)
    ]
    assert verified[1] == pytest.approx(verified[0], rel=0.1)


def test_each_draw_has_its_own_luck_with_drafts() -> None:
    recorded = run(guess_ns=5)
    replica, requests = replica_of(recorded), requests_of(recorded, 256)
    luck = []
    for seed in (0, 1):
        steps = replica.run(requests, Change({"max_num_batched_tokens": 128}), seed).steps
        starts = [{name: start for name, start, _ in step.rows} for step in steps]
        rows = zip(steps, starts, strict=True)
        luck.append({(name, start[name], n): right for step, start in rows for name, n, right in step.verified})
    assert any(luck[0][row] != luck[1][row] for row in luck[0].keys() & luck[1].keys())


def test_requests_that_the_server_never_had_are_told_no_drafts() -> None:
    recorded = run(guess_ns=5)
    recorded.facts.settings["speculative_config"] = '{"method": "suffix"}'
    requests = requests_of(recorded, 256)

    def drawn(replica: AnyReplica) -> list[TracedRequest]:
        return [traced._replace(drafts=None) for traced in requests]

    assert predict_of(recorded_load(recorded, drawn), Change(), draws=2).leaves_out_drafts
    assert not predict(recorded, Change(), draws=2).leaves_out_drafts
    assert not predict_of(recorded_load(run(), drawn), Change(), draws=2).leaves_out_drafts


def test_hours_are_spread_evenly() -> None:
    factors = hours(21, 0.1, random.Random(0))
    assert sorted(factors)[10] == 1.0
    assert statistics.stdev(map(math.log, factors)) == pytest.approx(math.hypot(0.1, OTHER_HOUR), rel=0.1)
    assert factors != sorted(factors)
    assert hours(1, 0.1, random.Random(0)) == [1.0]


def test_what_some_draw_has_none_of_has_no_ratio() -> None:
    draws = [DrawFigures({"preemptions": before}, {"preemptions": 4.0}, {"preemptions": 5.0}) for before in (0.0, 2.0)]
    told = what_if._predicted("preemptions", 1.0, draws)
    assert (told.before, told.after, told.ratio) == (1.0, 4.0, None)
    assert (told.after_low, told.after_high) == (5.0, 5.0)


def test_what_is_expected_is_the_record_times_the_change() -> None:
    """The replay as it was has 80 for 100 recorded: by so much the figure with the change is corrected, and at least so
    wide is its interval."""
    draws = [DrawFigures({"x": 80.0}, {"x": 40.0}, {"x": 40.0 + number}) for number in (-4, 0, 4)]
    told = what_if._predicted("x", 100.0, draws)
    assert (told.before, told.ratio, told.after) == (80.0, 0.5, 50.0)
    assert (told.own_low, told.own_high) == (0.5, 0.5)
    miss = math.log(100 / 80)
    assert math.log(told.ratio / told.low) == pytest.approx(math.hypot(math.log(40 / 36), miss))
    assert math.log(told.high / told.ratio) == pytest.approx(math.hypot(math.log(44 / 40), miss))
    assert (told.after_low, told.after_high) == pytest.approx((100 * told.low, 100 * told.high))
    unseen = what_if._predicted("x", None, draws)
    assert (unseen.after, unseen.low, unseen.high) == pytest.approx((40.0, 36 / 80, 44 / 80)), "nothing to correct by"
    gone = what_if._predicted("x", 100.0, [DrawFigures({"x": 80.0}, {"x": 0.0}, {"x": 0.0})] * 3)
    assert (gone.ratio, gone.low, gone.high) == (0.0, 0.0, 0.0)


def test_no_change_changes_nothing(recorded: Recorded) -> None:
    same = predict(recorded, Change(), draws=2)
    for figure in same.figures:
        assert figure.after in (figure.before, figure.recorded)
        assert figure.ratio in (1.0, None)


def test_more_requests_a_second_wait_longer(recorded: Recorded) -> None:
    faster = predict(recorded, Change(speed=3.0), draws=2)
    assert faster.figure("queue_ms_p90").ratio > 1.2
    assert faster.figure("output_tokens_per_s").ratio > 1.05


def test_draws_are_told_and_are_the_same_again(recorded: Recorded) -> None:
    told: list[int] = []
    first = predict(recorded, Change({"max_num_seqs": 2}), draws=2, on_draw=told.append)
    assert told == [1, 2]
    assert first == predict(recorded, Change({"max_num_seqs": 2}), draws=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Change({"max_num_seq": 2}), "'max_num_seq' cannot be simulated"),
        (Change({"paused": True}), "'paused' cannot be simulated"),
        (Change({"policy": "best"}), "bad setting"),
        (Change({"num_blocks": 1}), "num_blocks is 1"),
        (Change({"max_num_batched_tokens": 2}), "at least max_num_seqs"),
        (Change(speed=0.0), "speed is 0"),
    ],
)
def test_a_change_that_cannot_be_is_refused(change: Change, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        changed(TIGHT, LIMITS, change)


def test_limits_are_changed_beside_the_knobs() -> None:
    config, limits = changed(TIGHT, LIMITS, Change({"max_num_seqs": 3, "max_queued_requests": 7}))
    assert (config.max_num_seqs, limits.max_queued_requests, limits.max_queued_prompt_tokens) == (3, 7, 10**6)
    assert str(Change({"policy": "fcfs"}, speed=1.5)) == "policy fcfs, 1.5 times the requests a second"


def test_an_engine_that_cannot_be_simulated_is_refused(recorded: Recorded) -> None:
    facts = msgspec.structs.replace(recorded.facts, settings=recorded.facts.settings | {"async_scheduling": True})
    with pytest.raises(ConfigError, match="plans ahead"):
        predict(msgspec.structs.replace(recorded, facts=facts), Change())
    row = recorded.steps[5].rows[0]
    drafting = msgspec.structs.replace(
        recorded.steps[5],
        rows=((row[0], row[1], row[2] + 1), *recorded.steps[5].rows[1:]),
        verified=((row[0], 1, 1),),
    )
    with pytest.raises(ConfigError, match="does not say what was told"):
        predict(msgspec.structs.replace(recorded, steps=[*recorded.steps[:5], drafting, *recorded.steps[6:]]), Change())


def test_of_several_servers_in_a_file_the_latest_counts(recorded: Recorded) -> None:
    before, count = run(max_num_seqs=2), len(recorded.steps)
    last = len(before.steps) + 1
    steps = [msgspec.structs.replace(step, step_id=step.step_id + last) for step in recorded.steps]
    accounts = [
        msgspec.structs.replace(a, token_steps=tuple(step_id + last for step_id in a.token_steps))
        for a in recorded.accounts
    ]
    both = Recorded([*before.accounts, *accounts], [*before.steps, *steps], recorded.facts)
    latest = latest_run(both)
    assert (len(latest.steps), latest.steps[0].step_id) == (count, last + 1)
    assert [a for a in latest.accounts if a.token_steps] == [a for a in accounts if a.token_steps]
    assert latest_run(recorded) is recorded


def test_what_came_before_a_knob_was_turned_does_not_count(recorded: Recorded) -> None:
    middle_ns = sorted(account.start_ns for account in recorded.accounts)[len(recorded.accounts) // 2]
    turned = msgspec.structs.replace(recorded.facts, knobs_changed_ns=middle_ns)
    latest = latest_run(Recorded(recorded.accounts, recorded.steps, turned))
    assert 0 < len(latest.accounts) < len(recorded.accounts)
    assert min(account.start_ns for account in latest.accounts) == middle_ns
    assert 0 < len(latest.steps) < len(recorded.steps)
    assert all(step.begin_ns >= middle_ns for step in latest.steps)


def test_a_simulation_that_misses_the_record_says_so(recorded: Recorded, prediction: Prediction) -> None:
    assert prediction.miss is not None
    assert not prediction.miss.is_far
    load = recorded_load(recorded)
    busy = {name: value * (2 if name == "ttft_ms_p90" else 1) for name, value in load.seen.items()}
    off = predict_of(load._replace(seen=busy), Change({"max_num_seqs": 2}), draws=3).miss
    assert off is not None
    assert (off.name, off.is_far) == ("ttft_ms_p90", True)
    assert off.ratio == pytest.approx(0.5, rel=0.1)


def test_a_request_longer_than_the_servers_context_is_refused(recorded: Recorded) -> None:
    long = msgspec.structs.replace(recorded.accounts[0], prompt_tokens=10**12)
    with pytest.raises(ConfigError, match="the ledger is damaged"):
        predict(msgspec.structs.replace(recorded, accounts=[long, *recorded.accounts[1:]]), Change(), draws=1)


def test_a_ledger_that_says_too_little_is_refused(recorded: Recorded) -> None:
    with pytest.raises(ConfigError, match="3 requests are too few"):
        replica_of(msgspec.structs.replace(recorded, accounts=recorded.accounts[:3]))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, "In brackets: where 90 % of runs with the change would lie, made in another hour."),
        ({"num_same_hour": 3}, "Of 20 draws, 3 would meet an hour too slow to simulate, and stay in the recorded one"),
        ({"num_same_hour": 3, "change": Change()}, ""),
        ({"share": 0.0}, ""),
    ],
)
def test_what_an_interval_holds_is_told_in_one_place(told: dict[str, object], words: str) -> None:
    said = {"change": Change({"max_num_seqs": 4}), "draws": 20, "num_same_hour": 0, "share": 0.9}
    rest = {"figures": (), "num_requests": 9, "num_refused": 0, "waits": False, "leaves_out_drafts": False}
    prediction = Prediction(**(said | rest | {"num_steps": 99, "miss": None, "model": None} | told))
    assert words in prediction.interval_words
    assert bool(words) is bool(prediction.interval_words)
