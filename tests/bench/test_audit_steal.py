"""What was stolen from the machine: read as proc(5) has it, held against the cores' time, and no reason to void."""

import os

import msgspec
import pytest

from splittime.bench import run as run_module
from splittime.bench.audit import audit_steal, stolen
from splittime.bench.mock_server import Timings
from tests.bench.test_audit import USUAL, checks
from tests.bench.test_run import MS, at, carried_out, schedule_of

TICKS = os.sysconf("SC_CLK_TCK")


def text(stolen_s, cores=2):
    """Every other number is one that must not be taken for it."""
    all_cores = f"cpu  901 902 903 904 905 906 907 {round(stolen_s * TICKS)} 909 910\n"
    each = "".join(f"cpu{i} 801 802 803 804 805 806 807 808 809 810\n" for i in range(cores))
    return all_cores + each + "intr 7 7 7 7 7 7 7 7 7\nctxt 12\n"


@pytest.fixture
def told(tmp_path):
    """What the system tells at an instant, by a text of its file."""

    def read(content, at_s):
        (tmp_path / "stat").write_text(content)
        return stolen(at_s, tmp_path / "stat")

    return read


@pytest.mark.parametrize(
    ("taken_s", "cores", "is_ok"), [(0.0, 2, True), (0.02, 2, True), (0.09, 2, True), (0.11, 2, False), (0.11, 4, True)]
)
def test_it_is_held_against_the_time_of_all_cores(told, taken_s, cores, is_ok):
    check = audit_steal(told(text(3.0, cores), 100.0), told(text(3.0 + taken_s, cores), 110.0))
    assert check.value == pytest.approx(taken_s / 10 / cores)
    assert check.ok == is_ok
    assert f"took {1000 * taken_s:.0f} ms of 10.0 s from this machine's {cores} cores" in check.sentence
    assert ("p99" in check.sentence) == (not is_ok)


def test_it_voids_nothing(told):
    check = audit_steal(told(text(0), 0.0), told(text(5), 10.0))
    assert not check.ok
    run, _ = checks(USUAL)
    assert not msgspec.structs.replace(run, checks=(*run.checks, check)).is_void


@pytest.mark.parametrize(
    "content", ["", "cpu 1 2 3 4 5 6 7\ncpu0 1 2 3 4 5 6 7\n", "cpu a b c d e f g h i\n", "intr 1\n"]
)
def test_a_system_that_does_not_tell_is_not_asked(told, tmp_path, content):
    assert told(content, 1.0) is None
    assert stolen(1.0, tmp_path / "nothing") is None
    assert audit_steal(None, told(text(1), 1.0)) is None
    assert audit_steal(told(text(1), 1.0), None) is None


def test_a_machine_that_moved_to_another_host_has_lost_nothing(told):
    """Its counter may begin anew."""
    assert audit_steal(told(text(9), 0.0), told(text(0), 10.0)).value == 0


@pytest.mark.parametrize("tells", [True, False])
def test_a_run_has_the_check_where_the_system_tells(told, monkeypatch, tells):
    now = iter([told(text(1), 0.0), told(text(2), 10.0)]) if tells else iter([None, None])
    monkeypatch.setattr(run_module, "stolen", lambda: next(now))
    run, _ = carried_out(schedule_of(at(0, 0)), Timings(ttft_ns=MS, itl_ns=MS))
    found = [check.value for check in run.checks if check.name == "steal"]
    assert found == ([pytest.approx(0.05)] if tells else [])
