"""Processors and memory as control groups of either version give them, by files like the kernel's."""

import os

import pytest

from splittime.core import this_process

V1 = "31 23 0:29 {root} {mount}/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n" + (
    "35 31 0:32 {root} {mount}/memory rw,relatime - cgroup cgroup rw,memory\n"
)
V2 = "41 31 0:38 {root} {mount} rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHER = "30 23 0:28 / /proc rw,relatime - proc proc rw\n"
GIB = 1 << 30


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Returns what writes the groups' files and says which the process is in."""
    monkeypatch.setattr(this_process, "PROC", tmp_path / "proc")
    monkeypatch.setattr(this_process.os, "sched_getaffinity", lambda _: set(range(8)))
    mount = tmp_path / "groups"

    def put(mounted: str, own: str, files: dict[str, str], root: str = "/", pid: str = "self") -> None:
        for folder in (tmp_path / "proc" / "self", tmp_path / "proc" / pid):
            folder.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc" / "self" / "mountinfo").write_text(OTHER + mounted.format(root=root, mount=mount))
        (tmp_path / "proc" / pid / "cgroup").write_text(own)
        (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {8 * GIB >> 10} kB\n")
        for name, text in files.items():
            (mount / name).parent.mkdir(parents=True, exist_ok=True)
            (mount / name).write_text(text)

    return put


def quota(cores: float, folder: str = "") -> dict[str, str]:
    return {f"{folder}cpu.max": f"{int(cores * 100000)} 100000\n"}


def old_quota(cores: float, folder: str = "") -> dict[str, str]:
    of, us = f"cpu,cpuacct/{folder}", int(cores * 50000) if cores > 0 else -1
    return {f"{of}cpu.cfs_quota_us": f"{us}\n", f"{of}cpu.cfs_period_us": "50000\n"}


@pytest.mark.parametrize(
    ("mounted", "own", "files", "cores", "whole"),
    [
        (V2, "0::/\n", {"cpu.max": "max 100000\n"}, None, 8),
        (V2, "0::/\n", quota(1.5), 1.5, 1),
        (V2, "0::/\n", quota(3), 3.0, 3),
        (V2, "0::/\n", quota(0.25), 0.25, 1),
        (V2, "0::/a/b\n", quota(2, "a/b/") | quota(6, "a/"), 2.0, 2),
        (V2, "0::/a/b\n", {"a/b/cpu.max": "max 100000"} | quota(2.5, "a/") | quota(0.5, "other/"), 2.5, 2),
        (V1, "5:cpu,cpuacct:/\n1:name=systemd:/x\n", old_quota(1.5), 1.5, 1),
        (V1, "5:cpu,cpuacct:/\n", old_quota(-1), None, 8),
        (V1, "5:cpu,cpuacct:/a/b\n", old_quota(-1, "a/b/") | old_quota(2.5, "a/"), 2.5, 2),
        (V1 + V2, "5:cpu,cpuacct:/a\n0::/\n", old_quota(2, "a/"), 2.0, 2),
        (V2, "0::/\n", quota(99), 99.0, 8),
        (V2, "0::/\n", {}, None, 8),
    ],
)
def test_cores_are_what_affinity_and_all_groups_give(system, mounted, own, files, cores, whole):
    system(mounted, own, files)
    assert this_process.quota_cores() == cores
    assert this_process.num_cores() == whole


@pytest.mark.parametrize(
    ("root", "own", "folder"),
    [("/docker/x", "/docker/x", ""), ("/docker/x", "/docker/x/in", "in/"), ("/docker/x", "/y", ""), ("/", "/../z", "")],
)
def test_a_part_of_the_tree_that_is_mounted(system, root, own, folder):
    """As in a container with and without a view of its own of the groups."""
    system(V1, f"5:cpu,cpuacct:{own}\n", old_quota(2, folder), root)
    assert this_process.quota_cores() == 2.0
    system(V2, f"0::{own}\n", quota(1, folder), root)
    this_process._trees.cache_clear()
    assert this_process.quota_cores() == 1.0


def test_without_groups_all_processors_are_its_own(system):
    assert this_process.num_cores() == 8
    assert this_process.throttled_ns([1]) is None


STAT = "nr_periods 365\nnr_throttled 271\n"


@pytest.mark.parametrize(
    ("mounted", "own", "files", "ns"),
    [
        (V2, "0::/a\n", {"a/cpu.stat": f"usage_usec 5\n{STAT}throttled_usec 14400\n"}, 14_400_000),
        (V2, "0::/a\n", {"cpu.stat": "usage_usec 7\nuser_usec 3\n"}, None),
        (V1, "5:cpu,cpuacct:/\n", {"cpu,cpuacct/cpu.stat": f"{STAT}throttled_time 14400000001\n"}, 14_400_000_001),
        (
            V2,
            "0::/a\n",
            {"a/cpu.stat": f"{STAT}throttled_usec 2\n", "cpu.stat": f"{STAT}throttled_usec 3\n"},
            5_000,
        ),
    ],
)
def test_how_long_groups_were_throttled(system, mounted, own, files, ns):
    system(mounted, own, files, pid="7")
    assert this_process.throttled_ns([7]) == ns
    assert this_process.throttled_ns([7, 7, 8]) == ns, "one group counts once, and a process that has ended not at all"


def test_an_engine_in_a_group_of_its_own_counts(system):
    files = {"a/cpu.stat": f"{STAT}throttled_usec 1\n", "b/cpu.stat": f"{STAT}throttled_usec 4\n"}
    system(V2, "0::/a\n", files, pid="7")
    system(V2, "0::/b\n", {}, pid="8")
    assert this_process.throttled_ns([7, 8]) == 5_000


def memory(limit: object, used: int, cached: int, folder: str = "") -> dict[str, str]:
    files = {"max": limit, "current": used, "stat": f"anon 5\ninactive_file {cached}"}
    return {f"{folder}memory.{name}": f"{text}\n" for name, text in files.items()}


def old_memory(limit: int, used: int, cached: int, folder: str = "") -> dict[str, str]:
    files = {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": f"rss 5\ntotal_inactive_file {cached}"}
    return {f"memory/{folder}memory.{name}": f"{text}\n" for name, text in files.items()}


@pytest.mark.parametrize(
    ("mounted", "own", "files", "free"),
    [
        (V2, "0::/a\n", memory("max", GIB, 0, "a/"), 8 * GIB),
        (V2, "0::/a\n", memory(4 * GIB, 3 * GIB, GIB, "a/"), 2 * GIB),
        (V2, "0::/a/b\n", memory("max", GIB, 0, "a/b/") | memory(2 * GIB, GIB, 0, "a/"), GIB),
        (V2, "0::/\n", memory(GIB, 2 * GIB, 0), 0),
        (V1, "4:memory:/a\n", old_memory(3 * GIB, 2 * GIB, 5, "a/"), GIB + 5),
        (V1, "4:memory:/\n", old_memory(0x7FFFFFFFFFFFF000, GIB, 0), 8 * GIB),
    ],
)
def test_memory_is_what_the_tightest_group_has_left(system, mounted, own, files, free):
    system(mounted, own, files)
    assert this_process.free_memory_bytes() == free


def test_this_system_is_read():
    assert 1 <= this_process.num_cores() <= (os.cpu_count() or 1)
    assert 1 << 20 < this_process.free_memory_bytes() < 1 << 50
