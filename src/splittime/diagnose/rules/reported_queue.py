"""Requests wait inside another's server, by its own count; and for what, as far as its gauges tell.

The queue is laid to one cause only (`cause_of`), so that no two findings explain the same wait differently:

    KV       what is free in its cache is less than the next prompt needs (it admits a prompt whole), or none is free,
             for most of the wait; or it throws requests out
    budget   prompts are cut into many small steps (`reported_prompts.small_steps`)
    slots    it runs as many as it ever ran, or one less: the gauge is read after a step's finished requests have left
    own      something of their own (a grammar, an adapter, a transfer), where the server counts those apart
    unknown  none of these

Where another's server turns requests away at a bound of its own and those that it takes wait long, that is overload,
and right; where they hardly wait, the bound is too tight (`reported_refusals`).

The KV cache of another's server: too small for what runs, so that it throws requests out; or for what waits.
"""

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from math import ceil, log2

from splittime.bench.book.records import Outcome, Sample
from splittime.diagnose.books import Books
from splittime.diagnose.chunks import gain_of_more, split
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.reported import Reported, asked, inside, with_states
from splittime.diagnose.rules.admission import TREND_Z, growth
from splittime.diagnose.rules.client import sent
from splittime.diagnose.rules.evidence import LIKELY, POSSIBLE, Share, counted, median, ratio, worst
from splittime.diagnose.rules.reported_prompts import prefill_ns, small_steps

FULL = 0.95  # of the KV cache
MOSTLY = 0.5  # of the wait
MIN_PREEMPTIONS, PREEMPTED_SHARE = 5, 0.05  # to a request: fewer harm few
AT_MOST, NEAR_MOST = 0.5, 0.8  # of the samples with a queue: at the most that ever ran; at that or one less
LITTLE_GAIN = 1.25  # twice the slots would serve less than a quarter more: the machine is full, not the slots
ENOUGH_SLOTS = 16  # to ask for at once, if not twice as many


class Held(StrEnum):
    KV = "KV memory"
    BUDGET = "the token budget"
    SLOTS = "slots"
    OWN = "something of their own"
    UNKNOWN = "unknown"


def cause_of(found: Reported) -> Held | None:
    """What the queue waits for; None where there is none."""
    waiting = [state for state in found.states if state.waiting]
    total = sum(state.waiting or 0.0 for state in waiting)
    if not total:
        return None
    if sum(state.deferred or 0.0 for state in waiting) >= MOSTLY * total:
        return Held.OWN
    full = sum(state.waiting or 0.0 for state in waiting if is_full(found, state))
    if full and (full >= MOSTLY * total or is_preempting(found)):
        return Held.KV
    if small_steps(found) is not None:
        return Held.BUDGET
    return Held.SLOTS if _is_plateau(waiting) else Held.UNKNOWN


def share_of(found: Reported, cause: Held) -> Share:
    """Returns the share of the requests' time in the server that they wait for this."""
    is_it = cause_of(found) is cause
    return ratio([(s.waiting or 0.0) * is_it for s in found.states], [inside(state) for state in found.states])


def is_preempting(found: Reported) -> bool:
    """More than happens to a healthy server now and then."""
    preemptions = found.grew(found.words.preemptions) or 0.0
    return preemptions >= max(MIN_PREEMPTIONS, PREEMPTED_SHARE * found.num_requests)


def is_full(found: Reported, state: Sample) -> bool:
    if state.kv_usage is None:
        return False
    if state.kv_usage >= FULL:
        return True
    need, size = needed_tokens(found, state), found.kv_tokens
    return need is not None and size is not None and (1 - state.kv_usage) * size < need


def needed_tokens(found: Reported, state: Sample) -> float | None:
    """What the next one in the queue needs, in whole blocks: its prompt, by the client's book; else the mean prompt."""
    waiting = int(state.waiting or 0)
    pending = sorted((o for o in found.outcomes if _is_pending(o, state.at_ns)), key=lambda o: o.sent_ns or 0)
    next_ones = pending[-min(waiting, len(pending)) :][:1] if waiting and pending else []
    prompts = [o.prompt_tokens or o.expected_prompt_tokens or 0 for o in next_ones or found.outcomes]
    tokens: float | None = sum(prompts) / len(prompts) if any(prompts) else None
    if tokens is None:
        grew = found.grew(found.words.prompts)
        tokens = grew / found.num_requests if grew and found.num_requests else None
    block = found.block_tokens or 1
    return None if tokens is None else ceil(tokens / block) * block


