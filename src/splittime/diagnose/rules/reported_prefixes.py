"""Prompts share their beginnings, and another's server computes these again."""

from collections.abc import Sequence

from splittime.bench.book.records import Ending, Outcome
from splittime.diagnose.books import Books
from splittime.diagnose.chunks import split, stalled_ns
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.reported import Reported, asked
from splittime.diagnose.rules.client import of_outcomes
from splittime.diagnose.rules.evidence import CERTAIN, POSSIBLE, Share, counted, ms, worst
from splittime.diagnose.rules.reported_prompts import prefill_ns
from splittime.diagnose.rules.reported_queue import Held, share_of

EXPECTED_HITS = 0.2  # of the prompt tokens, or there is little to find
FOUND_HITS = 0.5  # of what was expected: a cache also evicts, and computes while others come


@rule(
    "reported",
    root_of=("overload", "reported_queue", "reported_slots", "reported_kv", "reported_interference", "reported_budget"),
)
def reported_prefix_misses(books: Books) -> Answer:
    """Prompts were made to share their beginnings, and another server's cache is off, or hardly finds them."""
    found = asked(books)
    assert books.run is not None
    whole = [o for o in found.outcomes if o.ending is Ending.COMPLETE and o.chunk_ns]
    shared = _shared(whole, found, float(books.run.settings.get("prefix_share") or 0.0))
    if shared is None:
        return _unknown(found)
    expected = sum(shared.values())
    if expected < EXPECTED_HITS * sum(map(_prompt_tokens, whole)) or not expected:
        return None
    hits = _hits(found, whole)
    if hits is None:
        return Abstention(why=found.lacks("how many prompt tokens come from its prefix cache"))
    if hits >= FOUND_HITS * expected:
        return None
    lost_ns = _lost_to_misses(found, whole, shared, 1 - hits / expected)
    share = of_outcomes(lost_ns, found.outcomes)
    if share.is_worth_it:
        return _missed(found, expected, hits, lost_ns, share)
    return share.unsure() or (_off(found) if found.is_cache_on is False else None)


def _unknown(found: Reported) -> Answer:
    """What can be said without knowing the prompts: nothing of a cache that is on, and a limit for one that is off."""
    if found.is_cache_on:
        return None
    if found.is_cache_on is False:
        return _off(found)
    why = f"cannot tell: {found.kind} does not publish whether its prefix cache is on, and whether these prompts share"
    return Abstention(why=f"{why} their beginnings is not known here")


def _off(found: Reported) -> Finding:
    """A limit, unless requests queue and nothing else is full: computing prompts may then be all that it does."""
    flag = found.words.prefixes
    queue = share_of(found, Held.UNKNOWN)
    takes_s = (found.mean(found.words.prefill_s) or 0.0) + (found.mean(found.words.queue_s) or 0.0)
    share = counted(min(1.0, takes_s / (found.mean(found.words.e2e_s) or 1.0)), int(found.num_requests))
    return Finding(
        claim=f"The prefix cache of {found.kind} is off, and {share.value:.0%} of the requests' time passes until "
        "their prompts are computed: so much at most would be saved, if they share their beginnings, which is unknown.",
        evidence=(
            Fact("prefix cache", "off"),
            Fact("a prompt takes, mean", round(1e3 * (found.mean(found.words.prefill_s) or 0.0), 1), "ms"),
        ),
        **share.as_fields,
        confidence=POSSIBLE,
        confidence_from="its own setting and histograms; which prompts share their beginnings it does not publish",
        cure=Cure(
            sentence=f"If prompts share their beginnings, turn it on ({flag}).",
            flags=(flag,) if flag.startswith("--") else (),
            program=found.words.program,
        ),
        cost="Cached blocks are given up when room is needed; little else.",
        counter_check="With the cache on its hits stay near nothing.",
        regime="prompts that share their beginning and come while it is still kept",
        is_limit=not queue.is_worth_it,
    )


