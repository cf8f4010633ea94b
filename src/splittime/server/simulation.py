"""What a change would do to the requests of the last minutes, worked out in a process beside the server.

One at a time: another question meanwhile is refused with 429. The process has the lowest priority, a bounded number of
requests and steps (`diagnose.excerpt`) and `TIME_S`; then it is ended, and the answer is a 503.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from splittime.core.errors import EngineError, Overloaded

TIME_S = 90.0
DRAWS = 10  # an interval holds one more draw eight times of ten; after 19 it would be nine, in twice the time
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
COMMAND = (sys.executable, "-m", "splittime.simulate.beside")


class Simulation:
    """The process, while there is one."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="what-if")
        self._work: Future[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        return self._work is not None and not self._work.done()

    def start(self, work: Callable[[], bytes]) -> "Future[bytes]":
        """Returns the answer to come, from a thread that goes on if the client that asked goes away. Raises
        `Overloaded` while another runs."""
        if self.is_running:
            hint = "Ask again when it has ended."
            raise Overloaded("another change is being simulated", code="simulation_running", retry_after_s=5, hint=hint)
        self._work = self._pool.submit(work)
        return self._work

    def run(self, lines: Iterable[bytes]) -> bytes:
        """Returns the process's answer to these lines; blocks for up to `TIME_S`. Raises `Overloaded` for one that took
        longer or used up its processor time, `EngineError` for a process that died."""
        asked = b"\n".join(lines)
        self._process = process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # Ctrl-C is the server's
        )
        if self._is_closed:
            self._end(process)
        try:
            answer, _ = process.communicate(asked, TIME_S)
        except subprocess.TimeoutExpired:
            raise _too_long(f"{TIME_S:.0f} s: this machine has no time to spare") from None
        finally:
            self._end(process)
        if process.returncode == -signal.SIGXCPU:
            raise _too_long("the processor time that it may have")
        if process.returncode != 0:
            raise EngineError(f"the simulation's process ended with {process.returncode}")
        return answer

    def close(self) -> None:
        """End what runs, and what would."""
        self._is_closed = True
        if self._process is not None:
            self._end(self._process)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()


def _too_long(words: str) -> Overloaded:
    hint = "Ask again when the server is less busy, or for a smaller change."
    about = f"the simulation took longer than {words}"
    return Overloaded(about, code="simulation_too_long", status=503, retry_after_s=60, hint=hint)
