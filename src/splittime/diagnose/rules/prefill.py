"""Prompts that wait to be computed: for the token budget of a step, or behind a long prompt that has it.

Steps can be too small for prompts: these wait, or are cut into so many chunks that what each step takes whatever is in
it is paid again and again.

Decoding that stands still for others' prompts.

A step with prompts is charged to them only for what its device took beyond the decode rows' usual time, and after what
kept the engine from running (`diagnose.timeline`); pauses, host gaps and waits with a cause are others'.

How long is too long, nobody can say but who asked: an SLO of the run, or else our server, which makes its own steps
`PREFILL_SLICE_NS` long. Another one makes them of any length, so there it is what a reader feels. Shorter gaps are
bought with later first tokens, and a cure tells both.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from splittime.bench.book.slo import check_slo
from splittime.core.facts import PREFILL_SLICE_NS
from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    Share,
    Span,
    median,
    ms,
    num_requests,
    of_requests,
    overlap_ns,
    served,
    setting,
    slowest_steps,
    union,
    worst,
)
from splittime.diagnose.timeline import Part, timeline
from splittime.diagnose.unexplained import MAX_UNEXPLAINED
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount, StageInterval
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord

GAPS = ("itl", "chunk_gap", "token_gap", "max_stall")  # terms of an SLO that bound them; TPOT is a mean over many
BEYOND = 1.5  # times what our steps are made for: a start may be off by less
FELT_NS, UNFELT_NS = 50_000_000, 40_000_000  # a reader takes 20 tokens a second or more for a steady flow
STALL_TIMES = 4.0  # and it must stand out from the ordinary step
MIN_STALLED_STEPS = 5  # fewer are a few odd moments, however many requests were held in them
LONGEST_TIMES = 2.0  # a step with prompts takes so many times one without, where that takes as long by itself
LEAST_CHUNK = 16  # tokens, the server's own minimum


class Stalls(NamedTuple):
    """Steps whose prompts held others up long enough to be felt.

    quiet_ns: the median step without prompts. bar: how long is too long, and by what. over_ns: by step, what its
    prompts took. lost_ns: by request, the same of the steps that made one of its tokens after the first.
    """

    quiet_ns: float
    bar: tuple[float, str]
    over_ns: dict[int, float]
    lost_ns: dict[str, float]


@rule("accounts", "steps", explains=(Computed.OTHERS_PROMPTS,))
def prefill_interference(books: Books) -> Answer:
    """Decoding requests stand still while a step computes others' prompts, long enough to be felt."""
    accounts = served(books.accounts)
    stalls = None if _is_slo_kept(books) else _stalls(books, accounts)
    if stalls is None or len(stalls.over_ns) < MIN_STALLED_STEPS:
        return _unjudged(books)
    share = of_requests(stalls.lost_ns, accounts)
    return _interference(books, stalls, share) if share.is_worth_it else share.unsure() or _unjudged(books)


def _unjudged(books: Books) -> Abstention | None:
    """Say where much of the time is others' prompts, in steps that nobody asked to be shorter."""
    share = attribution(books).share(Computed.OTHERS_PROMPTS)
    if _asked(books) or share < MAX_UNEXPLAINED:
        return None
    lengths = [step.length_ns for step in books.steps if step.prefill_tokens]
    steps = f"steps of {ms(median(lengths) or 0):.0f} ms (median) by the default"
    return Abstention(
        why=f"{share:.0%} of the requests' time is others' prompts, in {steps}: give an SLO to judge them"
    )


def _stalls(books: Books, accounts: Sequence[ClosedAccount]) -> Stalls | None:
    """None without steps to compare with."""
    quiet_ns = median(step.length_ns for step in books.steps if not step.prefill_tokens)
    if quiet_ns is None:
        return None
    bar = _bound(books, FELT_NS if books.engine else BEYOND * PREFILL_SLICE_NS, STALL_TIMES, quiet_ns)
    taken = zip(books.steps, timeline(books).by_step[:, Part.PROMPTS], strict=True)
    over_ns = {step.step_id: float(ns) for step, ns in taken if ns + quiet_ns >= bar[0]}
    lost_ns = {a.request_id: sum(over_ns.get(step_id, 0.0) for step_id in set(a.token_steps[1:])) for a in accounts}
    felt = {step_id for account in accounts for step_id in account.token_steps[1:] if step_id in over_ns}
    return Stalls(quiet_ns, bar, {step_id: over_ns[step_id] for step_id in felt}, lost_ns)


