"""A recorded run, replayed with the step times of its ledger, decides the same in every step."""

from bisect import bisect
from itertools import pairwise

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from known_runs import CONFIGS, TIGHT, record_run
from msgspec import UNSET

from splittime.core.errors import ConfigError
from splittime.engine import recorder
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Stage
from splittime.ledger.steps import CAME, FAILED, HELD, LEFT, RELEASED, UNTOLD, WENT_ON, Coming, Told, verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.recorded import Recorded
from splittime.simulate.replay import Divergence, num_came, replay
from splittime.simulate.shape import shape_of_record


@given(CONFIGS, st.integers(0, 10_000))
def test_a_replay_decides_as_the_recorded_run_did(config: SchedulerConfig, seed: int) -> None:
    recorded = record_run(config, seed)
    assert replay(recorded) is None


@given(CONFIGS, st.integers(0, 10_000))
def test_a_replay_plans_ahead_as_the_recorded_run_did(config: SchedulerConfig, seed: int) -> None:
    recorded = record_run(config, seed, plans_ahead=True)
    verify_steps(recorded.steps)
    assert replay(recorded) is None


LEFT_BEFORE_ANOTHER_CAME = SchedulerConfig(
    max_model_len=256, num_blocks=16, block_size=16, max_num_batched_tokens=16, max_num_seqs=1, batching="static",
    enable_prefix_caching=False, enable_chunked_prefill=False, starvation_bound_ms=0.01,
)  # fmt: skip


@example(LEFT_BEFORE_ANOTHER_CAME, 7512, False)  # where a key begins hangs on who waits when its first request comes
@settings(max_examples=25)
@given(CONFIGS, st.integers(0, 10_000), st.booleans())
def test_a_replay_shares_among_keys_as_the_recorded_run_did(
    config: SchedulerConfig, seed: int, plans_ahead: bool
) -> None:
    stops = 0.0 if config.enable_prefix_caching else 0.5
    recorded = record_run(config, seed, plans_ahead=plans_ahead, num_keys=3, stops=stops, holds=0.2, fails=60)
    verify_steps(recorded.steps)
    assert replay(recorded) is None


@settings(max_examples=50)
@given(CONFIGS, st.integers(0, 10_000), st.sampled_from([None, 3]), st.sampled_from([2, 9]), st.sampled_from([1, 3]))
def test_a_replay_gives_nothing_to_rows_that_were_late(
    config: SchedulerConfig, seed: int, guess_ns: int | None, late: int, num_keys: int
) -> None:
    recorded = record_run(config, seed, guess_ns=guess_ns, late=late, num_keys=num_keys, stops=0.0)
    verify_steps(recorded.steps)
    assert replay(recorded) is None


def test_a_record_tells_all_that_the_engine_was_told() -> None:
    run = record_run(TIGHT, seed=4, count=60, late=3, holds=0.3, fails=60, num_keys=3, stops=0.3)
    told = [one for step in run.steps for one in step.told_comings]
    assert {one[1] for one in told if not isinstance(one, int) and not isinstance(one[1], int)} == {
        *(CAME, HELD, RELEASED, WENT_ON, LEFT, FAILED)
    }
    assert any(isinstance(one, int) for one in told)
    tokens = {account.request_id: account.prompt_tokens + account.output_tokens for account in run.accounts}
    ended = {one[0]: one[1] for one in told if not isinstance(one, int) and isinstance(one[1], int)}
    is_stopped = {account.request_id for account in run.accounts if account.freed_ns is None}
    assert len(ended) > 20
    assert {name: count for name, count in ended.items() if name not in is_stopped} == {
        name: tokens[name] for name in ended if name not in is_stopped
    }
    assert replay(run) is None


def test_a_ledger_that_does_not_say_who_came_when_is_refused_by_name() -> None:
    recorded = record_run(TIGHT, seed=4)
    untell(recorded)
    with pytest.raises(ConfigError, match="does not say in which order requests came and went") as caught:
        replay(recorded)
    assert "an early version wrote it" in caught.value.info.hint


def untell(recorded: Recorded) -> None:
    recorded.steps[:] = [msgspec.structs.replace(step, comings=UNSET) for step in recorded.steps]


def test_who_was_refused_under_the_id_of_another_is_not_taken_for_it() -> None:
    """The engine refused it, as the other was there: it never came to the scheduler."""
    recorded = record_run(TIGHT, seed=0)
    for account in (one for one in recorded.accounts if one.request_id in ("r1", "r9")):  # r1 waited in vain
        refused = refused_under_the_id_of(account)
        for accounts in ([refused, *recorded.accounts], [*recorded.accounts, refused]):
            assert replay(msgspec.structs.replace(recorded, accounts=accounts)) is None


