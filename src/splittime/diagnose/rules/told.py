"""What another server's own metrics give away: a queue inside it, a KV cache that is full, prefixes it does not find.

They are sampled from outside (`diagnose.told`): how much is known, why a request waited is not. By Little's law (1961)
the share of the requests' time that is spent waiting is the mean number waiting over the mean number in the server.
"""

from collections.abc import Sequence
from itertools import pairwise

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.client import of_outcomes, sent
from splittime.diagnose.rules.evidence import POSSIBLE, median, ms, worst
from splittime.diagnose.rules.overload import TREND_Z, growth
from splittime.diagnose.rules.share import Share, ratio
from splittime.diagnose.told import Told, told
from splittime.ledger.client_book import Ending, Outcome, Sample

MIN_STATES = 20  # samples; fewer are glimpses
FULL = 0.95  # of the KV cache
PLATEAU = 0.9  # of the most that ran at once
MIN_PREEMPTIONS = 5
PREEMPTED_SHARE = 0.05  # preemptions to a request: fewer harm few
EXPECTED_HITS = 0.2  # of the prompt tokens, or there is little to find
FOUND_HITS = 0.5  # of what was expected: a cache also evicts, and computes while others come


def _asked(books: Books, name: str) -> Told | Answer:
    """What was told, or why nothing can be said."""
    about = books.served
    if about is None or books.accounts:
        return None  # a server that keeps accounts is diagnosed by them
    found = told(books)
    if found is None:
        return Abstention(name, f"a server of kind {about.kind} tells nothing in words that are known here")
    return found


def _with_states(books: Books, name: str) -> Told | Answer:
    found = _asked(books, name)
    if isinstance(found, Told) and len(found.states) < MIN_STATES:
        why = f"only {len(found.states)} samples of how many requests wait in the server; {MIN_STATES} are the least"
        hint = f" (does it show its metrics? {found.words.flag_metrics})" if not found.states else ""
        return Abstention(name, why + hint)
    return found


def _inside(state: Sample) -> float:
    return (state.waiting or 0.0) + (state.running or 0.0)


@rule("run")
def told_queue(books: Books) -> Answer:
    """By another server's own count, requests wait inside it."""
    found = _with_states(books, "told_queue")
    if not isinstance(found, Told):
        return found
    share = ratio([s.waiting or 0.0 for s in found.states], [_inside(s) for s in found.states])
    return _queue(found, share, books) if share.is_worth_it else share.unsure("told_queue")


def _queue(found: Told, share: Share, books: Books) -> Finding:
    waiting = [state for state in found.states if state.waiting]
    counts = [state.waiting or 0.0 for state in found.states]
    trend = growth([(state.at_ns, state.waiting or 0.0) for state in found.states])
    grows = trend is not None and trend[0] >= TREND_Z
    why, flag = _held_by(found, waiting)
    return Finding(
        name="told_queue",
        claim=f"{found.kind} says that requests wait in it: {sum(counts) / len(counts):.1f} at a time on average, up "
        f"to {max(counts):.0f}, {share.value:.0%} of the time they spend in it{', and more and more' * grows}.",
        evidence=(
            Fact("samples with a queue", f"{len(waiting)} of {len(found.states)}"),
            Fact("running at most", max(state.running or 0.0 for state in found.states), "requests"),
            Fact("KV cache in use while they wait, median", _percent(waiting)),
            Fact("Mann-Kendall z of the queue over time", round(trend[0], 2) if trend else "not told"),
        ),
        request_ids=_slow_to_begin(sent(books)),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=POSSIBLE,
        confidence_from="the server's own gauges, sampled, and Little's law; why each one waited it does not tell",
        cure=Cure(sentence=why, elsewhere={found.kind: flag}),
        cost="A larger batch lengthens each token's time; a slower rate or another server costs what it costs.",
        counter_check="With the change and the same load the server's own count of waiting requests stays.",
        regime="this rate and mix; the queue of other clients of the same server is in it too",
    )


def _held_by(found: Told, waiting: Sequence[Sample]) -> tuple[str, str]:
    """What the gauges make likely, as a prescription, and its flag."""
    usage = median(state.kv_usage for state in waiting if state.kv_usage is not None)
    if usage is not None and usage >= FULL:
        return f"Its KV cache is full while they wait: more memory for it ({found.words.flag_memory}).", (
            found.words.flag_memory
        )
    most = max((state.running or 0.0 for state in found.states), default=0.0)
    at_most = sum((state.running or 0.0) >= PLATEAU * most for state in waiting) / max(1, len(waiting))
    if most and at_most >= PLATEAU:
        sentence = f"It runs no more than {most:.0f} at once while others wait: more slots ({found.words.flag_slots})."
        return sentence, found.words.flag_slots
    return "Lower the rate, or add a server: neither slots nor KV memory is what its gauges show as full.", "a replica"


def _percent(states: Sequence[Sample]) -> str:
    usage = median(state.kv_usage for state in states if state.kv_usage is not None)
    return "not told" if usage is None else f"{usage:.0%}"


