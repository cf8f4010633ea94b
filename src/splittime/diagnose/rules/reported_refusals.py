"""Another's server turns requests away at a bound of its own. Where those that it takes wait long, that is overload,
and right; where they hardly wait, the bound is too tight."""

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.reported import Reported
from splittime.diagnose.rules.client import sent
from splittime.diagnose.rules.evidence import LIKELY
from splittime.diagnose.rules.reported import asked
from splittime.diagnose.rules.reported_queue import most
from splittime.diagnose.rules.share import counted

MIN_REFUSED, REFUSED_SHARE = 5, 0.05  # of the requests: fewer harm few


@rule("reported", root_of=("overload",))
def reported_refusals(books: Books) -> Answer:
    """Another server turns requests away at a bound of its own, while those that it takes hardly wait."""
    found = asked(books, "reported_refusals")
    if not isinstance(found, Reported):
        return found
    refused, queue_s, e2e_s = (
        found.grew(found.words.refused),
        found.mean(found.words.queue_s),
        found.mean(found.words.e2e_s),
    )
    if refused is None:
        return Abstention("reported_refusals", found.lacks("how many it turns away"))
    of = refused + max(found.grew(found.words.requests) or 0.0, len(sent(books)) - refused)
    if refused < max(MIN_REFUSED, REFUSED_SHARE * of):
        return None
    if queue_s is None or e2e_s is None:
        return Abstention("reported_refusals", found.lacks("how long requests wait in its queue"))
    if queue_s * 2 > e2e_s:
        return None  # it refuses what it could not serve in time: `overload` tells that
    return _refusals(found, refused, of, queue_s)


def _refusals(found: Reported, refused: float, of: float, queue_s: float) -> Finding:
    share = counted(refused / of, int(refused), REFUSED_SHARE)
    top, waited = most(found.states), max((state.waiting or 0.0 for state in found.states), default=0.0)
    return Finding(
        name="reported_refusals",
        claim=f"{found.kind} turned {refused:.0f} of {of:.0f} requests away at its bound on the queue, while those "
        f"that it took waited {queue_s * 1e3:.0f} ms on average.",
        evidence=(
            Fact("turned away", refused, f"of {of:.0f} requests"),
            Fact("wait in its queue, mean", round(queue_s * 1e3, 1), "ms"),
            Fact("waiting and running at most, as sampled", f"{waited:.0f} and {top:.0f}"),
        ),
        request_ids=tuple(o.request_id for o in found.outcomes if o.status in (429, 503))[:5],
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY,
        confidence_from="its own counter of what it turned away, and its own histogram of waits; the share is of "
        "requests",
        cure=Cure(
            sentence=f"A larger bound on its queue ({found.words.queue_bound}), or more slots ({found.words.slots}): "
            "what waits so shortly can be served.",
            flags=(found.words.queue_bound, str(max(16, int(4 * max(top, waited))))),
            program=found.words.program,
        ),
        cost="Those that were turned away wait instead; at a rate that cannot be served the wait grows to the bound.",
        counter_check="With the larger bound as many are turned away, or the wait in its queue grows without an end.",
        regime="this rate and mix",
    )