def refused_under_the_id_of(account: ClosedAccount) -> ClosedAccount:
    """Returns the account of one that came when the other was there already."""
    first, second = account.intervals[:2]
    assert first.stage is Stage.HANDOFF
    handed = msgspec.structs.replace(first, end_ns=second.end_ns)
    return msgspec.structs.replace(
        account,
        intervals=(handed, StageInterval(Stage.DELIVER, None, second.end_ns, second.end_ns)),
        end_ns=second.end_ns,
        **{"token_steps": (), "token_ready_ns": (), "token_written_ns": (), "output_tokens": 0, "cached_tokens": 0},
        **{"finish_reason": "error", "prompt_tokens": 1, "prefixes": b"", "answer_prefixes": b"", "num_preemptions": 0},
    )


def test_two_requests_under_one_id_are_refused_whatever_became_of_them() -> None:
    """The first left the queue and its client came again. Who is not computed, or whose account is open, counts too."""
    recorded = record_run(TIGHT, seed=0)
    first, second = (next(one for one in recorded.accounts if one.request_id == name) for name in ("r3", "r8"))
    assert (first.finish_reason, len(first.token_steps), len(second.token_steps)) == ("abort", 0, 29)
    twice = under_another_id(recorded, "r3", "r8")
    without = [[one for one in twice.accounts if one.intervals != left.intervals] for left in (first, second)]
    for accounts in (twice.accounts, *without):
        with pytest.raises(ConfigError, match="2 requests have the id 'r8'"):
            replay(msgspec.structs.replace(twice, accounts=accounts))


def under_another_id(recorded: Recorded, name: str, other: str) -> Recorded:
    return msgspec.json.decode(
        msgspec.json.encode(recorded).replace(f'"{name}"'.encode(), f'"{other}"'.encode()), type=Recorded
    )


HELD_AGAIN = (("a", HELD), ("a", RELEASED), ("a", HELD), ("a", RELEASED))


@pytest.mark.parametrize(
    ("comings", "count"),
    [
        ((("a", CAME), ("a", HELD), ("a", RELEASED), ("a", WENT_ON), ("a", 9)), 1),
        ((*HELD_AGAIN, ("a", 9)), 1),
        ((("a", CAME), ("a", LEFT), ("a", CAME)), 2),
        ((("a", HELD), ("a", LEFT), ("a", CAME)), 2),
        ((("a", CAME), ("a", LEFT), *HELD_AGAIN), 2),
        ((("a", HELD), ("a", LEFT), *HELD_AGAIN), 2),
        ((("a", CAME), ("a", 9), *HELD_AGAIN, ("a", FAILED), *HELD_AGAIN, 7), 3),
    ],
)
def test_who_comes_held_comes_once(comings: tuple[Coming, ...], count: int) -> None:
    step = msgspec.structs.replace(record_run(TIGHT, seed=0, count=1).steps[0], comings=(("b", CAME), *comings))
    assert num_came([step]) == {"a": count, "b": 1}
    each = [msgspec.structs.replace(step, comings=(one,)) for one in comings]
    assert num_came(each) == {"a": count}


def test_a_step_before_which_more_came_than_is_kept_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    most = max(len(step.told_comings) for step in record_run(TIGHT, seed=4).steps)
    monkeypatch.setattr(recorder, "MOST_COMINGS", most)
    assert replay(record_run(TIGHT, seed=4)) is None
    monkeypatch.setattr(recorder, "MOST_COMINGS", most - 1)
    recorded = record_run(TIGHT, seed=4)
    step = next(step for step in recorded.steps if ("", UNTOLD) in step.told_comings)
    assert len(step.told_comings) < most
    with pytest.raises(ConfigError, match=f"before step {step.step_id} than a record keeps"):
        replay(recorded)


def test_a_ledger_that_does_not_say_which_rows_were_late_is_told_otherwise() -> None:
    recorded = record_run(TIGHT, seed=4, late=3)
    late = [name for step in recorded.steps for name, _ in step.late_rows]
    assert len(late) > 30
    assert len(late) > len(set(late))
    alone = [step for step in recorded.steps if len(step.late_rows) == len(step.rows)]
    assert {step.decode_tokens for step in alone} == {0}
    of_one_token = [step for step in alone if step.prefill_tokens == len(step.rows)]
    assert all(shape_of_record(step).decode_rows == len(step.rows) for step in of_one_token)
    assert of_one_token
    assert replay(recorded) is None
    untold = [msgspec.structs.replace(step, late=UNSET) for step in recorded.steps]
    divergence = replay(msgspec.structs.replace(recorded, steps=untold))
    assert divergence is not None