def _is_pending(outcome: Outcome, at_ns: int) -> bool:
    if outcome.sent_ns is None or outcome.sent_ns > at_ns or (outcome.end_ns or at_ns) < at_ns:
        return False
    return not outcome.chunk_ns or outcome.chunk_ns[0] > at_ns


def most(states: Sequence[Sample]) -> float:
    return max((state.running or 0.0 for state in states), default=0.0)


def _is_plateau(waiting: Sequence[Sample]) -> bool:
    top = most(waiting)
    at = sum((s.running or 0.0) >= top for s in waiting)
    near = sum((s.running or 0.0) >= top - 1 for s in waiting)
    return bool(top) and at >= AT_MOST * len(waiting) * (top <= 2) and near >= NEAR_MOST * len(waiting)


@rule("reported", root_of=("overload", "reported_queue"))
def reported_slots(books: Books) -> Answer:
    """By another server's own count, requests wait while it runs as many at once as it may."""
    found = with_states(books)
    share = share_of(found, Held.SLOTS).require()
    top = most(found.states)
    gaps = split(found.outcomes, prefill_ns(found) or 0.0)
    gain = gain_of_more(gaps.quiet, found.outcomes, top)
    return _slots(found, share, top, gain)


def _slots(found: Reported, share: Share, top: float, gain: float | None) -> Finding:
    is_full = gain is not None and gain < LITTLE_GAIN
    told_gain = "not told: the number of streams hardly changed" if gain is None else f"{gain - 1:+.0%}"
    mean_waiting = sum(state.waiting or 0.0 for state in found.states) / len(found.states)
    wanted = 2 ** ceil(log2(max(2 * top, top + mean_waiting)))
    more = min(wanted, max(ENOUGH_SLOTS, int(2 * top)))
    sentence = (
        f"More slots ({found.words.slots}) would hardly serve more: its steps grow with what runs in them."
        if is_full
        else f"It runs no more than {top:.0f} at once while others wait: more slots ({found.words.slots} {more})."
    )
    return _queue_finding(
        found,
        share,
        f"it runs {top:.0f} at once and never more",
        Cure(sentence=sentence, flags=() if is_full else (found.words.slots, str(more)), program=found.words.program),
        (Fact("twice as many at once would serve", told_gain),),
        LIKELY,
        is_limit=is_full,
    )


@rule("reported")
def reported_queue(books: Books) -> Answer:
    """By another server's own count, requests wait inside it, and neither slots nor KV memory explain it."""
    found = with_states(books)
    own, unknown = share_of(found, Held.OWN), share_of(found, Held.UNKNOWN)
    share = max(own, unknown, key=lambda one: one.value).require()
    if share is own:
        claim = "most for something of their own: a grammar that is compiled, an adapter, a transfer of their KV"
        sentence = "Ask for fewer different grammars or adapters; neither slots nor memory would let them in sooner."
        return _queue_finding(found, share, claim, Cure(sentence=sentence))
    has_gauge = any(state.kv_usage is not None for state in found.states)
    kv = "" if has_gauge else f" ({found.lacks('the use of its cache')})"
    cure = Cure(sentence="Lower the rate, or add a server: its gauges show no limit that a setting would lift.")
    claim = f"it does not run as many as it did at other times, and its KV cache is not known to be full{kv}"
    return _queue_finding(found, share, claim, cure)


def _queue_finding(
    found: Reported,
    share: Share,
    why: str,
    cure: Cure,
    facts: tuple[Fact, ...] = (),
    confidence: float = POSSIBLE,
    is_limit: bool = False,
) -> Finding:
    waiting = [state for state in found.states if state.waiting]
    counts = [state.waiting or 0.0 for state in found.states]
    trend = growth([(state.at_ns, state.waiting or 0.0) for state in found.states])
    grows = trend is not None and trend[0] >= TREND_Z
    return Finding(
        claim=f"{found.kind} says that requests wait in it: {sum(counts) / len(counts):.1f} at a time on average, up "
        f"to {max(counts):.0f}, {share.value:.0%} of the time they spend in it{', and more and more' * grows}; {why}.",
        evidence=(
            Fact("samples with a queue", f"{len(waiting)} of {len(found.states)}"),
            Fact("running at most", most(found.states), "requests"),
            Fact("KV cache in use while they wait, median", used(waiting)),
            Fact("Mann-Kendall z of the queue over time", round(trend[0], 2) if trend else "not told"),
            *facts,
        ),
        request_ids=slow_to_begin(found.outcomes),
        **share.as_fields,
        confidence=confidence,
        confidence_from="the server's own gauges, sampled, and Little's law; why each one waited it does not tell",
        cure=cure,
        cost="A larger batch lengthens each token's time; a slower rate or another server costs what it costs.",
        counter_check="With the change and the same load the server's own count of waiting requests stays.",
        regime="this rate and mix; the queue of other clients of the same server is in it too",
        is_limit=is_limit,
    )


