"""The KV cache of another's server: too small for what runs, so that it throws requests out; or for what waits."""

from collections.abc import Sequence
from itertools import pairwise

from splittime.bench.book.records import Outcome
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.reported import Reported, inside, with_states
from splittime.diagnose.rules import reported_queue
from splittime.diagnose.rules.evidence import LIKELY, POSSIBLE, median, worst
from splittime.diagnose.rules.share import Share, ratio

FEW_AT_ONCE = 2.0  # requests of the longest kind in the whole cache


@rule("reported", root_of=("overload", "reported_queue", "reported_interference"))
def reported_kv(books: Books) -> Answer:
    """By another server's own count, the next prompt does not fit into what is free of its KV cache."""
    found = with_states(books)
    if not isinstance(found, Reported):
        return found
    if all(state.kv_usage is None for state in found.states):
        return Abstention(why=found.lacks("the use of its KV cache"))
    share = reported_queue.share_of(found, reported_queue.Held.KV)
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
    waiting = [state for state in found.states if state.waiting and reported_queue.is_full(found, state)]
    size, need = (
        found.kv_tokens,
        median(filter(None, (reported_queue.needed_tokens(found, state) for state in waiting))),
    )
    fits = "" if size is None or not need else f"; the next prompt needs {need:.0f} tokens of its {size:.0f}"
    return Finding(
        claim=f"{found.kind} says that requests wait in it for {share.value:.0%} of the time they spend there, while "
        f"its KV cache has no room for the next{fits}.",
        evidence=(
            Fact("KV cache, whole", "not told" if size is None else size, "tokens"),
            Fact("in use while they wait, median", reported_queue.used(waiting)),
            Fact("needed by the next in the queue, median", "not told" if need is None else need, "tokens"),
            Fact("samples with no room for it", f"{len(waiting)} of {len(found.states)}"),
            Fact("running at most", reported_queue.most(found.states), "requests"),
        ),
        request_ids=reported_queue.slow_to_begin(found.outcomes),
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
    if not isinstance(found, Reported):
        return found
    preemptions = found.grew(found.words.preemptions)
    if preemptions is None:
        return Abstention(why=found.lacks("how many requests it throws out of its KV cache"))
    if not reported_queue.is_preempting(found):
        return None
    full = [inside(s) if (s.kv_usage or 0.0) >= _nearly_full(found) else 0.0 for s in found.states]
    share = ratio(full, [inside(state) for state in found.states])
    if not share.is_worth_it:
        return share.unsure()
    return _preempted(found, preemptions, found.num_requests, share)


def _nearly_full(found: Reported) -> float:
    """Two blocks short of all: below, nobody is thrown out. Where blocks are not told, `FULL`."""
    size, block = found.kv_tokens, found.block_tokens
    return min(reported_queue.FULL, 1 - 2 * block / size) if size and block else reported_queue.FULL


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
