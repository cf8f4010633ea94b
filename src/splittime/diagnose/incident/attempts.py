"""What of a gateway's attempts and decisions may be given away: who was asked and why, and no word of a client's."""

from splittime.diagnose.incident.names import LEFT_OUT, SharedNames, label, word
from splittime.ledger.attempts import (
    AffinityDecision,
    Attempt,
    Considered,
    DifficultyDecision,
    FirstTokens,
    RouteDecision,
)


def shared_attempt(attempt: Attempt, names: SharedNames) -> Attempt:
    return Attempt(
        upstream=label(attempt.upstream),
        request_id=names.request_id(attempt.request_id),
        considered=tuple(map(_considered, attempt.considered)),
        begin_ns=attempt.begin_ns,
        end_ns=attempt.end_ns,
        status=attempt.status,
        first_byte_ns=attempt.first_byte_ns,
        error=word(attempt.error),
        num_events=attempt.num_events,
        knows_tokens=attempt.knows_tokens,
        nested=attempt.nested,
        nested_fault=LEFT_OUT if attempt.nested_fault else "",
        resumed_by=word(attempt.resumed_by),
        resumed_after=attempt.resumed_after,
        tied_to=names.request_id(attempt.tied_to),
        lost_tokens=attempt.lost_tokens,
        first_tokens=_first_tokens(attempt.first_tokens),
        affinity=_affinity(attempt.affinity),
    )


def shared_routing(routing: RouteDecision | None, names: SharedNames) -> RouteDecision | None:
    """Returns the decision without the headers that it looked at."""
    if routing is None:
        return None
    return RouteDecision(
        policy=label(routing.policy),
        rule=label(routing.rule),
        asked_model=names.model(routing.asked_model),
        model=names.model(routing.model),
        upstreams=tuple(map(label, routing.upstreams)),
        prompt_tokens=routing.prompt_tokens,
        difficulty=_difficulty(routing.difficulty),
    )


def _considered(one: Considered) -> Considered:
    return Considered(label(one.upstream), one.requests, one.tokens, one.rtt_ns, one.wait_ns)


def _affinity(decision: AffinityDecision | None) -> AffinityDecision | None:
    if decision is None:
        return None
    return AffinityDecision(
        result=word(decision.result),
        why=word(decision.why),
        upstream=label(decision.upstream),
        matched_bytes=decision.matched_bytes,
        shared_bytes=decision.shared_bytes,
        tokens=decision.tokens,
        cap_tokens=decision.cap_tokens,
    )


def _first_tokens(found: FirstTokens | None) -> FirstTokens | None:
    """Returns the verdict without the log-probability: by that, guesses of the prompt could be tried on the model."""
    if found is None:
        return None
    return FirstTokens(
        verdict=word(found.verdict),
        num_tokens=found.num_tokens,
        below=found.below,
        held_ns=found.held_ns,
        why=word(found.why),
    )


def _difficulty(decision: DifficultyDecision | None) -> DifficultyDecision | None:
    """Returns the choice without the score: by that, guesses of the text could be tried."""
    if decision is None:
        return None
    return DifficultyDecision(
        choice=word(decision.choice),
        labels=label(decision.labels),
        neighbours=decision.neighbours,
        threshold=decision.threshold,
    )
