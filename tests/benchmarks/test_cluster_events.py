"""What is to happen to a cluster under load, and does not."""

import threading

import pytest

from benchmarks.cluster.events import TWO, Happening, Watched


def test_an_event_that_fails_in_its_timer_fails_the_run():
    def fail(cluster) -> None:
        raise LookupError("nobody listens on 1")

    watched = Watched(None, Happening(TWO, fail))
    watched.check()
    timer = threading.Timer(0, watched.happen)
    timer.start()
    timer.join()
    with pytest.raises(LookupError, match="nobody listens"):
        watched.check()
