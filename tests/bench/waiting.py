"""Waiting for what must come, however slow the machine: for a state, never for a time."""

from splittime.bench.mock_server import MockServer, Timings


class Gathering(MockServer):
    """Answers nobody before so many have asked; from then on it is a mock server like any other."""

    def __init__(self, count: int, timings: Timings | None = None) -> None:
        super().__init__(timings or Timings(ttft_ns=0, itl_ns=0))
        self._count, self._asking = count, []

    def arrive(self, answering, arrived_ns):
        if self._asking is None:
            super().arrive(answering, arrived_ns)
            return
        self._asking.append((answering, arrived_ns))
        if len(self._asking) == self._count:
            asking, self._asking = self._asking, None
            for one in asking:
                super().arrive(*one)
