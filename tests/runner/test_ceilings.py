"""Ceilings: measured in short pieces, kept for a while, the best counts; trouble costs a figure, not the start."""

import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from native_or_not import has_native_kernels

from splittime.core import files, this_process
from splittime.core.facts import Machine
from splittime.kernels.api import WeightScheme
from splittime.kernels.choose import make_backend
from splittime.kernels.cpu.ops import CpuOps
from splittime.kernels.native import peaks
from splittime.kernels.native.library import LibraryMissing
from splittime.runner import ceilings, machine
from splittime.runner.ceilings import Gauge

FLOAT32 = WeightScheme("float32")


def loops() -> tuple[peaks.Loop, ...]:
    try:
        return peaks.loops()
    except LibraryMissing:
        return ()


BEYOND = (ceilings.BEYOND,) if loops() and peaks.can_forget() else ()


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A megabyte: what is measured is the processor's cache, in no time."""
    for name, value in (("READ_SIZES", (1 << 18, 1 << 20)), ("TOUCH_BYTES", 1 << 19), ("PART_BYTES", 1 << 18)):
        monkeypatch.setattr(ceilings, name, value)


def gauge(folder, ops=None, threads: int = 1) -> Gauge:
    return Gauge(ops or CpuOps(torch.float32), FLOAT32, threads, folder)


def measured(one: Gauge) -> Machine:
    found = list(one.measure())
    assert found[:-1] == [None] * (len(found) - 1)
    return found[-1]


def test_what_is_measured_is_known_at_the_next_start(tmp_path):
    first = gauge(tmp_path / "made" / "here")
    assert first.known().measured_at_unix_ns is None
    assert first.is_due()
    found = measured(first)
    assert found.read_bytes_per_s > 1e8
    assert [size for size, _ in found.read_rates] == [*ceilings.READ_SIZES, *BEYOND]
    assert found.read_rates[-1][1] == found.read_bytes_per_s <= found.read_rates[0][1]
    assert found.operations_per_s > 1e7
    assert (found.peak_operations_per_s or found.operations_per_s) >= found.operations_per_s
    assert found.cpu
    assert found.threads == 1
    assert found.cores == this_process.num_cores()
    second = gauge(tmp_path / "made" / "here")
    assert second.known() == found
    assert not second.is_due()
    assert gauge(tmp_path / "made" / "here", threads=2).known().measured_at_unix_ns is None  # another server's


def test_a_piece_reads_one_part_and_a_pass_is_their_sum(monkeypatch):
    """A request that comes meanwhile waits for one part only; the rate is of the whole memory."""
    ended_s, now_s = [], [0.0]

    def seconds(work):
        now_s[0] += 0.001
        return 0.001

    monkeypatch.setattr(ceilings, "_seconds", seconds)
    monkeypatch.setattr(ceilings, "TOUCH_S", 0.0)
    one = gauge(None)
    for _ in one.measure():
        ended_s.append(now_s[0])
    assert max(after - before for before, after in pairwise([0.0, *ended_s])) == pytest.approx(0.001)
    assert measured(one).read_bytes_per_s == pytest.approx((1 << 20) / 0.004)


@pytest.mark.skipif(not has_native_kernels(), reason="no native kernels")
@pytest.mark.parametrize("scheme", ["float32", "int8", "int4"])
def test_native_kernels_are_measured_in_their_scheme(tmp_path, scheme):
    one = Gauge(make_backend("native", torch.float32), WeightScheme(scheme, 64 if scheme == "int4" else 0), 2, tmp_path)
    assert measured(one).operations_per_s > 1e7


@pytest.mark.skipif(not loops(), reason="no native kernels")
@pytest.mark.parametrize(
    ("scheme", "has_peak"), [("float32", True), ("bfloat16", True), ("float16", True), ("int8", False), ("int4", False)]
)
def test_the_peak_is_of_loops_for_such_numbers(tmp_path, monkeypatch, scheme, has_peak):
    """16 bits may always be multiplied as float32; integers want loops of their own."""
    monkeypatch.setattr(ceilings, "_loops", lambda: tuple(one for one in loops() if one.kind != peaks.INT8))
    one = Gauge(CpuOps(torch.float32), WeightScheme(scheme, 64 if scheme == "int4" else 0), 2, None)
    rates = [rate for (rate,) in one._peak()]
    assert bool(rates) is has_peak
    assert all(rate > 1e7 for rate in rates)
    assert rates == sorted(rates)  # the best so far


@pytest.mark.skipif(not loops(), reason="no native kernels")
def test_every_loop_that_this_processor_runs_does_what_it_says():
    memory = torch.ones(1 << 20, dtype=torch.uint8)
    for loop in peaks.loops():
        if loop.kind == peaks.READ:
            loop.read(memory)
        else:
            assert loop.multiply(2000) == 2 * loop.multiply(1000) > 1000
    if peaks.can_forget():
        peaks.forget(memory)
    assert int(memory.sum()) == 1 << 20
    kinds = {loop.kind for loop in peaks.loops()}
    assert {peaks.FLOAT32, peaks.READ} <= kinds
    flags = machine_flags()
    assert (peaks.INT8 in kinds) == ("avx2" in flags)
    assert (peaks.BFLOAT16 in kinds) or "avx512_bf16" not in flags


