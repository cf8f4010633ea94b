"""What a change would do to the requests of the last minutes, worked out in a process beside the server.

One at a time: another question meanwhile is refused with 429. The process has the lowest priority, a bounded number of
requests and steps (`diagnose.window`) and `TIME_S`; then it is ended, and the answer is a 503.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from splittime.core.errors import EngineError, Overloaded

TIME_S = 90.0
DRAWS = 6
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
COMMAND = (sys.executable, "-m", "splittime.simulate.beside")


class Simulation:
    """The process, while there is one."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="what-if")
        self.is_running = False
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Raises `Overloaded` while another runs."""
        if self.is_running:
            hint = "Ask again when it has ended."
            raise Overloaded("another change is being simulated", code="simulation_running", retry_after_s=5, hint=hint)
        self.is_running = True

    @contextlib.contextmanager
    def until_done(self) -> Iterator[None]:
        """Lets the next simulation begin on leaving. Entered in the thread that works, which goes on if the client that
        asked goes away."""
        try:
            yield
        finally:
            self.is_running = False

    def run(self, lines: Iterable[bytes]) -> bytes:
        """Returns the process's answer to these lines; blocks for up to `TIME_S`. Raises `Overloaded` for one that took
        longer, `EngineError` for a process that died."""
        asked = b"\n".join(lines)
        self._process = process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | ENVIRONMENT,
            start_new_session=True,  # Ctrl-C is the server's
        )
        try:
            answer, _ = process.communicate(asked, TIME_S)
        except subprocess.TimeoutExpired:
            words = f"the simulation took longer than {TIME_S:.0f} s: this machine has no time to spare"
            raise Overloaded(words, code="simulation_too_long", status=503, retry_after_s=60) from None
        finally:
            self._end(process)
        if process.returncode != 0:
            raise EngineError(f"the simulation's process ended with {process.returncode}")
        return answer

    def close(self) -> None:
        """End what runs."""
        if self._process is not None:
            self._end(self._process)
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
