"""Decoding that stands still for others' prompts.

A step with prompts is charged to them only for what its device took beyond the decode rows' usual time, and after what
kept the engine from running (`diagnose.timeline`); pauses, host gaps and waits with a cause are others'.
"""

from collections.abc import Sequence
from typing import NamedTuple

from splittime.diagnose.attribution import Computed
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import LIKELY, median, ms, num_requests, served, setting, slowest_steps, worst
from splittime.diagnose.rules.share import Share, of_requests
from splittime.diagnose.timeline import Part, timeline
from splittime.ledger import derive
from splittime.ledger.account import ClosedAccount
from splittime.ledger.steps import StepRecord

STALL_MATTERS_NS = 50_000_000  # a reader takes 20 tokens a second or more for a steady flow
STALL_TIMES = 4.0  # and it must stand out from the ordinary step
MIN_STALLED_STEPS = 5  # fewer are a few odd moments, however many requests were held in them
TARGET_STALL_NS = 40_000_000  # what a smaller budget should leave of the longest stall: below what matters
TARGET_TIMES = 2.0  # or so many times a step without prompts, where that takes as long by itself
LEAST_CHUNK = 16  # tokens, the server's own minimum


class Stalls(NamedTuple):
    """Steps whose prompts held others up long enough to be felt.

    quiet_ns: the median step without prompts. over_ns: by step, what its prompts took. lost_ns: by request, the same of
    the steps that made one of its tokens after the first.
    """

    quiet_ns: float
    bar_ns: float
    over_ns: dict[int, float]
    lost_ns: dict[str, float]


@rule("accounts", "steps", explains=(Computed.OTHERS_PROMPTS,))
def prefill_interference(books: Books) -> Answer:
    """Decoding requests stand still while a step computes others' prompts, long enough to be felt."""
    accounts = served(books.accounts)
    stalls = _stalls(books, accounts)
    if stalls is None or len(stalls.over_ns) < MIN_STALLED_STEPS:
        return None
    share = of_requests(stalls.lost_ns, accounts)
    return _interference(books, stalls, share) if share.is_worth_it else share.unsure()


def _stalls(books: Books, accounts: Sequence[ClosedAccount]) -> Stalls | None:
    """None without steps to compare with."""
    quiet_ns = median(step_cost.length_ns(step) for step in books.steps if not step.prefill_tokens)
    if quiet_ns is None:
        return None
    bar_ns = max(STALL_MATTERS_NS, STALL_TIMES * quiet_ns)
    taken = zip(books.steps, timeline(books).by_step[:, Part.PROMPTS], strict=True)
    over_ns = {step.step_id: float(ns) for step, ns in taken if ns + quiet_ns >= bar_ns}
    lost_ns = {a.request_id: sum(over_ns.get(step_id, 0.0) for step_id in set(a.token_steps[1:])) for a in accounts}
    felt = {step_id for account in accounts for step_id in account.token_steps[1:] if step_id in over_ns}
    return Stalls(quiet_ns, bar_ns, {step_id: over_ns[step_id] for step_id in felt}, lost_ns)


def _interference(books: Books, stalls: Stalls, share: Share) -> Finding:
    worst_ns = derive.percentile(list(stalls.over_ns.values()), 95) or 0
    felt = [step for step in books.steps if step.step_id in stalls.over_ns]
    held = [request_id for request_id, ns in stalls.lost_ns.items() if ns > 0]
    cure, cost = _smaller_chunks(books, felt, max(TARGET_STALL_NS, TARGET_TIMES * stalls.quiet_ns))
    return Finding(
        claim=f"{num_requests(served(books.accounts), held)} decoding requests stood still while others' prompts were "
        f"computed: {ms(worst_ns):.0f} ms more (p95) in steps of {ms(stalls.quiet_ns):.1f} ms, {share.value:.0%} of "
        "all requests' time.",
        evidence=(
            Fact("a step without prompts, median", ms(stalls.quiet_ns), "ms"),
            Fact(f"steps that others' prompts made {ms(stalls.bar_ns):.0f} ms or longer", len(felt)),
            Fact("what prompts took of these, the 95th percentile", ms(worst_ns), "ms"),
            Fact("time that it took decoding requests", ms(sum(stalls.lost_ns.values())), "ms over all requests"),
            Fact("prompt tokens in the step, at most", max(step.prefill_tokens for step in felt)),
        ),
        request_ids=worst({request_id: stalls.lost_ns[request_id] for request_id in held}),
        step_ids=slowest_steps(felt),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY,
        confidence_from="what steps with prompts took on the device beyond what their decode rows take without",
        cure=cure,
        cost=cost,
        counter_check="With the smaller chunks and the same load the p95 gap stays: then the steps are long for "
        "another reason.",
        regime="requests that decode while prompts arrive; alone in the batch a request loses nothing to it",
    )


def _smaller_chunks(books: Books, felt: Sequence[StepRecord], target_ns: float) -> tuple[Cure, str]:
    tokens = max(1, min(_tokens_within(books, target_ns), max(step.prefill_tokens for step in felt) // 2))
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
    cost = "TTFT of long prompts rises: each of their chunks repeats the step's fixed part"
    cost += _chunk_cost(books, tokens)
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


def _tokens_within(books: Books, limit_ns: float) -> int:
    """Prompt tokens that a step can compute in so long, beside its decodes."""
    cost = step_cost.fit(books.steps)
    if cost is None or cost.prefill_ns <= 0:
        return 4 * LEAST_CHUNK
    rows = median(step.decode_tokens for step in books.steps) or 0
    left_ns = limit_ns - cost.step_ns(rows, 0, 0)
    return max(LEAST_CHUNK, int(left_ns / cost.prefill_ns) // LEAST_CHUNK * LEAST_CHUNK)


def _chunk_cost(books: Books, tokens: int) -> str:
    """What a step takes that computes no prompt, against what it takes with a chunk of so many tokens."""
    cost = step_cost.fit(books.steps)
    if cost is None or cost.prefill_ns <= 0:
        return "."
    rows = median(step.decode_tokens for step in books.steps) or 0
    return f", here {cost.step_ns(rows, 0, 0) / (tokens * cost.prefill_ns):.0%} more time for each."
