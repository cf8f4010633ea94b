"""A gateway that stood still blames no upstream for its own time-outs."""

import asyncio
import os
import signal
import threading
import time

from patience import until
from splittime.gateway.breaks import LATE_S, LoopLag

from .conftest import gateway_of, upstream


async def test_a_late_loop_explains_time_outs_of_attempts_that_saw_it():
    lag = LoopLag()
    assert not lag.explains("upstream_connect_timeout", 0)
    lag.begin()
    before_ns = time.monotonic_ns()
    await asyncio.sleep(0.05)
    assert not lag.explains("upstream_connect_timeout", before_ns)
    time.sleep(LATE_S + 0.15)
    assert lag.explains("upstream_connect_timeout", before_ns)  # the timer has not been asked yet
    await asyncio.sleep(0.01)
    assert lag.explains("upstream_connect_timeout", before_ns)
    assert not lag.explains("upstream_died", before_ns)
    assert not lag.explains("upstream_connect_timeout", time.monotonic_ns())
    assert lag.longest_ns >= LATE_S * 1e9
    lag.end()


def test_a_gateway_that_was_stopped_opens_no_breaker(hostile, tmp_path):
    """Stopped by a signal for longer than the first byte may take, it finds the time-out run out. One failure would
    open the breaker; the stop opens none, and the same upstream without a stop does."""
    text = "[breaker]\nfailures = 1\nopen_s = 60\n[retries]\nmax_attempts = 1\n"
    text += upstream("slow", hostile.url("slow"), first_byte_s=1.0)
    with gateway_of(tmp_path, text) as gateway:
        asked = threading.Thread(target=lambda: gateway.ask("slow", stream=True))
        asked.start()
        until(lambda: gateway.get("/stats")["upstreams"][0]["requests"])
        os.kill(gateway.process.pid, signal.SIGSTOP)
        time.sleep(1.2)
        os.kill(gateway.process.pid, signal.SIGCONT)
        asked.join()
        assert not gateway.get("/stats")["upstreams"][0]["is_open"]
        for _ in range(20):  # one in which this machine let it run
            assert gateway.ask("slow", stream=True)[0] == 504
            if gateway.get("/stats")["upstreams"][0]["is_open"]:
                return
        raise AssertionError("no time-out opened the breaker")
