"""Decoding that stands still for others' prompts.

A step with prompts is charged to them only for what its device took beyond the decode rows' usual time, and after what
kept the engine from running (`diagnose.timeline`); pauses, host gaps and waits with a cause are others'.

How long is too long, nobody can say but who asked: an SLO of the run, or else our server, which makes its own steps
`PREFILL_SLICE_NS` long. Another one makes them of any length, so there it is what a reader feels. Shorter gaps are
bought with later first tokens, and a cure tells both.
"""

from collections.abc import Sequence
from typing import NamedTuple

from splittime.bench.book.slo import check_slo
from splittime.core.facts import PREFILL_SLICE_NS
from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import LIKELY, median, ms, num_requests, served, setting, slowest_steps, worst
from splittime.diagnose.rules.share import Share, of_requests
from splittime.diagnose.timeline import Part, timeline
from splittime.diagnose.unexplained import MAX_UNEXPLAINED
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
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
