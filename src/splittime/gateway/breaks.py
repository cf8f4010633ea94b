"""What broke off or came too late, as verdicts: no connection, no byte in time, an answer without its end."""

import time
from typing import NamedTuple

from splittime.core.errors import DeadlineExceeded, UpstreamError
from splittime.gateway.config import UpstreamConfig
from splittime.gateway.upstream_connections import NoConnection
from splittime.gateway.upstream_pulse import UpstreamSilent
from splittime.gateway.verdict import AnswerVerdict, Whose, failed

now_ns = time.monotonic_ns
BROKEN = (OSError, ValueError)
DIED, STALLED = "upstream_died", "upstream_stalled"


class Deadline(NamedTuple):
    """The instant at which a request is given up. is_clients: its client said so, else the config."""

    at_ns: int
    is_clients: bool

    def within(self, seconds: float) -> tuple[float, bool]:
        """Returns how long something may take that may take so long at most, and whether the deadline says so. An event
        loop's timers are a millisecond coarse: what has run out is not asked of a clock afterwards."""
        left_s = max(0.0, (self.at_ns - now_ns()) / 1e9)
        return (left_s, True) if left_s <= seconds else (seconds, False)


class AttemptBreaks:
    """What became of one attempt at the upstream of this config, within this deadline."""

    def __init__(self, config: UpstreamConfig, deadline: Deadline) -> None:
        self._config, self._deadline, self._name = config, deadline, config.name

    def before(self, error: BaseException, limit_s: float, *, is_deadline: bool) -> AnswerVerdict | None:
        """Returns the verdict on an attempt of which no byte came within `limit_s`; None for what is no such error."""
        name, config = self._name, self._config
        if isinstance(error, UpstreamSilent):
            return self.silent()
        if isinstance(error, NoConnection):
            if not error.is_too_late:
                return failed(f"no connection to upstream {name!r}", "upstream_unreachable")
            if config.connect_s < limit_s:
                words = f"no connection to upstream {name!r} within {config.connect_s:g} s"
                return failed(words, "upstream_connect_timeout", 504)
        if isinstance(error, NoConnection | TimeoutError):
            if is_deadline:
                return self.too_late()
            words = f"no byte of an answer from upstream {name!r} within {config.first_byte_s:g} s"
            return failed(words, "upstream_first_byte_timeout", 504)
        if isinstance(error, BROKEN):
            return failed(f"upstream {name!r} broke off before its answer", "upstream_broke_off")
        return None

    def within(self, error: BaseException, *, is_deadline: bool) -> AnswerVerdict:
        """Returns the verdict on an answer whose next piece did not come."""
        if isinstance(error, UpstreamSilent):
            return self.silent()
        if not isinstance(error, TimeoutError):
            return self.died()
        if is_deadline:
            return self.too_late()
        return failed(f"upstream {self._name!r} sent nothing for {self._config.between_s:g} s", STALLED, 504)

    def died(self) -> AnswerVerdict:
        return failed(f"upstream {self._name!r} broke off in the middle of its answer", DIED)

    def silent(self) -> AnswerVerdict:
        """Returns the verdict on an upstream that owes a whole answer and does not say that it lives."""
        words = f"no answer from upstream {self._name!r} in more than {self._config.first_byte_s:g} s"
        return failed(f"{words}, and it does not say that it lives", "upstream_first_byte_timeout", 504)

    def whole_too_late(self) -> AnswerVerdict:
        """Returns the verdict on a whole answer that took too long, which says nothing of an upstream that lives."""
        whole_s = self._config.whole_s
        words = f"the answer took longer than {whole_s:g} s (whole_answer_s of upstream {self._name!r})"
        hint = "ask for a stream, or for fewer tokens"
        told = UpstreamError(words, code="upstream_whole_answer_timeout", status=504, limit=whole_s, hint=hint)
        return AnswerVerdict(Whose.REQUEST, told.info.code, told)

    def not_resumed(self, verdict: AnswerVerdict, reason: str) -> AnswerVerdict:
        """Returns the verdict on a break that no other upstream mends."""
        info = (verdict.error or UpstreamError("it broke off")).info
        words = f"{info.message}; it does not go on at another: {reason}"
        return verdict._replace(error=UpstreamError(words, code=info.code, status=info.status))

    def too_late(self) -> AnswerVerdict:
        """Returns the verdict on a request whose time is over, which says nothing of the upstream."""
        if self._deadline.is_clients:
            error = DeadlineExceeded.before("its answer was complete")
            return AnswerVerdict(Whose.REQUEST, error.info.code, error)
        total_s = self._config.total_s
        words = f"the answer took longer than {total_s:g} s (total_s of upstream {self._name!r})"
        told = UpstreamError(words, code="upstream_total_timeout", status=504, limit=total_s)
        return AnswerVerdict(Whose.REQUEST, told.info.code, told)
