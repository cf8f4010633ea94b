"""How long a request that comes now will wait for a first byte at an upstream, by what those before it did.

Counted are the tokens of the requests that the upstream has and has not begun to answer, and how fast such tokens have
come to a first byte of late, over the time in which there were any. Their ratio is the wait (Little's law, 1961). A
request whose answer streams already is not counted: a server that computes several at once begins the next beside it,
and where it does not, the rate says so. While nothing comes the rate falls, so that an upstream that hangs has a longer
wait with every second.
"""

import math

FORGET_S = 30.0  # in which a rate forgets all but 1/e
LEAST_SEEN_S = 0.05  # for a rate to be told
LEAST_TOKENS = 1e-9  # a rate falls to so many at most, and never to "nothing was seen"
MOST_S = 86_400.0  # of a wait that is told: records keep its nanoseconds in 64 bits


class FirstByteWaits:
    """tokens: of requests that were sent and have no first byte. Times are ns of one monotonic clock."""

    def __init__(self) -> None:
        self.tokens = 0
        self._requests = 0
        self._begun = self._seconds = 0.0
        self._since_ns: int | None = None  # up to when `_seconds` has been counted, while any wait

    def sent(self, tokens: int, now_ns: int) -> None:
        self._elapse(now_ns)
        self._since_ns = now_ns
        self._requests += 1
        self.tokens += tokens

    def begun(self, tokens: int, now_ns: int) -> None:
        """A request that was sent has the first byte of an answer."""
        self.gone(tokens, now_ns)
        self._begun += tokens

    def gone(self, tokens: int, now_ns: int) -> None:
        """A request that was sent is over, and had none."""
        self._elapse(now_ns)
        self._requests -= 1
        self.tokens -= tokens
        if self._requests == 0:
            self._since_ns = None

    def wait_ns(self, now_ns: int) -> int | None:
        """Returns the wait of a request that is sent now; None while too little was seen."""
        if self.tokens == 0:
            return 0
        self._elapse(now_ns)
        if self._seconds < LEAST_SEEN_S or self._begun <= 0:
            return None
        return int(min(self.tokens * self._seconds / self._begun, MOST_S) * 1e9)

    def _elapse(self, now_ns: int) -> None:
        if self._since_ns is not None and now_ns > self._since_ns:
            kept = math.exp((self._since_ns - now_ns) / 1e9 / FORGET_S)
            self._begun = max(self._begun * kept, LEAST_TOKENS) if self._begun else 0.0
            self._seconds = self._seconds * kept + FORGET_S * (1 - kept)  # the same, looked at often or once
            self._since_ns = now_ns
