"""Both books as values: one request's split, and the lines over many. `join` makes them, `join_view` shows them.

In each, the lines sum to what the client felt: a `Split`'s exactly in integers, a `Book`'s means as floats do.
"""

from collections.abc import Sequence

import msgspec

from splittime.ledger import derive
from splittime.ledger.stages import Cause, Stage

TTFT, E2E = "ttft", "e2e"
HELD, CLIENT_LAG, CONNECT, SEND = CLIENT_BEFORE = ("held", "client_lag", "connect", "send")
NETWORK, UNSEEN, RESIDUAL = "network", "unseen", "residual"
LINE_ORDER = (*CLIENT_BEFORE, NETWORK, UNSEEN, *(stage.value for stage in Stage), RESIDUAL)
GOAL_NS, GOAL_SHARE = 1_000_000, 0.01
ALL = "all"

Key = tuple[str, str | None]  # stage and cause


def allowed_ns(figure_ns: float) -> float:
    """The residual that the goal allows a figure of this size."""
    return max(GOAL_NS, GOAL_SHARE * figure_ns)


class Split(msgspec.Struct, frozen=True, gc=False):
    """One request's figure and its lines, which sum to it exactly."""

    total_ns: int
    lines: tuple[tuple[str, str | None, int], ...]

    @property
    def residual_ns(self) -> int:
        return next(ns for stage, _, ns in self.lines if stage == RESIDUAL)

    @property
    def is_within_goal(self) -> bool:
        return abs(self.residual_ns) <= allowed_ns(self.total_ns)


class JoinedRequest(msgspec.Struct, frozen=True):
    """A request in both books. A figure is None if it was left out; `JoinedBooks.left_out` counts why."""

    index: int
    request_id: str
    prompt_tokens: int
    output_tokens: int
    ttft: Split | None
    e2e: Split | None


class BookLine(msgspec.Struct, frozen=True):
    """One line over many requests, those that have nothing of it counting as 0: so the means sum to the figure's."""

    stage: str
    cause: str | None
    mean_ns: float
    p50_ns: float
    p99_ns: float
    share: float


class Book(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over the requests of a prompt-length bucket, or `all`."""

    figure: str
    bucket: str
    count: int
    mean_ns: float
    p50_ns: float
    p99_ns: float
    lines: tuple[BookLine, ...]
    residual_abs_mean_ns: float
    residual_abs_p99_ns: float
    share_within_goal: float

    @property
    def is_within_goal(self) -> bool:
        return self.residual_abs_mean_ns <= allowed_ns(self.mean_ns)


class JoinedBooks(msgspec.Struct, frozen=True, kw_only=True):
    """`books`: for TTFT and E2E, first over all requests, then by bucket. `left_out`: figure -> reason -> requests.
    round_trip_ns: the median that was probed, None if it was not."""

    arm: int
    intended: int
    round_trip_ns: int | None
    requests: tuple[JoinedRequest, ...]
    books: tuple[Book, ...]
    left_out: dict[str, dict[str, int]]

    def book(self, figure: str, bucket: str = ALL) -> Book | None:
        return next((book for book in self.books if (book.figure, book.bucket) == (figure, bucket)), None)


def books(figure: str, joined: Sequence[JoinedRequest]) -> list[Book]:
    by_bucket: dict[str, list[Split]] = {ALL: []}
    for request in sorted(joined, key=lambda request: request.prompt_tokens):
        found = request.ttft if figure == TTFT else request.e2e
        if found is not None:
            by_bucket[ALL].append(found)
            by_bucket.setdefault(derive.prompt_bucket(request.prompt_tokens), []).append(found)
    return [book_of(figure, bucket, splits) for bucket, splits in by_bucket.items() if splits]


def book_of(figure: str, bucket: str, splits: Sequence[Split]) -> Book:
    """The lines over all of these requests."""
    totals_ns = [split.total_ns for split in splits]
    residuals_ns = [abs(split.residual_ns) for split in splits]
    ranks = derive.percentiles(totals_ns, (50, 99))
    return Book(
        figure=figure,
        bucket=bucket,
        count=len(splits),
        mean_ns=sum(totals_ns) / len(splits),
        p50_ns=ranks["p50"],
        p99_ns=ranks["p99"],
        lines=_book_lines(splits),
        residual_abs_mean_ns=sum(residuals_ns) / len(splits),
        residual_abs_p99_ns=derive.percentiles(residuals_ns, (99,))["p99"],
        share_within_goal=sum(split.is_within_goal for split in splits) / len(splits),
    )


def _book_lines(splits: Sequence[Split]) -> tuple[BookLine, ...]:
    by_key: dict[Key, list[int]] = {}
    for found in splits:
        for stage, cause, duration_ns in found.lines:
            by_key.setdefault((stage, cause), []).append(duration_ns)
    whole_ns = sum(found.total_ns for found in splits)
    lines = []
    for (stage, cause), some_ns in sorted(by_key.items(), key=lambda item: _place(item[0])):
        all_ns = some_ns + [0] * (len(splits) - len(some_ns))
        ranks = derive.percentiles(all_ns, (50, 99))
        share = sum(all_ns) / whole_ns if whole_ns else 0.0
        lines.append(BookLine(stage, cause, sum(all_ns) / len(splits), ranks["p50"], ranks["p99"], share))
    return tuple(lines)


_CAUSE_ORDER = (None, *(cause.value for cause in Cause))


def _place(key: Key) -> tuple[int, int]:
    return LINE_ORDER.index(key[0]), _CAUSE_ORDER.index(key[1])
