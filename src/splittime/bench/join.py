"""Both books side by side: each request that the client saw, with the account that the server kept of it.

What the user felt, from the *intended* start to the first chunk (TTFT) or to the end (E2E), becomes lines that sum to
it with `==`. Clocks of two hosts are never subtracted, only durations are:

    held         held back on purpose: by a cap on requests in flight, by its session          client's clock
    client_lag   the rest from the intended start until the client turned to it               client's clock
    connect      making the connection; 0 for one that was open already                      client's clock
    send         the rest up to the request's last byte: waiting for a connection, writing   client's clock
    receive ...  the account's stages, each by its cause, up to the instant that the first
                 token was ready (TTFT) or to the account's end (E2E)                         server's clock
    deliver      for TTFT: from there until its chunk had been given to the socket            server's clock
    network      up and down together, as far as the probed round trip explains it
    unseen       of the rest, what it lay in the server's socket, whose loop was busy       the server's kernel
    residual     what neither book explains

With S the client's time from sent to the figure's end, A the account's time from its start to the same event, and P the
median of the probed round trips, U the account's `unseen_ns`:

    N = S - A     network = min(P, max(N, 0))     unseen = min(U, max(N - network, 0))
    residual = N - network - unseen

The two ways cannot be told apart without subtracting clocks, so they are one line. P was probed on a kept connection
while there was no load, and holds both sides' handling of one small HTTP request: it is an allowance. Whatever lies
between the books and exceeds it is residual: bytes that waited in the kernel because the client's event loop was busy,
a slow network under load. U is a few ms coarse. A negative residual means that the server began before the client had
sent its last byte. The goal: a mean absolute residual of at most 1 ms or 1 % of the mean, whichever is more.

`join` loses nobody: for each figure, those joined and those left out (with a reason) are all measured requests. The
lines sum to what the client felt: a `ClientSplit`'s exactly in integers, a `Book`'s means as floats do.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import median_low

import msgspec

from splittime.bench.book.records import Ending, Outcome, Run
from splittime.bench.servers import by_request
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Cause, Stage

TTFT, E2E = "ttft", "e2e"
HELD, CLIENT_LAG, CONNECT, SEND = CLIENT_BEFORE = ("held", "client_lag", "connect", "send")
NETWORK, UNSEEN, RESIDUAL = "network", "unseen", "residual"
LINE_ORDER = (*CLIENT_BEFORE, NETWORK, UNSEEN, *(stage.value for stage in Stage), RESIDUAL)
CAUSE_ORDER: tuple[str | None, ...] = (None, *(cause.value for cause in Cause))
GOAL_NS, GOAL_SHARE = 1_000_000, 0.01
ALL = "all"

Key = tuple[str, str | None]  # stage and cause


def allowed_ns(figure_ns: float) -> float:
    """The residual that the goal allows a figure of this size."""
    return max(GOAL_NS, GOAL_SHARE * figure_ns)


class ClientSplit(msgspec.Struct, frozen=True, gc=False):
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
    ttft: ClientSplit | None
    e2e: ClientSplit | None


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
    by_bucket: dict[str, list[ClientSplit]] = {ALL: []}
    for request in sorted(joined, key=lambda request: request.prompt_tokens):
        found = request.ttft if figure == TTFT else request.e2e
        if found is not None:
            by_bucket[ALL].append(found)
            by_bucket.setdefault(derive.prompt_bucket(request.prompt_tokens), []).append(found)
    return [book_of(figure, bucket, splits) for bucket, splits in by_bucket.items() if splits]


def book_of(figure: str, bucket: str, splits: Sequence[ClientSplit]) -> Book:
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


def _book_lines(splits: Sequence[ClientSplit]) -> tuple[BookLine, ...]:
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


def _place(key: Key) -> tuple[int, int]:
    return LINE_ORDER.index(key[0]), CAUSE_ORDER.index(key[1])


def join(run: Run, arm: int = 0) -> JoinedBooks:
    """The measured requests of one server, each with its account. Of a server without accounts, all are left out."""
    accounts, probed = by_request(run.arms[arm].accounts), run.arms[arm].round_trip_ns
    round_trip_ns = median_low(probed) if probed else None
    outcomes = run.measured(arm)
    joined: list[JoinedRequest] = []
    left_out: dict[str, Counter[str]] = {TTFT: Counter(), E2E: Counter()}
    for outcome in outcomes:
        choices = accounts.get(outcome.request_id, [])
        splits: dict[str, ClientSplit | None] = {}
        for figure, counter in left_out.items():
            reason = why_not(outcome, choices, figure)
            splits[figure] = split(outcome, choices, figure, round_trip_ns or 0) if reason is None else None
            if reason is not None:
                counter[reason] += 1
        if any(splits.values()):
            joined.append(_joined(outcome, choices, splits))
    return JoinedBooks(
        arm=arm,
        intended=len(outcomes),
        round_trip_ns=round_trip_ns,
        requests=tuple(joined),
        books=tuple(book for figure in left_out for book in books(figure, joined)),
        left_out={figure: dict(counter) for figure, counter in left_out.items()},
    )


def why_not(outcome: Outcome, choices: Sequence[ClosedAccount], figure: str) -> str | None:
    """Why a request has no such figure in both books; None if it has."""
    if outcome.sent_ns is None:
        return "not sent"
    if figure == E2E and outcome.ending is not Ending.COMPLETE:
        return outcome.ending.value
    if not outcome.chunk_ns if figure == TTFT else outcome.end_ns is None:
        return "no answer" if outcome.ending is Ending.COMPLETE else outcome.ending.value
    if not choices:
        return "no account"
    if not all(_adds_up(account) for account in choices):
        return "account does not add up"
    if figure == TTFT and not any(account.token_written_ns for account in choices):
        return "no token in the account"
    return None


def _adds_up(account: ClosedAccount) -> bool:
    try:
        account.verify()
    except ValueError:
        return False
    return True


def split(outcome: Outcome, choices: Sequence[ClosedAccount], figure: str, round_trip_ns: int) -> ClientSplit:
    """One request's figure by lines. `why_not` has said that it has one."""
    assert outcome.sent_ns is not None
    if figure == TTFT:
        at_ns, server = outcome.chunk_ns[0], first_token_lines(choices)
    else:
        assert outcome.end_ns is not None
        last = max(choices, key=lambda account: account.end_ns)
        at_ns, server = outcome.end_ns, _stage_lines(last, last.end_ns)
    between_ns = at_ns - outcome.sent_ns - sum(server.values())
    network_ns = min(round_trip_ns, max(between_ns, 0))
    unseen_ns = min(choices[0].unseen_ns, max(between_ns - network_ns, 0))
    lines = {
        **client_lines(outcome, outcome.sent_ns),
        (NETWORK, None): network_ns,
        **server,
        (UNSEEN, None): unseen_ns,
        (RESIDUAL, None): between_ns - network_ns - unseen_ns,
    }
    return ClientSplit(at_ns - outcome.intended_ns, tuple((stage, cause, ns) for (stage, cause), ns in lines.items()))