def machine_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def test_without_loops_reads_are_torch_s_and_there_is_no_peak(tmp_path, monkeypatch):
    monkeypatch.setattr(ceilings, "_loops", lambda: ())
    found = measured(gauge(tmp_path))
    assert [size for size, _ in found.read_rates] == list(ceilings.READ_SIZES)
    assert found.peak_operations_per_s is None


def test_each_thread_reads_whole_pages_and_nothing_is_left_out():
    one = gauge(None, threads=3)
    shares = one._shares(torch.zeros(1 << 18, dtype=torch.uint8))
    assert [len(share) % ceilings.PAGE_BYTES for share in shares] == [0, 0, 0]
    assert sum(map(len, shares)) == 1 << 18


def test_the_best_of_the_last_days_counts(tmp_path):
    measured(gauge(tmp_path))
    path = tmp_path / ceilings.FILE_NAME
    [(key, [(at_ns, reads, _, _)])] = json.loads(path.read_text()).items()
    long_ago_ns = at_ns - (ceilings.MAX_AGE_S + 60) * 10**9
    hours_ago_ns = at_ns - 7200 * 10**9
    beyond = [1e9] * (len(reads) - 2)
    path.write_text(
        json.dumps(
            {
                key: [
                    [long_ago_ns, [1e18, 1e18, *beyond], 1e18, 1e18],
                    [hours_ago_ns, [4.0, 1e15, *beyond], 2.0, 0.0],
                    [hours_ago_ns, [2e15, 3.0, *beyond], 1e14, 1e16],
                ]
            }
        )
    )
    known = gauge(tmp_path).known()
    assert known.read_rates[:2] == ((1 << 18, 2e15), (1 << 20, 1e15))
    assert known.read_bytes_per_s == (1e9 if beyond else 1e15)
    assert (known.operations_per_s, known.peak_operations_per_s) == (1e14, 1e16)
    assert known.measured_at_unix_ns == hours_ago_ns
    assert gauge(tmp_path).is_due()
    found = measured(gauge(tmp_path))
    assert found.read_rates[1] == (1 << 20, 1e15)
    assert (found.operations_per_s, found.peak_operations_per_s) == (1e14, 1e16)
    assert found.measured_at_unix_ns >= at_ns
    assert len(json.loads(path.read_text())[key]) == 3  # what is too old has left


@pytest.mark.parametrize(
    "damage",
    [
        *("", "{", "[1]", '{"k": 3}', '{"k": [[1, "a", 3, 4]]}', '{"k": [[1]]}', '{"k": [[1, 2.0, 3.0, 4.0]]}'),
        *('{"k": [[1, [2.0], 3.0]]}', "\x00\xff"),
    ],
)
def test_a_damaged_file_is_as_none(tmp_path, damage):
    (tmp_path / ceilings.FILE_NAME).write_bytes(damage.encode("latin-1"))
    assert gauge(tmp_path).known().measured_at_unix_ns is None
    assert measured(gauge(tmp_path)) == gauge(tmp_path).known()


def test_nothing_is_kept_where_nothing_may_be(tmp_path):
    assert measured(gauge(None)).read_bytes_per_s > 0
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert measured(gauge(blocked)).read_bytes_per_s > 0
    assert gauge(blocked).known().measured_at_unix_ns is None


def test_no_memory_costs_a_figure_only(tmp_path, monkeypatch, caplog):
    def no_memory(self, num_bytes):
        raise MemoryError("no")

    monkeypatch.setattr(Gauge, "_allocate", no_memory)
    found = measured(gauge(tmp_path))
    assert found.read_bytes_per_s is None
    assert found.read_rates == ()
    assert found.operations_per_s > 0
    assert "could not be measured" in caplog.text
    assert found.measured_at_unix_ns <= time.time_ns()


def test_what_lacks_a_figure_is_not_believed_and_is_measured_again(tmp_path, monkeypatch):
    first = gauge(tmp_path)
    measured(first)
    (key, (found,)), *_ = ceilings.recall(tmp_path / ceilings.FILE_NAME).items()
    at_ns, reads, operations, peak = found
    for broken in ((at_ns, reads, 0.0, peak), (at_ns, (0.0, *reads[1:]), operations, peak)):
        files.write(tmp_path / ceilings.FILE_NAME, {key: [broken]})
        assert gauge(tmp_path).known().measured_at_unix_ns is None
        assert gauge(tmp_path).is_due()
    files.write(tmp_path / ceilings.FILE_NAME, {})

    def fail(self):
        raise RuntimeError("no product")
        yield

    monkeypatch.setattr(Gauge, "_multiply", fail)
    assert measured(gauge(tmp_path)).read_bytes_per_s > 0
    assert gauge(tmp_path).is_due()


def cache_tree(folder, *caches):
    for core, index, level, size, shared in caches:
        one = folder / f"cpu{core}" / "cache" / f"index{index}"
        one.mkdir(parents=True)
        for name, value in (("level", level), ("size", size), ("shared_cpu_list", shared)):
            (one / name).write_text(f"{value}\n")


def test_last_level_caches_of_as_many_threads(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CPUS", tmp_path)
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert machine.cache_bytes(2) is None
    cache_tree(
        tmp_path,
        (0, 0, 1, "32K", "0"),
        (0, 3, 3, "32768K", "0-1"),
        (1, 3, 3, "32768K", "0-1"),
        (2, 3, 3, "16384K", "2"),
    )
    assert machine.cache_bytes(1) == 32 << 20
    assert machine.cache_bytes(2) == 48 << 20
    assert machine.cache_bytes(8) == 48 << 20