def _shared(outcomes: Sequence[Outcome], found: Reported, prefix_share: float) -> dict[str, float] | None:
    """By request, the prompt tokens that came before it: as the schedule worked them out, or else by the share that it
    was asked for, in whole blocks. None where neither is known."""
    if outcomes and all(o.expected_cached_tokens is not None for o in outcomes):
        return {o.request_id: float(o.expected_cached_tokens or 0) for o in outcomes}
    if not prefix_share:
        return None
    block = found.block_tokens or 1
    later = sorted(outcomes, key=lambda outcome: outcome.sent_ns or 0)[1:]
    return {o.request_id: float(int(prefix_share * _prompt_tokens(o)) // block * block) for o in later}


def _prompt_tokens(outcome: Outcome) -> int:
    return outcome.prompt_tokens or outcome.expected_prompt_tokens or 0


def _hits(found: Reported, outcomes: Sequence[Outcome]) -> float | None:
    """Returns the share of hits by the server's counter, or else by its answers' usage; 0 where the cache is off."""
    if found.is_cache_on is False:
        return 0.0
    hits = found.grew(found.words.hits)
    told_hits = [o.cached_tokens for o in outcomes if o.cached_tokens is not None]
    return float(sum(told_hits)) if hits is None and told_hits else hits


def _lost_to_misses(
    found: Reported, outcomes: Sequence[Outcome], shared: dict[str, float], missed: float
) -> dict[str, float]:
    """At most: of the prompt's own computation, and of the time that the stream stood still beside others', as large a
    share as was computed in vain. How long a prompt takes is the server's, or else the time to the first chunk."""
    takes_ns = prefill_ns(found)
    stalls = stalled_ns(split(outcomes, takes_ns)) if takes_ns is not None else {}
    lost = {}
    for o in outcomes:
        first_ns = float(o.chunk_ns[0] - (o.sent_ns or o.intended_ns))
        own_ns = first_ns if takes_ns is None else min(first_ns, takes_ns)
        in_vain = min(1.0, missed * shared.get(o.request_id, 0.0) / max(1, _prompt_tokens(o)))
        lost[o.request_id] = in_vain * (own_ns + stalls.get(o.request_id, 0.0))
    return lost


def _missed(found: Reported, expected: float, hits: float, lost_ns: dict[str, float], share: Share) -> Finding:
    is_off = found.is_cache_on is False
    how = "its prefix cache is off" if is_off else f"it found {hits:.0f} in its prefix cache"
    flag = found.words.prefixes
    more = "" if is_off else f", or give it more memory ({found.memory_flag})"
    return Finding(
        claim=f"{expected:.0f} prompt tokens begin like earlier prompts of {found.kind}, and {how}: at most "
        f"{share.value:.0%} of the time that was felt went into computing them again.",
        evidence=(
            Fact("could have come from a prefix cache", expected, "tokens"),
            Fact("did", hits, "tokens"),
            Fact("prefix cache", "off" if is_off else "on" if found.is_cache_on else "not told"),
            Fact("time that went into them, at most", ms(sum(lost_ns.values())), "ms"),
        ),
        request_ids=worst(lost_ns),
        **share.as_fields,
        confidence=CERTAIN if is_off else POSSIBLE,
        confidence_from="the prompts of the schedule against "
        + ("its own setting" if is_off else "the server's own count")
        + ("; the time is from its prefill histogram" if found.words.prefill_s else "; the queue is in the time"),
        cure=Cure(
            sentence=f"Turn its prefix cache on ({flag}){more}.",
            flags=(flag,) if is_off and flag.startswith("--") else (),
            program=found.words.program,
        ),
        cost="Cached blocks are given up when room is needed; little else.",
        counter_check="With the cache on and the same schedule its hits do not reach half of what was expected.",
        regime="prompts that share their beginning and come while it is still kept",
    )
