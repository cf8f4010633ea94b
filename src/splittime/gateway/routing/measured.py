"""What `/metrics` has of routing by difficulty: counted as accounts are closed. Models are the config's."""

from collections.abc import Iterator

from splittime.ledger.account import ClosedAccount
from splittime.ledger.export.metrics import MetricSpec

DECIDED = "splittime_gateway_difficulty_total"
CHECKED = "splittime_gateway_first_tokens_total"
HELD = "splittime_gateway_first_tokens_held_seconds_total"
ANEW = "splittime_gateway_asked_anew_seconds_total"

DIFFICULTY_METRICS = (
    MetricSpec(DECIDED, "counter", ("model", "choice"), "Requests for a [[difficulty]] by the choice, small or large"),
    MetricSpec(CHECKED, "counter", ("upstream", "verdict"), "Answers of small models by what their first tokens said"),
    MetricSpec(HELD, "counter", ("verdict",), "Time for which such answers were held back, from their first piece on"),
    MetricSpec(ANEW, "counter", ("verdict",), "Time of the attempts whose answers were not given, and asked anew"),
)


def counted(account: ClosedAccount) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yields name, labels and increase of each series that an account adds to."""
    routing = account.routing
    if routing is not None and routing.difficulty is not None:
        yield DECIDED, (routing.model, routing.difficulty.choice), 1
    for attempt in account.attempts:
        found = attempt.first_tokens
        if found is not None:
            yield CHECKED, (attempt.upstream, found.verdict), 1
            yield HELD, (found.verdict,), found.held_ns / 1e9
            if attempt.error == found.verdict:
                yield ANEW, (found.verdict,), (attempt.end_ns - attempt.begin_ns) / 1e9
