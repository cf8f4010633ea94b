"""What has become of a request of a simulated server, while it is open."""

from splittime.ledger.account import Account
from splittime.simulate.trace import TracedRequest


class OpenRequest:
    """What has become of a request so far. ready_ns, steps: of each of its tokens. stops_after: as `TracedRequest` has
    it, until it has so many."""

    __slots__ = (
        *(
            "account",
            "cached_tokens",
            "has_begun",
            "host_tokens",
            "num_preemptions",
            "ready_ns",
            "steps",
            "stops_after",
            "traced",
        ),
    )

    def __init__(self, traced: TracedRequest) -> None:
        self.traced, self.account = traced, _begun(traced)
        self.ready_ns: list[int] = []
        self.steps: list[int] = []
        self.cached_tokens = self.host_tokens = self.num_preemptions = 0
        self.has_begun, self.stops_after = False, traced.stops_after

    @property
    def steps_before_stop(self) -> int:
        """How many steps will not end it by its stop string."""
        assert self.stops_after is not None
        return self.stops_after - len(self.steps) - 1


def _begun(traced: TracedRequest) -> Account:
    """Returns the account that the server hands over with the request."""
    first = traced.marks[0]
    account = Account(traced.request.request_id, first.begin_ns, first.stage)
    account.extend(traced.marks[1:])
    return account