def used(states: Sequence[Sample]) -> str:
    usage = median(state.kv_usage for state in states if state.kv_usage is not None)
    return "not told" if usage is None else f"{usage:.0%}"


def slow_to_begin(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    return worst({o.request_id: o.chunk_ns[0] - o.intended_ns for o in outcomes if o.chunk_ns})


MIN_REFUSED, REFUSED_SHARE = 5, 0.05  # of the requests: fewer harm few


@rule("reported", root_of=("overload",))
def reported_refusals(books: Books) -> Answer:
    """Another server turns requests away at a bound of its own, while those that it takes hardly wait."""
    found = asked(books)
    refused, queue_s, e2e_s = (
        found.grew(found.words.refused),
        found.mean(found.words.queue_s),
        found.mean(found.words.e2e_s),
    )
    if refused is None:
        return Abstention(why=found.lacks("how many it turns away"))
    of = refused + max(found.grew(found.words.requests) or 0.0, len(sent(books)) - refused)
    if refused < max(MIN_REFUSED, REFUSED_SHARE * of):
        return None
    if queue_s is None or e2e_s is None:
        return Abstention(why=found.lacks("how long requests wait in its queue"))
    if queue_s * 2 > e2e_s:
        return None  # it refuses what it could not serve in time: `overload` tells that
    return _refusals(found, refused, of, queue_s)


def _refusals(found: Reported, refused: float, of: float, queue_s: float) -> Finding:
    share = counted(refused / of, int(refused), REFUSED_SHARE)
    top, waited = most(found.states), max((state.waiting or 0.0 for state in found.states), default=0.0)
    return Finding(
        claim=f"{found.kind} turned {refused:.0f} of {of:.0f} requests away at its bound on the queue, while those "
        f"that it took waited {queue_s * 1e3:.0f} ms on average.",
        evidence=(
            Fact("turned away", refused, f"of {of:.0f} requests"),
            Fact("wait in its queue, mean", round(queue_s * 1e3, 1), "ms"),
            Fact("waiting and running at most, as sampled", f"{waited:.0f} and {top:.0f}"),
        ),
        request_ids=tuple(o.request_id for o in found.outcomes if o.status in (429, 503))[:5],
        **share.as_fields,
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


FEW_AT_ONCE = 2.0  # requests of the longest kind in the whole cache


@rule("reported", root_of=("overload", "reported_queue", "reported_interference"))
def reported_kv(books: Books) -> Answer:
    """By another server's own count, the next prompt does not fit into what is free of its KV cache."""
    found = with_states(books)
    if all(state.kv_usage is None for state in found.states):
        return Abstention(why=found.lacks("the use of its KV cache"))
    share = share_of(found, Held.KV)
    if share.is_worth_it:
        return _full(found, share)
    longest = books.served.max_model_len if books.served is not None else None
    if found.look and found.kv_tokens and longest and found.kv_tokens < FEW_AT_ONCE * longest:
        return _small(found, found.kv_tokens, longest)
    return share.unsure()


def _small(found: Reported, size: int, longest: int) -> Finding:
    """A limit, since prompts of that length did not come."""
    return Finding(
        claim=f"The whole KV cache of {found.kind} holds {size} tokens: {size / longest:.1f} requests of {longest}, "
        "the longest that it takes.",
        evidence=(Fact("KV cache, whole", size, "tokens"), Fact("longest request", longest, "tokens")),
        share_of_time=0.0,
        confidence=LIKELY,
        confidence_from="its own settings; what your requests need only a run of them tells",
        cure=Cure(sentence=f"If long requests come, more memory: {found.memory_flag}.", program=found.words.program),
        cost="Memory.",
        counter_check="With your own load no request waits while the cache is full.",
        regime="long requests, several at once",
        is_limit=True,
    )


def _full(found: Reported, share: Share) -> Finding:
    waiting = [state for state in found.states if state.waiting and is_full(found, state)]
    size, need = (found.kv_tokens, median(filter(None, (needed_tokens(found, state) for state in waiting))))
    fits = "" if size is None or not need else f"; the next prompt needs {need:.0f} tokens of its {size:.0f}"
    return Finding(
        claim=f"{found.kind} says that requests wait in it for {share.value:.0%} of the time they spend there, while "
        f"its KV cache has no room for the next{fits}.",
        evidence=(
            Fact("KV cache, whole", "not told" if size is None else size, "tokens"),
            Fact("in use while they wait, median", used(waiting)),
            Fact("needed by the next in the queue, median", "not told" if need is None else need, "tokens"),
            Fact("samples with no room for it", f"{len(waiting)} of {len(found.states)}"),
            Fact("running at most", most(found.states), "requests"),
        ),
        request_ids=slow_to_begin(found.outcomes),
        **share.as_fields,
        confidence=LIKELY if size is not None and need else POSSIBLE,
        confidence_from="its gauge and the size that it tells, against the prompts that were waiting"
        if size is not None
        else "its gauge alone: it does not publish how many tokens its cache holds",
        cure=Cure(sentence=f"More memory for its KV cache: {found.memory_flag}.", program=found.words.program),
        cost="Memory; with a smaller cache type, what that costs in accuracy.",
        counter_check="With twice the cache and the same load its own count of waiting requests stays.",
        regime="prompts of these lengths, at this rate; what is cached and could be given up does not count as used",
    )


@rule("reported", root_of=("overload", "reported_queue", "reported_kv", "reported_interference"))
def reported_preemptions(books: Books) -> Answer:
    """By another server's own count, its KV cache is full and running requests are thrown out of it."""
    found = with_states(books)
    preemptions = found.grew(found.words.preemptions)
    if preemptions is None:
        return Abstention(why=found.lacks("how many requests it throws out of its KV cache"))
    if not is_preempting(found):
        return None
    full = [inside(s) if (s.kv_usage or 0.0) >= _nearly_full(found) else 0.0 for s in found.states]
    share = ratio(full, [inside(state) for state in found.states]).require()
    return _preempted(found, preemptions, found.num_requests, share)


def _nearly_full(found: Reported) -> float:
    """Two blocks short of all: below, nobody is thrown out. Where blocks are not told, `FULL`."""
    size, block = found.kv_tokens, found.block_tokens
    return min(FULL, 1 - 2 * block / size) if size and block else FULL


def _preempted(found: Reported, preemptions: float, requests: float, share: Share) -> Finding:
    usage = [state.kv_usage for state in found.states if state.kv_usage is not None]
    return Finding(
        claim=f"{found.kind} threw requests out of its KV cache {preemptions:.0f} times; for {share.value:.0%} "
        "of the time that requests spent in it the cache was full.",
        evidence=(
            Fact("preemptions", preemptions, f"over {requests:.0f} requests"),
            Fact("KV cache in use, median and most", f"{median(usage) or 0:.0%} and {max(usage, default=0.0):.0%}"),
            Fact("KV cache, whole", "not told" if found.kv_tokens is None else found.kv_tokens, "tokens"),
        ),
        request_ids=_stalled(found.outcomes),
        **share.as_fields,
        confidence=POSSIBLE,
        confidence_from="its own counter and gauge; which requests lost how much by it they do not tell, so the share "
        "is of the time in which it can have happened",
        cure=Cure(
            sentence=f"More memory for its KV cache ({found.memory_flag}), or fewer at once ({found.words.slots}).",
            program=found.words.program,
        ),
        cost="Memory; or, with fewer at once, a longer wait before the start, which throws no work away.",
        counter_check="With either change and the same load the preemptions stay, or E2E p99 does not fall.",
        regime="answers that outgrow the cache together",
    )


def _stalled(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """The requests with the longest gaps between chunks: where a preemption would show."""
    return worst({o.request_id: max((b - a for a, b in pairwise(o.chunk_ns)), default=0) for o in outcomes})
