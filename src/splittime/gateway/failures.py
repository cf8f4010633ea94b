"""How an attempt at an upstream fails: before its client has seen anything of it, in the middle, or at a bad moment."""

from typing import NamedTuple

from splittime.core.errors import SplittimeError, UpstreamError
from splittime.web import http


class PassedAnswer(NamedTuple):
    """An answer of an upstream as it is given to the client."""

    status: int
    headers: http.Headers
    body: bytes


class UpstreamFailure(Exception):
    """The attempt failed, and the client has seen nothing of it.

    error: what the client is told if nobody does better. answer: what the upstream said itself, told in its place.
    is_retryable: another attempt may be made. is_fault: it speaks against the upstream.
    """

    def __init__(
        self,
        error: SplittimeError,
        *,
        answer: PassedAnswer | None = None,
        is_retryable: bool = False,
        is_fault: bool = True,
    ) -> None:
        super().__init__(error.info.message)
        self.error, self.answer = error, answer
        self.is_retryable, self.is_fault = is_retryable, is_fault


class Interrupted(UpstreamFailure):
    """The stream broke off, and the client has seen its beginning alone; another upstream may go on with it."""


class LacksEndpoint(UpstreamFailure):
    """The upstream does not have the path that was asked for; it is as good as ever for others."""


class BrokenStream(Exception):
    """The answer ended before its end, after the client had the beginning; it has been told. is_fault: as above."""

    def __init__(self, error: SplittimeError, *, is_fault: bool = True) -> None:
        super().__init__(error.info.message)
        self.error, self.is_fault = error, is_fault


def failure_of(words: str, code: str, status: int) -> UpstreamFailure:
    """Returns a failure after which another attempt may be made."""
    return UpstreamFailure(UpstreamError(words, code=code, status=status), is_retryable=True)