def test_a_replay_with_nobody_to_compute_tells_where() -> None:
    """It would otherwise look for something to do at one instant for ever."""
    recorded = record_run(TIGHT, seed=0, count=1, late=2, stops=0.0, have_deadlines=False)
    behind = next(after for before, after in pairwise(recorded.steps) if before.late_rows)
    assert (recorded.accounts[0].request_id, WENT_ON) in behind.told_comings
    steps = [msgspec.structs.replace(step, comings=UNSET) if step is behind else step for step in recorded.steps]
    assert replay(recorded) is None
    divergence = replay(msgspec.structs.replace(recorded, steps=steps))
    assert divergence == Divergence(behind.step_id, "rows", behind.rows, ())


def test_a_replay_that_does_not_know_the_keys_decides_otherwise() -> None:
    """So what the accounts say of keys and weights is needed, and used."""
    recorded = [record_run(TIGHT, seed, num_keys=3, stops=0.0) for seed in range(8)]
    for told in ({"tenant": ""}, {"weight": 1.0}):
        lost = [
            msgspec.structs.replace(one, accounts=[msgspec.structs.replace(each, **told) for each in one.accounts])
            if isinstance(one, msgspec.Struct)
            else one._replace(accounts=[msgspec.structs.replace(each, **told) for each in one.accounts])
            for one in recorded
        ]
        assert any(replay(one) is not None for one in lost), told


@settings(max_examples=25)
@given(CONFIGS, st.integers(0, 10_000), st.booleans())
def test_a_replay_decides_as_a_run_with_embeddings_did(config: SchedulerConfig, seed: int, plans_ahead: bool) -> None:
    recorded = record_run(config, seed, plans_ahead=plans_ahead, embeds=0.5)
    verify_steps(recorded.steps)
    assert replay(recorded) is None


TWO_STOPPED = SchedulerConfig(
    max_model_len=256, num_blocks=16, block_size=16, max_num_batched_tokens=16, max_num_seqs=3,
    enable_prefix_caching=False, enable_chunked_prefill=False, starvation_bound_ms=0.01,
)  # fmt: skip


@example(TWO_STOPPED, 329, False)  # two are stopped behind one step, and the engine had ended the second by itself
@given(CONFIGS, st.integers(0, 10_000), st.booleans())
def test_a_replay_tells_the_drafts_of_the_recorded_run(config: SchedulerConfig, seed: int, plans_ahead: bool) -> None:
    """What is accepted behind a stop string is in no account: it must not be found in the cache, or come too late."""
    stops = 0.0 if plans_ahead or config.enable_prefix_caching else 0.5
    recorded = record_run(config, seed, stops=stops, plans_ahead=plans_ahead, guess_ns=3)
    verify_steps(recorded.steps)
    assert replay(recorded) is None


def test_what_happens_to_drafts_happens_in_these_runs() -> None:
    """All, some and none of a row's are right; of those that are told all, some and none are verified."""
    config = msgspec.structs.replace(TIGHT, enable_prefix_caching=False)
    runs = [record_run(config, seed, count=60, stops=0.5, guess_ns=3) for seed in range(4, 8)]
    steps = [step for run in runs for step in run.steps]
    verified = [(drafts, right) for step in steps for _, drafts, right in step.verified]
    assert {right == drafts for drafts, right in verified} == {min(right, 1) for _, right in verified} == {0, 1}
    told = [told for step in steps for _, told in step.told_drafts]
    assert {type(one) for one in told} == {int, tuple}
    num_told = sum(one if isinstance(one, int) else len(one) for one in told)
    assert len(verified) < len(told)
    assert sum(drafts for drafts, _ in verified) < num_told
    assert any(step.victims for step in steps)
    ends = [account.finish_reason for run in runs for account in run.accounts]
    assert set(ends) == {"abort", "deadline", "length", "stop"}
    assert [replay(run) for run in runs] == [None] * len(runs)