def _asked(books: Books) -> dict[str, float]:
    """Returns what the run's SLO says of the time between tokens."""
    slo = books.run.slo if books.run is not None else {}
    return {term: limit for term, limit in slo.items() if term.startswith(GAPS)}


def _is_slo_kept(books: Books) -> bool:
    """Did the run keep what it asked of the time between tokens?"""
    asked = _asked(books)
    if books.run is None or not asked:
        return False
    share = {term: limit for term, limit in books.run.slo.items() if term == "goodput" and "max_stall" in asked}
    return all(term.ok for term in check_slo(books.run, asked | share, books.arm) if term.name != "error_rate")


def _bound(books: Books, usual_ns: float, times: float, quiet_ns: float) -> tuple[float, str]:
    """Returns how long a step may be, and by what. times: of one without prompts, it may take at the least."""
    asked_ns = min(_asked(books).values(), default=None)
    wanted = (usual_ns, "by the default") if asked_ns is None else (asked_ns, "by the SLO")
    return max(wanted, (times * quiet_ns, f"{times:g} times one without prompts"))


def longest_step(books: Books, quiet_ns: float) -> tuple[float, str]:
    """Returns how long a step with prompts should be made, and by what. quiet_ns: one without."""
    return _bound(books, UNFELT_NS if books.engine else PREFILL_SLICE_NS, LONGEST_TIMES, quiet_ns)


def _interference(books: Books, stalls: Stalls, share: Share) -> Finding:
    worst_ns = derive.percentile(list(stalls.over_ns.values()), 95) or 0
    felt = [step for step in books.steps if step.step_id in stalls.over_ns]
    held = [request_id for request_id, ns in stalls.lost_ns.items() if ns > 0]
    (longest_ns, whose), (bar_ns, by) = longest_step(books, stalls.quiet_ns), stalls.bar
    cure, cost = _smaller_chunks(books, felt, longest_ns)
    return Finding(
        claim=f"{num_requests(served(books.accounts), held)} decoding requests stood still while others' prompts were "
        f"computed: {ms(worst_ns):.0f} ms more (p95) in steps of {ms(stalls.quiet_ns):.1f} ms, {share.value:.0%} of "
        f"all requests' time. Too long is a step of {ms(bar_ns):.0f} ms, {by}.",
        evidence=(
            Fact("a step without prompts, median", ms(stalls.quiet_ns), "ms"),
            Fact(f"steps that others' prompts made {ms(bar_ns):.0f} ms or longer", len(felt)),
            Fact("that a step may take", ms(longest_ns), f"ms, {whose}"),
            Fact("what prompts took of these, the 95th percentile", ms(worst_ns), "ms"),
            Fact("time that it took decoding requests", ms(sum(stalls.lost_ns.values())), "ms over all requests"),
            Fact("prompt tokens in the step, at most", max(step.prefill_tokens for step in felt)),
        ),
        request_ids=worst({request_id: stalls.lost_ns[request_id] for request_id in held}),
        step_ids=slowest_steps(felt),
        **share.as_fields,
        confidence=LIKELY,
        confidence_from="what steps with prompts took on the device beyond what their decode rows take without",
        cure=cure,
        cost=cost,
        counter_check="With the smaller chunks and the same load the p95 gap stays: then the steps are long for "
        "another reason.",
        regime="requests that decode while prompts arrive; alone in the batch a request loses nothing to it",
    )