def client_lines(outcome: Outcome, sent_ns: int) -> dict[Key, int]:
    """Returns what the client itself took from the intended start until the request was sent."""
    picked_up_ns = outcome.picked_up_ns if outcome.picked_up_ns is not None else sent_ns
    connect_ns = min(outcome.connect_ns or 0, sent_ns - picked_up_ns)
    late_ns = picked_up_ns - outcome.intended_ns
    held_ns = min(outcome.held_ns, max(late_ns, 0))
    durations_ns = (held_ns, late_ns - held_ns, connect_ns, sent_ns - picked_up_ns - connect_ns)
    return {(name, None): ns for name, ns in zip(CLIENT_BEFORE, durations_ns, strict=True)}


def first_token_lines(choices: Sequence[ClosedAccount]) -> dict[Key, int]:
    """From the account's start until the first token's chunk had been given to the socket, of whichever choice was
    first."""
    first = min((a for a in choices if a.token_written_ns), key=lambda account: account.token_written_ns[0])
    lines = _stage_lines(first, first.token_ready_ns[0])
    deliver = (Stage.DELIVER.value, None)
    lines[deliver] = lines.get(deliver, 0) + first.token_written_ns[0] - first.token_ready_ns[0]
    return lines


def _stage_lines(account: ClosedAccount, until_ns: int) -> dict[Key, int]:
    """The account's time by stage and cause, up to an instant of its own clock."""
    lines: dict[Key, int] = {}
    for interval in account.intervals:
        key = (interval.stage.value, interval.cause.value if interval.cause is not None else None)
        duration_ns = min(interval.end_ns, until_ns) - interval.begin_ns
        if duration_ns > 0:
            lines[key] = lines.get(key, 0) + duration_ns
    return lines


def _joined(outcome: Outcome, choices: Sequence[ClosedAccount], splits: dict[str, ClientSplit | None]) -> JoinedRequest:
    return JoinedRequest(
        index=outcome.index,
        request_id=outcome.request_id,
        prompt_tokens=choices[0].prompt_tokens,
        output_tokens=sum(account.output_tokens for account in choices),
        ttft=splits[TTFT],
        e2e=splits[E2E],
    )