def test_other_chances_are_found_out() -> None:
    recorded = record_run(TIGHT, seed=4, count=60, stops=0.0, guess_ns=3)
    likely = [
        msgspec.structs.replace(step, drafts=tuple((name, _sure(told)) for name, told in step.told_drafts) or UNSET)
        for step in recorded.steps
    ]
    divergence = replay(msgspec.structs.replace(recorded, steps=likely))
    assert divergence is not None
    assert divergence.what == "rows"


def _sure(told: Told) -> Told:
    return told if isinstance(told, int) else (1000,) * len(told)


def test_a_ledger_of_before_drafts_were_told_is_refused_by_name() -> None:
    recorded = record_run(TIGHT, seed=4, guess_ns=3)
    steps = [msgspec.structs.replace(step, drafts=UNSET) for step in recorded.steps]
    first = next(step.step_id for step in steps if step.verified)
    with pytest.raises(ConfigError, match=f"step {first} verified drafts, and the ledger does not say") as caught:
        replay(msgspec.structs.replace(recorded, steps=steps))
    assert "Record another" in caught.value.info.hint


@pytest.mark.parametrize("told", [0, -1, 257, (), (1001,), (500, -1), (500,) * 257])
def test_drafts_that_cannot_have_been_are_refused(told: Told) -> None:
    recorded = record_run(TIGHT, seed=4, guess_ns=3)
    first = next(step for step in recorded.steps if step.drafts)
    spoilt = msgspec.structs.replace(first, drafts=((first.rows[0][0], told),))
    steps = [spoilt if step is first else step for step in recorded.steps]
    with pytest.raises(ConfigError, match=f"step {first.step_id}: .*that cannot be"):
        replay(msgspec.structs.replace(recorded, steps=steps))


@pytest.mark.parametrize("seed", range(12))
def test_stop_strings_are_found_while_rows_are_in_the_air(seed: int) -> None:
    tiers = {"num_host_slots": seed % 3, "num_state_slots": (0, 0, 3, 40)[seed % 4]}
    config = msgspec.structs.replace(TIGHT, **tiers, batching=("static", "continuous")[seed % 2])
    recorded = record_run(config, seed, count=60, stops=0.5, plans_ahead=True)
    rows = {row[0]: step.step_id for step in recorded.steps for row in step.rows}
    ended = [account for account in recorded.accounts if account.finish_reason == "stop" and account.token_steps]
    assert any(rows[account.request_id] > account.token_steps[-1] for account in ended)
    assert replay(recorded) is None


def test_who_was_in_the_air_when_it_had_all_its_tokens_was_not_missed_before() -> None:
    config = SchedulerConfig(
        max_num_seqs=3,
        max_num_batched_tokens=64,
        max_model_len=256,
        num_blocks=60,
        batching="static",
        starvation_bound_ms=0.01,
        enable_prefix_caching=False,
    )
    recorded = record_run(config, seed=1243, stops=0.5, plans_ahead=True)
    assert replay(recorded) is None


def test_what_slept_and_planned_ahead_has_forgotten_its_cache() -> None:
    config = msgspec.structs.replace(TIGHT, num_blocks=200)
    recorded = record_run(config, 3, count=60, sleeps_at_ns=300_000, plans_ahead=True)
    assert any(step.asleep_ns for step in recorded.steps)
    assert replay(recorded) is None


def test_a_ledger_that_ends_while_a_step_runs_is_replayed_up_to_there() -> None:
    recorded = record_run(TIGHT, 4, plans_ahead=True)
    names = {row[0] for step in recorded.steps[:40] for row in step.rows}
    accounts = [account for account in recorded.accounts if account.start_ns <= recorded.steps[39].end_ns]
    assert names <= {account.request_id for account in accounts}
    assert replay(Recorded(accounts, recorded.steps[:40], recorded.facts)) is None


def test_another_scheduler_that_plans_ahead_is_found_out() -> None:
    recorded = record_run(TIGHT, seed=4, count=60, plans_ahead=True)
    facts = msgspec.structs.replace(recorded.facts, settings=recorded.facts.settings | {"max_num_seqs": 2})
    divergence = replay(msgspec.structs.replace(recorded, facts=facts))
    assert isinstance(divergence, Divergence)
    assert divergence.recorded != divergence.replayed


def test_what_happened_is_in_these_runs() -> None:
    """Preemptions, deadlines, aborts, ends by a stop token and by a stop string, hits in the prefix cache."""
    runs = [record_run(TIGHT, seed=seed, count=60) for seed in (4, 5, 6)]
    steps = [step for run in runs for step in run.steps]
    accounts = [account for run in runs for account in run.accounts]
    assert any(step.victims for step in steps)
    assert {account.finish_reason for account in accounts} == {"abort", "deadline", "length", "stop"}
    assert any(account.freed_ns is None for account in accounts), "stop strings"
    assert any(account.cached_tokens for account in accounts)
    assert [replay(run) for run in runs] == [None] * len(runs)