def _slow_to_begin(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    return worst({o.request_id: o.chunk_ns[0] - o.intended_ns for o in outcomes if o.chunk_ns})


@rule("run", root_of=("overload", "told_queue"))
def told_preemptions(books: Books) -> Answer:
    """By another server's own count, its KV cache is full and running requests are thrown out of it."""
    found = _with_states(books, "told_preemptions")
    if not isinstance(found, Told):
        return found
    if found.preemptions is None:
        why = "was restarted during the run" if found.is_restarted else "tells no number of preemptions"
        return Abstention("told_preemptions", f"{found.kind} {why}")
    requests = len(sent(books))
    if found.preemptions < max(MIN_PREEMPTIONS, PREEMPTED_SHARE * requests):
        return None
    full = [_inside(state) if (state.kv_usage or 0.0) >= FULL else 0.0 for state in found.states]
    share = ratio(full, [_inside(state) for state in found.states])
    return _preempted(found, share, books) if share.is_worth_it else share.unsure("told_preemptions")


def _preempted(found: Told, share: Share, books: Books) -> Finding:
    used = [state.kv_usage for state in found.states if state.kv_usage is not None]
    return Finding(
        name="told_preemptions",
        claim=f"{found.kind} threw requests out of its KV cache {found.preemptions:.0f} times; for {share.value:.0%} "
        "of the time that requests spent in it the cache was full.",
        evidence=(
            Fact("preemptions", found.preemptions or 0, f"over {len(sent(books))} requests"),
            Fact("KV cache in use, median and most", f"{median(used) or 0:.0%} and {max(used):.0%}"),
        ),
        request_ids=_stalled(sent(books)),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=POSSIBLE,
        confidence_from="its own counter and gauge; which requests lost how much by it they do not tell, so the share "
        "is of the time in which it can have happened",
        cure=Cure(
            sentence=f"More memory for its KV cache ({found.words.flag_memory}), or fewer at once "
            f"({found.words.flag_slots}).",
            elsewhere={found.kind: f"{found.words.flag_memory}, {found.words.flag_slots}"},
        ),
        cost="Memory; or, with fewer at once, a longer wait before the start, which throws no work away.",
        counter_check="With either change and the same load the preemptions stay, or E2E p99 does not fall.",
        regime="answers that outgrow the cache together",
    )


def _stalled(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Those with the longest gaps between chunks: where a preemption would show."""
    return worst({o.request_id: max((b - a for a, b in pairwise(o.chunk_ns)), default=0) for o in outcomes})


@rule("run", root_of=("overload", "told_queue"))
def told_prefix_misses(books: Books) -> Answer:
    """Prompts were made to share their beginnings, and another server's cache hardly finds them."""
    found = _asked(books, "told_prefix_misses")
    if not isinstance(found, Told):
        return found
    whole = [o for o in sent(books) if o.ending is Ending.COMPLETE and o.chunk_ns and o.expected_cached_tokens]
    expected = sum(o.expected_cached_tokens or 0 for o in whole)
    if expected < EXPECTED_HITS * sum(_prompt_tokens(o) for o in sent(books)) or not expected:
        return None
    hits = found.hit_tokens if found.hit_tokens is not None else _hits_of_answers(whole)
    if hits is None:
        why = "was restarted during the run" if found.is_restarted else "tells no prefix hits"
        return Abstention("told_prefix_misses", f"{found.kind} {why}")
    if hits >= FOUND_HITS * expected:
        return None
    lost_ns = _lost_to_misses(found, whole, 1 - hits / expected)
    share = of_outcomes(lost_ns, sent(books))
    if not share.is_worth_it:
        return share.unsure("told_prefix_misses")
    return _missed(found, expected, hits, lost_ns, share)


def _prompt_tokens(outcome: Outcome) -> int:
    return outcome.prompt_tokens or outcome.expected_prompt_tokens or 0


def _hits_of_answers(outcomes: Sequence[Outcome]) -> float | None:
    """As the answers' usage says."""
    told_hits = [o.cached_tokens for o in outcomes if o.cached_tokens is not None]
    return float(sum(told_hits)) if told_hits else None


def _lost_to_misses(found: Told, outcomes: Sequence[Outcome], missed: float) -> dict[str, float]:
    """At most: the share of the prompt that was computed in vain, of the time to the first chunk, or of as much of it
    as the server says that prefills took."""
    first_ns = {o.request_id: o.chunk_ns[0] - (o.sent_ns or o.intended_ns) for o in outcomes}
    of_prefill = min(1.0, (found.prefill_s or 0.0) * 1e9 / max(1, sum(first_ns.values()))) if found.prefill_s else 1.0
    return {
        o.request_id: first_ns[o.request_id]
        * of_prefill
        * min(1.0, missed * (o.expected_cached_tokens or 0) / max(1, _prompt_tokens(o)))
        for o in outcomes
    }


def _missed(found: Told, expected: float, hits: float, lost_ns: dict[str, float], share: Share) -> Finding:
    return Finding(
        name="told_prefix_misses",
        claim=f"Of {expected:.0f} prompt tokens that begin like earlier prompts {found.kind} found {hits:.0f} in its "
        f"prefix cache: at most {share.value:.0%} of the time that was felt went into computing the others again.",
        evidence=(
            Fact("could have come from a prefix cache", expected, "tokens"),
            Fact("did", hits, "tokens"),
            Fact("time to first chunks that went into them, at most", ms(sum(lost_ns.values())), "ms"),
        ),
        request_ids=worst(lost_ns),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=POSSIBLE,
        confidence_from="the prompts of the schedule against the server's own count; "
        + ("the time from its prefill histogram" if found.prefill_s else "the queue is in the time to the first chunk"),
        cure=Cure(
            sentence=f"Turn its prefix cache on ({found.words.flag_prefixes}), or give it more memory "
            f"({found.words.flag_memory}).",
            elsewhere={found.kind: found.words.flag_prefixes},
        ),
        cost="Cached blocks are given up when room is needed; little else.",
        counter_check="With the cache on and the same schedule its hits do not reach half of what was expected.",
        regime="prompts that share their beginning and come while it is still kept",
    )
