"""A `core.engine.Sleeper` for engines on a `FakeRunner`: what the runner knew is forgotten; it can be told to fail."""

import time
from collections.abc import Callable

from benchmarks.fake_runner import FakeRunner
from splittime.core.engine import Moved
from splittime.core.errors import EngineError


class FakeSleeper:
    """take_ns: how long either takes, by `wait_ns`. in_order: called before either, to look around."""

    def __init__(
        self,
        runner: FakeRunner,
        take_ns: int = 0,
        wait_ns: Callable[[int], None] = lambda ns: time.sleep(ns / 1e9),
        in_order: Callable[[], None] = lambda: None,
    ) -> None:
        self._runner, self._take_ns, self._wait_ns, self._in_order = runner, take_ns, wait_ns, in_order
        self.level = 0
        self.fails = False
        self.calls: list[str] = []

    def sleep(self, level: int) -> Moved:
        assert not self.level
        moved = self._move(f"sleep {level}")
        self.level = level
        self._runner._kv.clear()
        return moved

    def wake(self) -> Moved:
        assert self.level
        moved = self._move("wake")
        self.level = 0
        return moved

    def _move(self, call: str) -> Moved:
        self._in_order()
        self.calls.append(call)
        self._wait_ns(self._take_ns)
        if self.fails:
            raise EngineError("it will not", code="no_memory", value=9, limit=5, hint="make room")
        return Moved(
            weights_bytes=100,
            kv_bytes=20,
            memory="process",
            memory_before_bytes=150,
            memory_after_bytes=30,
            parts=(("weights", 3, 7), ("kv", 7, 8)),
        )
