"""The engine's process from within: what its threads tell its loop."""

from pathlib import Path

import pytest

from benchmarks.fake_runner import FakeRunner
from splittime.drive.crank import EngineParts
from splittime.drive.messages import MaskFound
from splittime.drive.worker import _receive
from splittime.engine.engine import Engine
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler


class Compiler:
    """Notes who is to be told that a mask is there."""

    on_found = None

    def tell_found(self, on_found: object) -> None:
        self.on_found = on_found


@pytest.mark.parametrize("plans_ahead", [False, True])
def test_a_mask_that_was_late_is_told_by_a_message_of_its_own(plans_ahead: bool, tmp_path: Path) -> None:
    """One that ends a hold could let in another request of the same id before its form is compiled."""
    compiler = Compiler()
    engine = Engine(Scheduler(SchedulerConfig()), plans_ahead=plans_ahead)
    inbox = _receive(
        f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out", EngineParts(engine, FakeRunner(), grammars=compiler)
    )
    if plans_ahead:  # the next step has its row already: the step waits for the mask
        assert compiler.on_found is None
        return
    compiler.on_found("x")
    assert [message for message, _ in inbox.take_all()] == [MaskFound("x")]
