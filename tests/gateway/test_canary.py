"""What decides on a canary, on made-up accounts; who tries it; and what no running gateway changes."""

import pytest

from splittime.cli.gateway import compare_arms, share_of
from splittime.core.errors import ConfigError, ErrorInfo
from splittime.gateway.canary import CanaryTrial, chosen
from splittime.gateway.config import CanaryConfig
from splittime.gateway.config_file import FIXED, check_canary, check_change

from .conftest import DEAD, upstream
from .test_rehearse import account, config, tenant


def arms(spans, tenant: str, version: str, *, failing=lambda number: False):
    """Accounts of these durations in s, one a second; those of these numbers failed."""
    error = ErrorInfo("upstream_error", "x", "upstream_500", 502)
    return [
        account(n, n, n + span, tenant=tenant, config_version=version, error=error if failing(n) else None)
        for n, span in enumerate(spans)
    ]


def spread(middle: float, count: int = 200):
    return [middle * (1 + 0.02 * (n % 7 - 3)) for n in range(count)]


def decided(before, control, tried):
    trial = CanaryTrial(CanaryConfig(min_requests=50), frozenset({"t"}), before, ("1:x", "2:y"), compare_arms)
    assert not trial.is_due
    for one in (*control, *tried):
        trial.note(one)
    assert trial.is_due
    return trial.look()()


def test_the_verdict_is_of_both_arms_and_of_the_same_tenants_before():
    control, slow = arms(spread(1.0), "o", "1:x"), arms(spread(2.0), "t", "2:y")
    assert decided([], control, arms(spread(1.0), "t", "2:y")).promotes is True
    assert decided([], control, slow).promotes is False
    assert decided(arms(spread(1.0), "t", "1:x"), control, slow).promotes is False
    assert decided(arms(spread(2.0), "t", "1:x"), control, slow).promotes is True  # it always was
    failing = arms([1.0] * 200, "t", "2:y", failing=lambda n: n % 3 == 0)
    assert decided([], control, failing).promotes is False
    assert (
        decided(arms(spread(1.0), "t", "1:x"), control, failing).promotes is False
    )  # as fast as before, where it works
    assert decided([], control, arms(spread(1.0), "t", "2:y", failing=lambda n: n == 7)).promotes is True
    fast = arms(spread(0.5), "o", "1:x")
    assert decided(arms(spread(1.0), "t", "1:x"), fast, arms(spread(1.0), "t", "2:y")).promotes is True
    accident = arms(spread(1.0), "t", "2:y", failing=lambda n: n < 60)
    assert decided(arms(spread(1.0), "t", "1:x"), fast, accident).promotes is False
    at_once = arms(spread(1.0), "t", "2:y", failing=lambda n: n < 60)  # perhaps one accident
    assert decided([], control, at_once).promotes is None
    assert decided([], control, arms([0.1, 0.2, 2.8] * 20, "t", "2:y")).promotes is None


def test_what_began_under_another_version_counts_for_no_arm():
    trial = CanaryTrial(CanaryConfig(min_requests=10), frozenset({"t"}), [], ("1:x", "2:y"), compare_arms)
    for one in (*arms([1] * 20, "t", "1:x"), *arms([1] * 20, "t", "0:z"), *arms([1] * 9, "o", "1:x")):
        trial.note(one)
    assert (trial.num_tried, trial.num_control, trial.is_due) == (0, 9, False)


def test_each_look_needs_twice_as_many_and_has_less_of_the_chance_of_error():
    asked = []

    def compare(control, tried, margin, confidence):
        asked.append((len(tried), round(confidence, 6)))
        return compare_arms(arms([1, 9] * 9, "o", ""), arms([1, 9] * 9, "t", ""), margin, confidence)

    trial = CanaryTrial(CanaryConfig(min_requests=10), frozenset({"t"}), [], ("1:x", "2:y"), compare)
    for one, other in zip(arms([1] * 40, "o", "1:x"), arms([1] * 40, "t", "2:y"), strict=True):
        trial.note(one)
        trial.note(other)
        if trial.is_due:
            assert trial.look()().promotes is None
    assert asked == [(10, 0.975), (20, 0.9875), (40, 0.99375)]


def test_a_share_of_tenants_by_hash():
    names = [f"t{n}" for n in range(40)]
    first = chosen(names, 0.1, "digest")
    assert (len(first), chosen(reversed(names), 0.1, "digest")) == (4, first)
    assert chosen(names, 0.1, "other") != first
    assert [len(chosen(names[:2], share, "x")) for share in (0.01, 0.5, 0.99)] == [1, 1, 1]
    assert first < chosen(names, 0.5, "digest")


@pytest.mark.parametrize(("told", "share"), [("10%", 0.1), ("0.25", 0.25)])
def test_a_share_as_people_write_it(told, share):
    assert share_of(told) == share
    for wrong in ("0", "100%", "x", "-1%", "nan"):
        with pytest.raises(ConfigError, match="no share"):
            share_of(wrong)


def test_what_only_a_restart_changes_and_what_no_canary_can():
    base = upstream("one", DEAD, "m")
    two = tenant("ops") + tenant("t")
    changes = {"grace_s = 1\n": None, "grace_s = 1\nmax_body_bytes = 9\n": None, 'host = "::1"\n': "host"}
    changes |= {'ledger_file = "x"\n': "ledger_file", "slow_reader_s = 1\n": "slow_reader_s"}
    for more, name in changes.items():
        if name is None:
            check_change(config(base), config(more + base))
        else:
            with pytest.raises(ConfigError, match=f"{name} cannot change"):
                check_change(config(base), config(more + base))
    assert set(FIXED) <= set(type(config(base)).__struct_fields__)
    with pytest.raises(ConfigError, match="there are 0"):
        check_canary(config(base), config(base))
    with pytest.raises(ConfigError, match="the tenants of the config"):
        check_canary(config(base + two), config(base + tenant("ops")))
    check_canary(config(base + two), config("grace_s = 1\n" + base + two))