def _smaller_chunks(books: Books, felt: Sequence[StepRecord], target_ns: float) -> tuple[Cure, str]:
    within = _tokens_within(books, target_ns)
    if within is None:
        sentence = "Let a step compute fewer prompt tokens (--max-prefill-tokens): these tell not how many."
        return Cure(sentence=sentence), "TTFT of long prompts rises: each chunk repeats what a step takes by itself."
    tokens = max(1, min(within, max(step.prefill_tokens for step in felt) // 2))
    elsewhere: dict[str, str | OtherCure] = {
        "vllm": _smaller_by_vllm(books, felt, tokens),
        "sglang": "--chunked-prefill-size",
        "tgi": "--max-batch-prefill-tokens",
        "llama.cpp": "--ubatch-size",
    }
    if setting(books, "enable_chunked_prefill") is False:
        flags: tuple[str, ...] = ("--enable-chunked-prefill",)
        sentence = f"Cut prompts into chunks, of at most {tokens} tokens beside decoding requests."
    else:
        flags = ()
        sentence = f"Let a step compute at most {tokens} prompt tokens."
    cost = f"TTFT of long prompts rises{_prompt_cost(books, felt, tokens)}."
    return Cure(sentence=sentence, flags=(*flags, "--max-prefill-tokens", str(tokens)), elsewhere=elsewhere), cost


def _smaller_by_vllm(books: Books, felt: Sequence[StepRecord], tokens: int) -> OtherCure:
    """vLLM bounds what a step takes of one prompt, or of all: the latter where several prompts fill such steps."""
    of_one = [max(count for _, _, count in step.rows) >= step.prefill_tokens / 2 for step in felt]
    chunked = ("--enable-chunked-prefill",) if setting(books, "enable_chunked_prefill") is False else ()
    if sum(of_one) >= len(felt) / 2:
        sentence = f"Let a step compute at most {tokens} tokens of a long prompt while others run."
        return OtherCure(sentence=sentence, flags=(*chunked, "--long-prefill-token-threshold", str(tokens)))
    of_all = max(tokens + int(median(s.decode_tokens for s in felt) or 0), int(setting(books, "max_num_seqs") or 0))
    sentence = f"Let a step compute at most {of_all} tokens in all, which leaves about {tokens} to prompts."
    return OtherCure(sentence=sentence, flags=(*chunked, "--max-num-batched-tokens", str(of_all)))


def _tokens_within(books: Books, limit_ns: float) -> int | None:
    """Prompt tokens that a step can compute in so long, beside its decodes; None where nobody knows."""
    cost = step_cost.fit(books.steps)
    if cost is None or cost.prefill_ns <= 0:
        return None
    rows = median(step.decode_tokens for step in books.steps) or 0
    left_ns = limit_ns - cost.step_ns(rows, 0, 0)
    return max(LEAST_CHUNK, int(left_ns / cost.prefill_ns) // LEAST_CHUNK * LEAST_CHUNK)


def _prompt_cost(books: Books, felt: Sequence[StepRecord], tokens: int) -> str:
    """Returns what computing the longest prompts of these steps would take with so many tokens a step, beside what it
    takes now, and the same of a step."""
    cost = step_cost.fit(books.steps)
    if cost is None or cost.prefill_ns <= 0:
        return ": each of their chunks repeats what a step takes whatever is in it"
    rows = median(step.decode_tokens for step in books.steps) or 0
    now = int(median(step.prefill_tokens for step in felt) or tokens)
    in_steps = {request_id for step in felt for request_id, _, count in step.rows if count > 1}
    prompt = max((a.prompt_tokens - a.cached_tokens for a in books.accounts if a.request_id in in_steps), default=now)
    sizes = (now, tokens)
    before, after = (ms(-(-prompt // size) * cost.step_ns(rows, 0, 0) + prompt * cost.prefill_ns) for size in sizes)
    gaps = " to ".join(f"{ms(cost.step_ns(rows, size, 0)):.0f}" for size in sizes)
    return (
        f": a step falls from {gaps} ms, and {prompt} tokens of prompt take {after:.0f} ms instead of {before:.0f} at "
        "the least, longer where others wait behind them"
    )


MIN_GAIN = 1.2  # what a doubled budget must gain for a prompt; with less the order of prompts matters more
TIMES = (2, 4, 8, 16)  # by which the budget may grow


@rule("accounts", "steps", root_of=("overload", "deadlines_missed"), explains=(Cause.TOKEN_BUDGET,))
def token_budget_bound(books: Books) -> Answer:
    """Prompts wait for the step's token budget, or are computed in small pieces, though a larger one would be
    faster."""
    accounts = served(books.accounts)
    largest = max((step.prefill_tokens for step in books.steps), default=0)
    cost = step_cost.fit(books.steps)
    waits = attribution(books).of(Cause.TOKEN_BUDGET)
    if largest == 0 or (cost is None and not waits):
        return None
    if cost is None or cost.prefill_ns <= 0:
        share = of_requests(waits, accounts)
        why = "prompts wait for the token budget; steps are too much alike to say more"
        return Abstention(why=why) if share.is_worth_it else None
    chunks = _chunks(books.steps, largest)
    rows = median(step.decode_tokens for step in books.steps if step.prefill_tokens) or 0
    again_ns = cost.step_ns(rows, 0, 0)
    lost = _lost_to_budget(waits, chunks, again_ns, attribution(books).of(Stage.PREFILL))
    share = of_requests(lost, accounts).require()
    gain = (again_ns + largest * cost.prefill_ns) / (again_ns / 2 + largest * cost.prefill_ns)
    if gain < MIN_GAIN:
        why = f"prompts wait for the token budget, but twice as many tokens a step would be only {gain - 1:.0%} faster"
        return Abstention(why=why)
    return _budget_finding(books, waits, chunks, cost, largest, gain, share)


def _chunks(steps: Sequence[StepRecord], largest: int) -> dict[str, int]:
    """By request: in how many steps whose budget was spent its prompt was computed and went on in a later one."""
    last: dict[str, int] = {}
    found: dict[str, int] = {}
    for step in steps:
        for request_id, start, num_tokens in step.rows:
            if last.get(request_id) == start and num_tokens > 1:
                found[request_id] = found.get(request_id, 0) + 1
            if num_tokens > 1 and step.prefill_tokens >= largest / 2:
                last[request_id] = start + num_tokens
    return found


def _lost_to_budget(
    waits: Mapping[str, float], chunks: Mapping[str, int], again_ns: float, prefill_ns: Mapping[str, float]
) -> dict[str, float]:
    """Waiting for the budget, and what was paid again with each further chunk: at most what the prompt took."""
    again = {name: min(prefill_ns.get(name, 0.0), count * again_ns) for name, count in chunks.items()}
    return {name: waits.get(name, 0.0) + again.get(name, 0.0) for name in (*waits, *again)}


def _tokens_wanted(books: Books, cost: step_cost.StepCost, rows: float, largest: int) -> int:
    """How far the budget may grow before a step is longer than any is made; at least twice."""
    longest_ns, _ = longest_step(books, cost.step_ns(rows, 0, 0))
    fitting = [t for t in TIMES if cost.step_ns(rows, t * largest, 0) <= longest_ns]
    return int(min(max(fitting, default=TIMES[0]), books.most_times) * largest)


def _budget_finding(
    books: Books,
    waits: Mapping[str, float],
    chunks: Mapping[str, int],
    cost: step_cost.StepCost,
    largest: int,
    gain: float,
    share: Share,
) -> Finding:
    accounts = served(books.accounts)
    rows = median(step.decode_tokens for step in books.steps if step.prefill_tokens) or 0
    wanted = _tokens_wanted(books, cost, rows, largest)
    lost = {**chunks, **waits}
    return Finding(
        claim=f"Steps compute at most {largest} tokens of prompts: {num_requests(accounts, lost)} requests waited for "
        f"that budget or had their prompts cut into many chunks, {share.value:.0%} of all requests' time; twice as "
        f"many prompt tokens a step would be {gain:.2f} times as fast.",
        evidence=(
            Fact("waiting for the token budget", ms(sum(waits.values())), "ms over all requests"),
            Fact("prompt tokens in a step at most", largest),
            Fact("further chunks of a prompt, mean", round(sum(chunks.values()) / max(1, len(accounts)), 1)),
            Fact("a step without prompt tokens (fitted)", ms(cost.step_ns(rows, 0, 0)), "ms"),
            Fact("each prompt token (fitted)", ms(cost.prefill_ns), "ms"),
        ),
        request_ids=worst({name: waits.get(name, 0.0) for name in lost}),
        **share.as_fields,
        confidence=CERTAIN * 0.9,
        confidence_from="the scheduler stated the cause; the gain is from the fitted cost of steps",
        cure=Cure(
            sentence="Let a step compute more prompt tokens.",
            flags=_flags(books, wanted),
            elsewhere={"vllm": _more_by_vllm(books, wanted), "sglang": "--chunked-prefill-size"},
        ),
        cost=f"Requests that decode meanwhile stall for up to {ms(cost.step_ns(rows, wanted, 0)):.0f} ms.",
        counter_check="With the larger budget and the same load the queue's token_budget time stays.",
        regime="steps whose fixed part is a third or more of them; large steps gain nothing",
    )


def _flags(books: Books, tokens: int) -> tuple[str, ...]:
    """What bounds it now is raised: the prompts' part, all of the step, or both."""
    of_prompts, of_all = setting(books, "max_prefill_tokens"), setting(books, "max_num_batched_tokens")
    flags: tuple[str, ...] = ("--max-prefill-tokens", str(tokens)) if of_prompts is not None else ()
    if of_all is None or of_all < 2 * tokens:
        flags += ("--max-num-batched-tokens", str(2 * tokens))
    return flags


def _more_by_vllm(books: Books, tokens: int) -> OtherCure:
    """vLLM's budget is of prompts and decodes together; a bound on each prompt's part may lie below it."""
    of_one, of_all = setting(books, "long_prefill_token_threshold"), setting(books, "max_num_batched_tokens")
    flags: tuple[str, ...] = ("--long-prefill-token-threshold", str(tokens)) if of_one and of_one < tokens else ()
    if of_all is None or of_all < tokens:
        flags += ("--max-num-batched-tokens", str(tokens))
    return OtherCure(sentence="Let a step compute more prompt tokens.", flags=flags)


LONG_TIMES = 4.0  # a prompt so many times the median one is a long one
MIN_LONG_TOKENS = 64  # whatever the median is


class Blocking(msgspec.Struct, frozen=True):
    """How long each request waited behind long prompts, and how long each long prompt made others wait, in ns.

    usual, longest: the median prompt, and the longest of those that somebody waited behind, in tokens.
    """

    waits: dict[str, float]
    blamed: dict[str, float]
    usual: float
    longest: int


@rule("accounts", "steps", explains=(Cause.TOKEN_BUDGET, Cause.STEP_IN_FLIGHT, Computed.OTHERS_PROMPTS))
def head_of_line(books: Books) -> Answer:
    """Short prompts wait while a long one has the step's token budget."""
    accounts = served(books.accounts)
    blocking = _blocking(accounts, books.steps)
    share = of_requests(blocking.waits, accounts)
    return _blocking_finding(books, blocking, share) if share.is_worth_it else share.unsure()


def _blocking(accounts: Sequence[ClosedAccount], steps: Sequence[StepRecord]) -> Blocking:
    usual = median(account.prompt_tokens for account in accounts) or 0
    long_ids = {a.request_id for a in accounts if a.prompt_tokens >= max(MIN_LONG_TOKENS, LONG_TIMES * usual)}
    spans = _prefill_spans(steps, long_ids)
    waits: dict[str, float] = {}
    blamed: dict[str, float] = {}
    for account in accounts:
        for blocker, waited_ns in _waits_behind(account, spans) if account.request_id not in long_ids else ():
            waits[account.request_id] = waits.get(account.request_id, 0) + waited_ns
            blamed[blocker] = blamed.get(blocker, 0) + waited_ns
    longest = max((a.prompt_tokens for a in accounts if a.request_id in blamed), default=0)
    return Blocking(waits, blamed, usual, longest)


def _waits_behind(account: ClosedAccount, spans: Mapping[str, Sequence[Span]]) -> list[tuple[str, int]]:
    waits = [interval for interval in account.intervals if _waits_for_budget(interval)]
    behind = [(name, sum(overlap_ns(i.begin_ns, i.end_ns, when) for i in waits)) for name, when in spans.items()]
    return [(name, waited_ns) for name, waited_ns in behind if waited_ns]


def _waits_for_budget(interval: StageInterval) -> bool:
    """Somebody else had the step's tokens, or the step itself was running when it came."""
    by_budget = interval.cause is Cause.TOKEN_BUDGET and interval.stage in (Stage.QUEUE, Stage.PREFILL_STALL)
    return by_budget or (interval.cause is Cause.STEP_IN_FLIGHT and interval.stage is Stage.QUEUE)


def _prefill_spans(steps: Sequence[StepRecord], wanted: set[str]) -> dict[str, list[Span]]:
    """For each wanted request, when steps that hold a chunk of its prompt ran."""
    spans: dict[str, list[Span]] = {}
    for step in steps:
        largest = max(step.rows, key=lambda row: row[2], default=None)
        if largest is not None and largest[2] > 1 and largest[0] in wanted:
            spans.setdefault(largest[0], []).append((step.begin_ns - step.host_gap_ns, step.end_ns))
    return {request_id: union(found) for request_id, found in spans.items()}


PART_OF_STEP = 4  # a long prompt takes a fourth of a step's tokens, so that others' come beside it


def _beside_by_vllm(books: Books) -> OtherCure:
    """vLLM has no policy by length: a long prompt is bounded, and only clients can say what goes first."""
    budget = setting(books, "max_num_batched_tokens") or max((s.prefill_tokens for s in books.steps), default=0)
    tokens = max(MIN_LONG_TOKENS, int(budget) // PART_OF_STEP)
    chunked = ("--enable-chunked-prefill",) if setting(books, "enable_chunked_prefill") is False else ()
    return OtherCure(
        sentence=f"Let a step take at most {tokens} tokens of a long prompt while others wait, so that short ones are "
        "computed beside it; or send short ones with a lower `priority`, which --scheduling-policy priority heeds.",
        flags=(*chunked, "--long-prefill-token-threshold", str(tokens)),
        cost="Long prompts take longer until their first token.",
        counter_check="With the change and the same load, TTFT p50 of short prompts stays.",
    )


def _blocking_finding(books: Books, blocking: Blocking, share: Share) -> Finding:
    is_chunked = setting(books, "enable_chunked_prefill") is not False
    cure = Cure(
        sentence="Let short prompts go first; a request that has waited for starvation_bound_ms goes before all."
        if is_chunked
        else "Cut long prompts into chunks and let short prompts go first.",
        flags=("--policy", "shortest_prefill", *(() if is_chunked else ("--enable-chunked-prefill",))),
        elsewhere={"vllm": _beside_by_vllm(books), "sglang": "--schedule-policy", "tgi": "a second server"},
    )
    blamed = blocking.blamed
    return Finding(
        claim=f"{num_requests(served(books.accounts), blocking.waits)} requests waited behind {len(blamed)} long "
        f"prompts (up to {blocking.longest} tokens, the median is {blocking.usual:.0f}): {share.value:.0%} of all "
        "requests' time.",
        evidence=(
            Fact("waiting while a long prompt had the step", ms(sum(blocking.waits.values())), "ms over all requests"),
            Fact("long prompts", ", ".join(worst(blamed))),
            Fact("median prompt", blocking.usual, "tokens"),
            Fact("most that one of them cost the others", ms(max(blamed.values())), "ms"),
        ),
        request_ids=worst(blocking.waits),
        step_ids=slowest_steps(s for s in books.steps if any(row[0] in blamed and row[2] > 1 for row in s.rows)),
        **share.as_fields,
        confidence=LIKELY,
        confidence_from="the scheduler stated that the token budget was spent; whose rows spent it is in the steps",
        cure=cure,
        cost="Long prompts wait longer, at most starvation_bound_ms; one that has begun is still computed to its end "
        "first.",
        counter_check="With the policy and the same load, TTFT p50 of short prompts stays.",
        regime="mixed prompt lengths; with prompts of one length the order changes nothing",
    )
