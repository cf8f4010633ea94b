"""Profiles are measured beside each other, on the same load; each says why it sets what it sets."""

import msgspec
from simulated_runs import HEALTHY, SimulatedRuns, measurer

from splittime.bench.book.slo import parse_slo
from splittime.scheduler.config import SchedulerConfig
from splittime.tune.goal import Goal
from splittime.tune.knobs import KNOBS
from splittime.tune.measure import PROFILES, TimeBudget, compare_profiles
from splittime.tune.servers import OwnServers

GOAL = Goal(slo=parse_slo("ttft_p99=1s"))


def test_each_profile_is_run_as_often_and_by_turns() -> None:
    runs = SimulatedRuns(HEALTHY, GOAL)
    found = {one.name: one for one in compare_profiles(measurer(runs), {}, TimeBudget(5), repeats=2)}
    assert list(found) == list(PROFILES)
    assert all(len(values) == 2 for one in found.values() for values in one.figures.values())
    order = [changes["max_num_seqs"] for changes, _ in runs.made]
    assert order == [16, 256, 64, 256, 64, 16]
    assert all(one.kept == (True, True) for one in found.values())


def test_what_a_user_sets_goes_before_a_profile() -> None:
    runs = SimulatedRuns(msgspec.structs.replace(HEALTHY, max_num_seqs=5), GOAL)
    found = compare_profiles(measurer(runs), {"max_num_seqs": 5}, TimeBudget(5), repeats=1)
    assert all("max_num_seqs" not in one.settings for one in found)


def test_each_setting_of_a_profile_has_a_reason_and_is_a_knob() -> None:
    for profile in PROFILES.values():
        assert set(profile.settings) == set(profile.reasons) <= set(KNOBS)


def test_no_profile_has_what_a_server_happened_to_have() -> None:
    happened = {"max_num_seqs": 3, "max_num_batched_tokens": 33, "max_prefill_tokens": 17, "policy": "deadline"}
    for profile in PROFILES.values():
        flags = OwnServers(None, happened).flags(profile.settings)
        assert not {"3", "33", "17", "deadline"} & set(flags)
    config = SchedulerConfig()
    assert PROFILES["balanced"].settings == {name: getattr(config, name) for name in happened}
