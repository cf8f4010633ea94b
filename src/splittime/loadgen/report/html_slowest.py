"""The slowest requests one by one, each as one bar from its intended start to its end.

Pieces are durations laid end to end: the client's, the network's as one, the account's stages in the order in which
they came, the rest. Ticks beneath a bar are the chunks, by the client's clock alone. Without an account a bar shows
what can be seen from outside.
"""

from collections.abc import Iterable, Sequence

from splittime.ledger.account import ClosedAccount
from splittime.ledger.client_book import Outcome, Run
from splittime.ledger.client_figures import prompt_tokens, response_ns
from splittime.ledger.client_series import complete
from splittime.loadgen.joined import (
    CLIENT_BEFORE,
    CLIENT_LAG,
    CONNECT,
    HELD,
    NETWORK,
    RESIDUAL,
    SEND,
    UNSEEN,
    JoinedBooks,
)
from splittime.loadgen.own_book import by_request
from splittime.loadgen.report.html_bars import FIRST, STREAM, Bar, Bars, Timed, axis, duration_words, pieces, seen
from splittime.loadgen.report.html_scale import HEIGHT, WIDTH

SLOWEST = 12


def slowest(run: Run, arm: int, joined: JoinedBooks) -> Bars | None:
    """None if no request was complete."""
    whole = [o for o in complete(run.measured(arm)) if o.sent_ns is not None and (response_ns(o) or 0) > 0]
    worst = sorted(whole, key=lambda o: -(response_ns(o) or 0))[:SLOWEST]
    if not worst:
        return None
    accounts = by_request(run.arms[arm].accounts)
    splits = {request.request_id: request.e2e for request in joined.requests}
    high_ns = max(response_ns(outcome) or 0 for outcome in worst)
    bars = []
    for outcome in worst:
        split = splits.get(outcome.request_id)
        choices = accounts.get(outcome.request_id, ())
        timed = _from_both(choices, split.lines) if split else _from_outside(outcome)
        bars.append(_request_bar(outcome, timed, high_ns))
    return Bars("", axis(high_ns), bars, seen(bars))


def _request_bar(outcome: Outcome, timed: Sequence[Timed], high_ns: float) -> Bar:
    tokens = [f"{n:,}" if n is not None else "?" for n in (prompt_tokens(outcome), outcome.output_tokens)]
    places = sorted({round((ns - outcome.intended_ns) / high_ns * WIDTH, -1) for ns in outcome.chunk_ns})
    ticks = "".join(f"M{place:.0f} 0V{HEIGHT}" for place in places)
    total = duration_words(response_ns(outcome) or 0)
    return Bar(f"#{outcome.index}", " → ".join(tokens), total, pieces(timed, high_ns), ticks)


def _from_both(choices: Sequence[ClosedAccount], lines: Iterable[tuple[str, str | None, int]]) -> list[Timed]:
    """The split's lines, the account's stages among them in the order in which they came."""
    durations = {(stage, cause): ns for stage, cause, ns in lines}
    last = max(choices, key=lambda account: account.end_ns)
    middle = [((i.stage.value, i.cause.value if i.cause else None), i.duration_ns) for i in last.intervals]
    before = [((name, None), durations.get((name, None), 0)) for name in (*CLIENT_BEFORE, NETWORK, UNSEEN)]
    return [*before, *middle, ((RESIDUAL, None), durations.get((RESIDUAL, None), 0))]


def _from_outside(outcome: Outcome) -> list[Timed]:
    assert outcome.sent_ns is not None
    assert outcome.end_ns is not None
    picked_up_ns = outcome.picked_up_ns if outcome.picked_up_ns is not None else outcome.sent_ns
    first_ns = outcome.chunk_ns[0] if outcome.chunk_ns else outcome.end_ns
    late_ns = picked_up_ns - outcome.intended_ns
    connect_ns = min(outcome.connect_ns or 0, outcome.sent_ns - picked_up_ns)
    return [
        ((HELD, None), min(outcome.held_ns, late_ns)),
        ((CLIENT_LAG, None), late_ns - min(outcome.held_ns, late_ns)),
        ((CONNECT, None), connect_ns),
        ((SEND, None), outcome.sent_ns - picked_up_ns - connect_ns),
        ((FIRST, None), first_ns - outcome.sent_ns),
        ((STREAM, None), outcome.end_ns - first_ns),
    ]
