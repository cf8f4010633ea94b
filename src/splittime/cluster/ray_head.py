"""A Ray of a cluster's own, on this machine: loopback only, no dashboard, and a token without which it takes nothing.

A process of its own starts it, and ends it when it is told to or `splittime up` has ended. Ray gives itself half a
minute to start, which a busy machine may not have, and has been seen to wait for itself for longer: what is left of
such a start ends with that process, and another one tries again. One that ends by itself again and again cannot start.
"""

import contextlib
import importlib.util
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from splittime.cluster.up_process import POLL_S, UpProcess
from splittime.core.errors import ConfigError, EngineError
from splittime.core.this_process import end_when_gone

START_S, TRY_S, SAY_S, END_S = 180.0, 60.0, 10.0, 30.0  # of all attempts, and of one
MAX_ENDED = 3  # attempts that ended by themselves
OWN_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what it calls "no cluster": all its ports are on loopback, on Linux too
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_gcs_server_port_wait_time_s": f"{TRY_S:.0f}",
    "RAY_raylet_start_wait_time_s": f"{TRY_S:.0f}",
}


class RayHead:
    """folder: for its files. `start`, then `check` now and then, then `end`."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "splittime.cluster.ray_head", str(os.getpid())]
        self._process = UpProcess(folder, "ray", command)

    def start(self, say: Callable[[str], None], is_hurried: Callable[[], bool]) -> str:
        """Returns its address, and leaves in the environment what its clients need; "" where somebody was in a hurry.
        Raises `EngineError` if it is not there in `START_S`, or has ended by itself `MAX_ENDED` times."""
        os.environ.update(OWN_RAY, RAY_AUTH_TOKEN=secrets.token_hex(32))
        self._process.start()
        begin_s, said_s, tried_s, num_ended = time.monotonic(), 0.0, 0.0, 0
        while not self._process.has_told and not is_hurried():
            lasted_s = time.monotonic() - begin_s
            if lasted_s - tried_s > TRY_S:
                self._process.signal(signal.SIGKILL)
            if self._process.attend():
                num_ended += lasted_s - tried_s <= TRY_S
                tried_s = lasted_s
                if num_ended == MAX_ENDED:
                    raise self._not_started(f"it ended {num_ended} times: {self._process.last_line}")
                say(f"Ray did not start, and is started again: {self._process.last_line}")
            if lasted_s >= said_s:
                say(f"starting Ray, for {lasted_s:.0f} of {START_S:.0f} s")
                said_s += SAY_S
            if lasted_s > START_S:
                raise self._not_started(f"not in {START_S:.0f} s")
            time.sleep(POLL_S)
        return self._process.printed if self._process.has_told else ""

    def _not_started(self, why: str) -> EngineError:
        hint = f"start one with `ray start --head`, and set ray_address. {self._process.words}"
        return EngineError(f"Ray did not start: {why}", hint=hint)

    def check(self) -> None:
        """Raises `EngineError` if it has ended: replicas have ended with it, and another would not know of them."""
        if not self._process.is_alive:
            hint = f"start the cluster again. {self._process.words}"
            raise EngineError("Ray has ended", hint=hint)

    def end(self, is_hurried: Callable[[], bool]) -> None:
        """Return when it has ended; it is killed after `END_S`, or as soon as somebody is in a hurry."""
        self._process.signal(signal.SIGTERM)
        self._process.wait(END_S, is_hurried)


def check_ray() -> None:
    """Raises `ConfigError` where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        hint = "pip install 'splittime[cluster]', or leave runner out: it is \"local\" then"
        raise ConfigError('runner "ray" needs Ray', param="runner", value="ray", hint=hint)


def main() -> None:
    end_when_gone(int(sys.argv[1]))
    import ray

    ended = threading.Event()
    with contextlib.redirect_stdout(sys.stderr):
        context = ray.init("local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda sign, frame: ended.set())
    print(context.address_info["gcs_address"], flush=True)
    ended.wait()
    ray.shutdown()


if __name__ == "__main__":
    main()
