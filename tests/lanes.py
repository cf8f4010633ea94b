"""The lanes of the tests: which of them `make check` runs, by the processor time that each has been seen to take.

Every run measures each test: the processor time of this process and of all that it has started, living or ended, but
what is set up for a whole module. `tests/costs.txt` holds those above 0.2 s; `make costs` measures and writes it anew.
What takes more than half a second there is `slow`: `make check` leaves it out, and `make check-all` runs it. Of the
cases of one test, which say much the same, the cheapest may take that long, the others 0.2 s. Those of
`tests/guards.txt` are none: the end-to-end tests that guard the main way. A run names at its end what has grown slow.
Of each test of Triton's kernels, which its interpreter runs on a processor, one case is not slow.
"""

import resource
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COSTS = HERE / "costs.txt"
GUARDS = HERE / "guards.txt"
SLOW_S = 0.5
MORE_S = 0.2  # of a further case of the same test
TOLD_S = 0.25  # less is not written, and becomes 0.2
LONG_S, PATIENCE_S = 5.0, 900  # beside others such a test may outlast the usual time: so long is waited for it
USUAL_S = 0.05  # of those that are not written
GROWN = 2.0  # a machine may be half as quick as the one of the table

BEGAN = pytest.StashKey[float]()
SHARED = pytest.StashKey[float]()


def costs() -> dict[str, float]:
    """Read the seconds of each test that is in the table."""
    lines = COSTS.read_text(encoding="utf-8").splitlines() if COSTS.exists() else []
    return {name: float(seconds) for seconds, _, name in (line.partition(" ") for line in lines)}


def guards() -> list[str]:
    """Read the end-to-end tests that `make check` runs whatever they cost; without brackets, one with all its cases."""
    lines = GUARDS.read_text(encoding="utf-8").splitlines() if GUARDS.exists() else []
    return [line for line in lines if line and not line.startswith("#")]


def processor_s() -> float:
    """Count what this process and all under it have used so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used) + _living_s("self")


def _living_s(process: str) -> float:
    """Count what the living children of a process, and theirs, have used; 0 where the system does not say."""
    total = 0.0
    for children in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            for child in children.read_text().split():
                ticks = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]
                total += sum(map(int, ticks)) / 100 + _living_s(child)
        except OSError:  # it has just ended
            continue
    return total


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", action="store_true", help="write what the tests that ran have cost to tests/costs.txt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known, guarded = costs(), set(guards())
    first = cheapest_cases([item.nodeid for item in items if item.get_closest_marker("sweep") is None], known)
    interpreted = set()
    for item in items:
        test = item.nodeid.partition("[")[0]
        is_more_of_the_same = item.path.name.startswith("test_triton") and test in interpreted
        interpreted.add(test)
        most_s = SLOW_S if item.nodeid in first else MORE_S
        if known.get(item.nodeid, 0.0) > LONG_S or item.get_closest_marker("sweep"):
            item.add_marker(pytest.mark.timeout(PATIENCE_S))  # its own, where it has one, comes before
        if (known.get(item.nodeid, 0.0) > most_s or is_more_of_the_same) and not {item.nodeid, test} & guarded:
            item.add_marker("slow")


def cheapest_cases(names: Iterable[str], known: dict[str, float]) -> set[str]:
    """Choose of each test the case that takes least; of those that take as long, the first."""
    found = dict[str, str]()
    for name in names:
        test = name.partition("[")[0]
        if test not in found or known.get(name, 0.0) < known.get(found[test], 0.0):
            found[test] = name
    return set(found.values())


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin with the files that take longest, so that no process is left with one at the end."""
    if session.config.getoption("forks") > 1:
        known, seconds = costs(), Counter[Path]()
        for item in session.items:
            seconds[item.path] += known.get(item.nodeid, USUAL_S)
        session.items.sort(key=lambda item: -seconds[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
    """Take what is set up for several tests off the one that comes first."""
    if fixturedef.scope == "function":
        return (yield)
    stash = request._pyfuncitem.stash
    stash[SHARED], before_s, begin_s = 0.0, stash.get(SHARED, 0.0), processor_s()
    try:
        return (yield)
    finally:  # a fixture that this one asked for is within the span
        stash[SHARED] = before_s + processor_s() - begin_s


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGAN] = processor_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    if call.when == "call":
        report.processor_s = processor_s() - item.stash[BEGAN] - item.stash.get(SHARED, 0.0)
    return report


class Measured:
    """The processor seconds of the tests of a run, told by each process that runs some."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and hasattr(report, "processor_s"):  # not of one that took its process with it
            self.seconds[report.nodeid] = report.processor_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        known = costs()
        if self.seconds:
            total_s = sum(self.seconds.values())
            terminalreporter.write_line(f"{total_s:.0f} s of processor time in {len(self.seconds)} tests")
        if config.getoption("costs"):
            kept = {name: cost for name, cost in (known | self.seconds).items() if cost >= TOLD_S and _is_there(name)}
            COSTS.write_text("".join(f"{kept[name]:.1f} {name}\n" for name in sorted(kept)), encoding="utf-8")
            return
        for name, cost in sorted(self.seconds.items()):
            if cost > GROWN * SLOW_S >= GROWN * known.get(name, 0.0) and name not in guards():
                terminalreporter.write_line(f"{cost:.1f} s of processor time: `make costs` would call it slow: {name}")


def _is_there(name: str) -> bool:
    """Say whether there is such a test in the file; of its cases nothing is known."""
    file, *_, test = name.partition("[")[0].split("::")
    path = HERE.parent / file
    return path.is_file() and f"def {test}(" in path.read_text(encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Measured())
