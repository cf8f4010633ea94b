"""What steps say of a device that is apart from the host: how long it worked, and how long it waited for the host.

    elapsed = length of the steps + the host's gaps before them            waiting for work (`idle_ns`) is left out
    busy    = forward pass + sampling, from the first to the last of a step's marks
    gap     = nothing to do between two steps, by its marks
    paced   = busy time of steps that it was told as slowly as it did them: it waited for single launches within them

A step is paced when telling it took at least `PACED` of what it took: a device that is slower than the host has all of
its step in line soon after it began. How much of a paced step was waiting is not known, so `paced_ns` is the most that
it can have been. Where the host computes (`execution` "host") none of this is there, and `device_time` is None.
"""

from collections.abc import Iterable

import msgspec

from splittime.ledger.steps import StepRecord

PACED = 0.9


class DeviceTime(msgspec.Struct, frozen=True, kw_only=True):
    """What the device did in some steps. num_rows, num_padded: of the captured ones."""

    num_steps: int
    num_captured: int
    elapsed_ns: int
    busy_ns: int
    gap_ns: int
    paced_ns: int
    enqueue_ns: int
    num_rows: int
    num_padded: int

    @property
    def busy_share(self) -> float:
        return self.busy_ns / max(1, self.elapsed_ns)

    @property
    def gap_share(self) -> float:
        return self.gap_ns / max(1, self.elapsed_ns)

    @property
    def captured_share(self) -> float:
        """Returns the share of the steps that were captured."""
        return self.num_captured / max(1, self.num_steps)

    @property
    def padded_share(self) -> float:
        """Returns the share of padding among the rows that captured steps computed."""
        return self.num_padded / max(1, self.num_rows + self.num_padded)


def is_paced(step: StepRecord) -> bool:
    return step.execution == "eager" and 0 < PACED * step.busy_ns <= step.enqueue_ns


def device_time(steps: Iterable[StepRecord]) -> DeviceTime | None:
    """None where no step ran on a device apart from the host."""
    there = [step for step in steps if step.execution != "host"]
    if not there:
        return None
    captured = [step for step in there if step.execution == "captured"]
    return DeviceTime(
        num_steps=len(there),
        num_captured=len(captured),
        elapsed_ns=sum(step.end_ns - step.begin_ns + step.host_gap_ns for step in there),
        busy_ns=sum(step.busy_ns for step in there),
        gap_ns=sum(step.gap_ns for step in there),
        paced_ns=sum(step.busy_ns for step in there if is_paced(step)),
        enqueue_ns=sum(step.enqueue_ns for step in there),
        num_rows=sum(len(step.rows) for step in captured),
        num_padded=sum(step.padded_rows for step in captured),
    )


def sentence(found: DeviceTime) -> str:
    """In one line."""
    steps = f"{found.num_steps} step{'s' if found.num_steps > 1 else ''}"
    told = f"The device worked {found.busy_share:.1%} of the time of {steps} and waited {found.gap_share:.1%} between"
    told += f" them; {found.captured_share:.0%} of them captured"
    return told + (f", {found.padded_share:.0%} of their rows padding." if found.num_padded else ".")
