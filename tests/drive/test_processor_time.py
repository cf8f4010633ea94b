"""What the kernel says of a thread, and what a step's record makes of it."""

import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks.fake_runner import FakeRunner
from splittime.core.clock import SystemClock
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, EngineParts
from splittime.drive.host_time import processor_time
from splittime.engine.engine import Engine
from splittime.engine.recorder import ThreadTime
from splittime.ledger.steps import verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler

pytestmark = pytest.mark.skipif(processor_time() is None, reason="this kernel does not count what threads wait")

STOPPED = """
import select, sys, time
from splittime.drive.host_time import processor_time
known = processor_time()
before, begin_ns = known.now(), time.monotonic_ns()
print("go", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]: pass
lasted_ns, after = time.monotonic_ns() - begin_ns, known.now()
print(lasted_ns - (after.ran_ns - before.ran_ns) - (after.waited_ns - before.waited_ns))
"""


def test_a_process_that_is_stopped_was_off_the_processor():
    """It is busy until it is told to end, and is stopped for 0.3 s of that.

    A busy machine makes it wait too, which is another number.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)  # until the kernel has stopped it
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGCONT)
    told, _ = process.communicate("end\n", timeout=60)
    assert int(told) > 200_000_000


def steps_of(crank: Crank, tokens: int = 20) -> list:
    crank.submit(
        Request(
            request_id="a",
            prompt_token_ids=(1, 2, 3),
            sampling=SamplingParams(max_tokens=tokens, seed=0),
            submitted_ns=time.monotonic_ns(),
        ),
        time.monotonic_ns(),
    )
    found = []
    while crank.has_work:
        output = crank.turn()
        if output is not None and output.record is not None:
            found.append(output.record)
    return found


def a_crank(processor=None) -> Crank:
    runner = FakeRunner(step_ns=1_000_000)  # which sleeps: it does not run, and does not ask to
    return Crank(EngineParts(Engine(Scheduler(SchedulerConfig())), runner), SystemClock(), processor=processor)


def test_records_tell_what_the_thread_was_not_given():
    crank = a_crank(processor_time())
    steps = steps_of(crank)
    verify_steps(steps)
    assert all(step.cpu_wait_ns is not None for step in steps)
    assert sum(step.off_cpu_ns for step in steps) > 5_000_000


def test_records_of_an_unwatched_thread_say_nothing():
    assert all(step.cpu_wait_ns is None and step.off_cpu_ns is None for step in steps_of(a_crank()))


def test_what_was_waited_is_held_to_the_step():
    """A kernel's numbers are read a little after the step's end."""

    class Wild:
        waited_ns = 0

        def now(self) -> ThreadTime:
            self.waited_ns += 10**12
            return ThreadTime(0, self.waited_ns)

    crank = a_crank(Wild())
    steps = steps_of(crank)
    verify_steps(steps)
    assert all(step.cpu_wait_ns == step.host_gap_ns + step.end_ns - step.begin_ns for step in steps)
