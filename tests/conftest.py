"""What all tests share: how Hypothesis looks for examples, and where Triton's kernels run.

No deadline, and no complaint about slowness: a busy machine is no failure. The examples are the same at each run, from
no database, so that a check says the same twice, and of two checks at once neither disturbs the other.
There are 20 of each, or as few as a test asks for. `TEST_EXAMPLES=3` looks at three times as many as a test asks for
(`make check-all`). `TEST_EXPLORE=1 make test` looks for new ones, and prints how to come back to what it finds.
Neither begins with SPLITTIME_: a server takes such a name for a setting, and ends where it knows none.

Without a card, Triton's kernels are tested in its interpreter, which has to be chosen before Triton is imported.
"""

import asyncio
import gc
import inspect
import os
import signal
import sys
from itertools import combinations, groupby
from pathlib import Path

import pytest
from hypothesis import HealthCheck, is_hypothesis_test, settings

pytest_plugins = ["forks", "lanes"]

NO_MODELS = str(Path(__file__).parent / "no_models")
SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("check", deadline=None, derandomize=True, database=None, suppress_health_check=SLOW)
settings.register_profile("explore", deadline=None, print_blob=True, database=None, suppress_health_check=SLOW)
settings.load_profile("explore" if os.environ.get("TEST_EXPLORE") else "check")

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell has what it starts with `&` ignore Ctrl-C, and what we start inherits that: tests that send it would wait.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A user's environment may have smollm2, which would be served where no model is named: here it is an empty package.
sys.path.insert(0, NO_MODELS)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (NO_MODELS, os.environ.get("PYTHONPATH"))))

MORE_EXAMPLES = int(os.environ.get("TEST_EXAMPLES", "0"))
FEW_EXAMPLES = 20

gc.disable()  # what is imported and collected stays, and a collection of garbage would look through it again and again


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from quick_interpreter import quicken

        quicken()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    functions = [item for item in items if isinstance(item, pytest.Function)]
    for test in {item.obj for item in functions if is_hypothesis_test(item.obj)}:
        own = test._hypothesis_internal_use_settings
        num = own.max_examples * MORE_EXAMPLES or min(own.max_examples, FEW_EXAMPLES)
        test._hypothesis_internal_use_settings = settings(own, max_examples=num)
    for item in functions:
        if MORE_EXAMPLES and is_hypothesis_test(item.obj):
            item.add_marker(pytest.mark.timeout(900))
    for _, cases in groupby(functions, key=lambda item: (item.path, item.originalname)):
        sweep_the_rest(list(cases))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine, in an event loop of its own: asyncio's, or by its module's `RUN`."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run = getattr(pyfuncitem.module, "RUN", asyncio.run)
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def sweep_the_rest(cases: list[pytest.Function]) -> None:
    """Marks with `sweep` what a test's `sample(number)` leaves for `make check-all`."""
    mark = cases[0].get_closest_marker("sample")
    if mark:
        left, seen = {case: pairs(case) for case in cases}, set()
        for _ in range(min(mark.args[0], len(cases))):
            chosen = max(left, key=lambda case: len(left[case] - seen))
            seen |= left.pop(chosen)
        for case in left:
            case.add_marker("sweep")


def pairs(case: pytest.Function) -> set:
    """The values of a case's parameters, and each two of them together."""
    values = sorted(case.callspec.indices.items()) if hasattr(case, "callspec") else []
    return set(values) | set(combinations(values, 2))
