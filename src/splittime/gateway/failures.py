"""How an attempt at an upstream fails: before its client has seen anything of it, in the middle, or at a bad moment."""

from splittime.core.errors import SplittimeError, UpstreamError
from splittime.gateway.verdict import AnswerVerdict


class AttemptFailure(Exception):
    """verdict: what it says, and what the client is told."""

    def __init__(self, verdict: AnswerVerdict) -> None:
        self.verdict = verdict
        super().__init__(self.error.info.message)

    @property
    def error(self) -> SplittimeError:
        return self.verdict.error or UpstreamError("no answer", code=self.verdict.code or None)


class UpstreamFailure(AttemptFailure):
    """The attempt failed, and the client has seen nothing of it; another may be made. is_outright: nobody has had an
    answer of the upstream since it was sent."""

    is_outright = False


class Interrupted(UpstreamFailure):
    """The stream broke off, and the client has seen its beginning alone; another upstream may go on with it."""


class BrokenStream(AttemptFailure):
    """The answer ended before its end, after the client had the beginning; it has been told."""
