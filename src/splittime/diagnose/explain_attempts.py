"""What `explain` says of a gateway's account: how it was routed, who was asked, among whom, and what each told."""

from collections.abc import Iterator

from splittime.ledger.account import ClosedAccount
from splittime.ledger.attempts import (
    CAPPED,
    HIT,
    TIED_LOST,
    AffinityDecision,
    Attempt,
    Considered,
    DifficultyDecision,
    FirstTokens,
    RouteDecision,
)
from splittime.ledger.stages import Stage

WHY = {
    "over_cap": "which had more to do than [affinity] allows",
    "no_room": "which had no room",
    "unseen": "nobody had served its beginning",
    "shared": "its known beginning is everybody's",
    "short": "it is too short",
    "unread": "it was too long, or could not be read",
}


def attempt_lines(account: ClosedAccount) -> Iterator[str]:
    """Yields lines without an end; what belongs to the line before is indented."""
    if account.routing is not None:
        yield _rule_words(account.routing)
    if account.degraded:
        yield f"a lesser answer, of the stage {account.degraded} of the gateway's ladder"
    for attempt in account.attempts:
        yield from _lines_of(attempt)


def in_ms(duration_ns: float) -> str:
    return f"{duration_ns / 1e6:.3f}" if duration_ns < 1e9 else f"{duration_ns / 1e6:.1f}"


def _lines_of(attempt: Attempt) -> Iterator[str]:
    others = ", ".join(map(_considered_words, attempt.considered))
    ending = attempt.error or f"answered {attempt.status}"
    yield f"upstream {attempt.upstream} ({in_ms(attempt.end_ns - attempt.begin_ns)} ms): {ending}; chosen of {others}"
    if attempt.affinity is not None:
        yield f"  {_affinity_words(attempt.affinity)}"
    if attempt.first_tokens is not None:
        yield f"  {_first_words(attempt.first_tokens)}"
    if attempt.resumed_by:
        yield f"  it went on after {attempt.resumed_after} tokens of the one before, by {attempt.resumed_by}"
    if attempt.tied_to:
        lost = f", and lost: it had a prompt of about {attempt.lost_tokens} tokens"
        yield f"  it raced with {attempt.tied_to}{lost if attempt.error == TIED_LOST else ''}"
    if attempt.nested:
        yield f"  its own account, ms: {_stages(attempt)}"
    if attempt.nested_fault:
        yield f"  its own account is not nested: {attempt.nested_fault}"


def _stages(attempt: Attempt) -> str:
    totals_ns: dict[Stage, int] = {}
    for stage in attempt.nested:
        totals_ns[stage.stage] = totals_ns.get(stage.stage, 0) + stage.end_ns - stage.begin_ns
    return ", ".join(f"{stage.value} {in_ms(ns)}" for stage, ns in totals_ns.items())


def _considered_words(one: Considered) -> str:
    """Returns how much an upstream had to do, how far away it was and how long its queue."""
    told = {"away": one.rtt_ns, "to wait": one.wait_ns}
    costs = ", ".join(f"{in_ms(ns)} ms {what}" for what, ns in told.items() if ns is not None)
    return f"{one.upstream} with {one.requests} requests{f' ({costs})' if costs else ''}"


def _affinity_words(decision: AffinityDecision) -> str:
    """Returns what prefix affinity went by."""
    why = WHY.get(decision.why, decision.why)
    if decision.result not in (HIT, CAPPED):
        return f"its prompt said nothing of whom to choose: {why}"
    begun = f"{decision.upstream} had served {decision.matched_bytes} bytes of the prompt's beginning"
    shared = f" ({decision.shared_bytes} of them everybody's)" if decision.shared_bytes else ""
    load = f"with {decision.tokens} tokens in flight of {decision.cap_tokens} that it might have"
    return f"{begun}{shared}, {load}" if decision.result == HIT else f"{begun}{shared}, {why}: {load}"


def _rule_words(decision: RouteDecision) -> str:
    """Returns what a gateway's rules said, and under which config."""
    rule = f"by the rule {decision.rule}" if decision.rule else "by no rule"
    model = decision.model if decision.model == decision.asked_model else f"{decision.asked_model} as {decision.model}"
    by_text = "" if decision.difficulty is None else f", {_text_words(decision.difficulty)}"
    return f"routed {rule}: {model} (policy {decision.policy}){by_text}"


def _text_words(difficulty: DifficultyDecision) -> str:
    """Returns what the text decided, and by what."""
    if not difficulty.labels:
        return f"{difficulty.choice} first"
    score = ", as it has no text" if difficulty.score is None else f" by the score {difficulty.score:g}"
    bound = f"threshold {difficulty.threshold:g}, {difficulty.neighbours} neighbours, labels {difficulty.labels}"
    return f"{difficulty.choice}{score} ({bound})"


def _first_words(found: FirstTokens) -> str:
    """Returns what the first tokens of a small model's answer said."""
    mean = "" if found.mean_logprob is None else f", mean log-probability {found.mean_logprob:.3f}"
    held = f"held back {in_ms(found.held_ns)} ms"
    why = f" ({found.why})" if found.why else ""
    return f"first tokens: {found.verdict}{why}{mean}; {held}"