@pytest.mark.parametrize("seed", range(12))
def test_what_slept_has_forgotten_its_cache(seed: int) -> None:
    config = msgspec.structs.replace(TIGHT, num_blocks=200, num_host_slots=seed % 3)
    recorded = record_run(config, seed, count=60, sleeps_at_ns=300_000)
    assert any(step.asleep_ns for step in recorded.steps)
    assert any(account.cached_tokens for account in recorded.accounts)
    assert replay(recorded) is None


@pytest.mark.parametrize(
    ("knob", "value"),
    [("max_num_seqs", 2), ("num_blocks", 24), ("policy", "shortest_prefill"), ("max_num_batched_tokens", 32)],
)
def test_another_scheduler_is_found_out(knob: str, value: object) -> None:
    recorded = record_run(TIGHT, seed=4, count=60)
    facts = msgspec.structs.replace(recorded.facts, settings=recorded.facts.settings | {knob: value})
    divergence = replay(msgspec.structs.replace(recorded, facts=facts))
    assert isinstance(divergence, Divergence)
    assert divergence.recorded != divergence.replayed


def test_a_step_that_took_longer_is_found_out() -> None:
    recorded = record_run(TIGHT, seed=3)
    second = recorded.steps[1]
    steps = [recorded.steps[0], msgspec.structs.replace(second, end_ns=second.end_ns + 1), *recorded.steps[2:]]
    assert replay(msgspec.structs.replace(recorded, steps=steps)) == (2, "end_ns", second.end_ns + 1, second.end_ns)


def test_a_server_that_was_paused_in_the_end_is_not_replayed_as_paused() -> None:
    recorded = record_run(TIGHT, seed=4)
    recorded.facts.settings["paused"] = True
    assert replay(recorded) is None


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run: run.steps.clear(), "no steps"),
        (lambda run: run.steps.pop(0), "not all of one engine"),
        (lambda run: run.accounts.pop(0), "'r0' among them"),
        (lambda run: run.accounts.pop(1), "'r1' among them"),  # which never had a row
        (lambda run: (run.accounts.pop(0), untell(run)), "'r0' among them"),  # as of vLLM
        (lambda run: run.accounts.append(refused_under_the_id_of(run.accounts.pop(0))), "'r0' among them"),
        (lambda run: run.accounts.append(msgspec.structs.replace(run.accounts.pop(1), prompt_tokens=0)), "'r1' among"),
        (lambda run: run.accounts.append(run.accounts[0]), "2 requests have the id 'r0'"),
        (lambda run: run.facts.settings.update(async_scheduling=True), "plans ahead"),
        (lambda run: run.facts.settings.pop("num_blocks"), "do not say num_blocks"),
        (lambda run: run.facts.settings.update(block_size=8), "blocks of 8 tokens"),
    ],
)
def test_what_cannot_be_replayed_is_refused(spoil, words: str) -> None:
    recorded = record_run(TIGHT, seed=0)
    spoil(recorded)
    with pytest.raises(ConfigError, match=words):
        replay(recorded)


def test_who_came_a_moment_too_late_for_a_step_is_in_the_next() -> None:
    """An engine takes messages in before it notes the instant at which the step begins: what comes in between waits."""
    recorded = record_run(TIGHT, seed=4)
    starts = sorted(account.start_ns for account in recorded.accounts)
    step, late = next(
        (step, account)
        for account in recorded.accounts
        for step in recorded.steps
        if step.begin_ns < account.start_ns < step.end_ns
        and bisect(starts, step.begin_ns - 6) == bisect(starts, account.start_ns) - 1
    )
    earlier = came_at(late, step.begin_ns - 5)
    accounts = [earlier if account is late else account for account in recorded.accounts]
    assert replay(msgspec.structs.replace(recorded, accounts=accounts)) is None


def came_at(account: ClosedAccount, at_ns: int) -> ClosedAccount:
    """The account, with what lay before the engine moved."""
    first, second = account.intervals[:2]
    first = msgspec.structs.replace(first, begin_ns=at_ns, end_ns=at_ns)
    second = msgspec.structs.replace(second, begin_ns=at_ns)
    return msgspec.structs.replace(account, start_ns=at_ns, intervals=(first, second, *account.intervals[2:]))
