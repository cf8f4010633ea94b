"""A start: requests that came before the server was ready or while its first steps were slow, and what the start
measured of this machine.

A cold start comes once, so it is counted as it was, and not asked what another run would show.

`max_prefill_tokens` is worked out from what a token of a prompt took at start, or at an earlier start (it is
remembered). A moment that was worse or better than the ones that followed makes steps with prompts too short or too
long for as long as the server lives. Only steps that computed a prompt alone are compared, about as many tokens as were
measured (few take longer each, for what a step takes whatever is in it), and only its beginning: further on attention
takes its own, growing part.
"""

from collections.abc import Sequence
from operator import le

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, OtherCure, rule
from splittime.diagnose.rules import evidence as shown
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import Share, counted, of_number, of_requests
from splittime.ledger.account import ClosedAccount
from splittime.ledger.facts import Process
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord

COLD_TIMES = 3.0  # the first requests take so many times what the later ones take
COLD_REQUESTS = 3  # at least so many of them, or it was one odd request
COLD_REFUSED = 0.02  # of all requests turned away: no answer is worse than a late one
COLD_SHARE = 0.5  # of the first steps are slow: a single slow one is no start
COLD_REACH = 4  # times what a later step has: requests pile up in cold steps, and as many rows are seldom there later
COLD_WINDOW_NS = 5_000_000_000  # what comes later than this after readiness is not of the start


@rule("accounts", "facts")
def cold_start(books: Books) -> Answer:
    """Requests met a server that was not yet ready, or that computed its first steps slowly."""
    assert books.facts is not None
    engine = books.facts.process("engine") or books.facts.process("llm")
    turned_away = [a for a in books.accounts if a.error is not None and a.error.code == "not_ready"]
    if len(turned_away) >= max(COLD_REQUESTS, COLD_REFUSED * len(books.accounts)):
        return _not_ready(books, turned_away, engine)
    if engine is None or engine.ready_ns is None:
        return Abstention(why="the server does not say when it was ready")
    slow = _slow_first_steps(books.steps, engine.ready_ns + COLD_WINDOW_NS)
    longer_ns = sum(over_ns for _, over_ns in slow)
    lost = {
        a.request_id: sum(_lost_ns(a, step, over_ns) for step, over_ns in slow) for a in shown.served(books.accounts)
    }
    lost = {request_id: ns for request_id, ns in lost.items() if ns > 0}
    share = counted(sum(lost.values()) / shown.total_ns(shown.served(books.accounts)), len(lost))
    if share.value < share.least or len(lost) < COLD_REQUESTS:
        return None
    claim = (
        f"{len(slow)} of the first steps after the start took {shown.ms(longer_ns):.0f} ms longer than the same work "
        f"later: {share.value:.0%} of all requests' time."
    )
    facts = [
        Fact("above the later steps", shown.ms(longer_ns), "ms"),
        Fact("requests' time in it", shown.ms(sum(lost.values())), "ms over all requests"),
    ]
    return _cold(claim, tuple(shown.worst(lost)), share, shown.LIKELY, facts)


def _lost_ns(account: ClosedAccount, step: StepRecord, over_ns: float) -> float:
    """Returns a request's part of what this step took longer: as much of it as of the step."""
    begin_ns, end_ns = max(account.start_ns, step.begin_ns - step.host_gap_ns), min(account.end_ns, step.end_ns)
    return over_ns * max(0, end_ns - begin_ns) / max(1, step.length_ns)


def _not_ready(books: Books, turned_away: Sequence[ClosedAccount], engine: Process | None) -> Finding:
    took_ns = engine.ready_ns - engine.started_ns if engine is not None and engine.ready_ns is not None else 0
    share = of_number(len(turned_away), len(books.accounts), COLD_REFUSED)
    claim = f"{len(turned_away)} of {len(books.accounts)} requests came before the engine was ready and got 503"
    claim += f"; it took {took_ns / 1e9:.1f} s to start." if took_ns else "."
    restarts = engine.restarts if engine is not None else 0
    facts = [Fact("turned away with 503", len(turned_away), "requests"), Fact("start-up", round(took_ns / 1e9, 2), "s")]
    ids = tuple(account.request_id for account in turned_away[:5])
    return _cold(claim, ids, share, shown.CERTAIN, [*facts, Fact("restarts of the engine", restarts)])


def _slow_first_steps(steps: Sequence[StepRecord], until_ns: int) -> list[tuple[StepRecord, float]]:
    """The slow ones of the first steps, as far as most took several times what the cost of the later ones says, and by
    how much. Of steps far larger than any later one nobody knows that; smaller ones are judged by the smallest."""
    later = [step for step in steps if step.begin_ns > until_ns]
    cost = step_cost.fit(later)
    if cost is None:
        return []
    least, most = ([of(sizes) for sizes in zip(*map(_size, later), strict=True)] for of in (min, max))
    known = [COLD_REACH * size for size in most]
    within = [s for s in steps if s.begin_ns <= until_ns and all(map(le, _size(s), known))]
    expected = [(s, cost.step_ns(*map(max, _size(s), least))) for s in within]
    early = [(s, step_cost.worked_ns(s) - ns, ns) for s, ns in expected]
    is_slow = [over_ns > (COLD_TIMES - 1) * ns for _, over_ns, ns in early]
    cold = max((n for n in range(len(early) + 1) if sum(is_slow[:n]) >= COLD_SHARE * n), default=0)
    return [(step, over_ns) for (step, over_ns, _), slow in zip(early[:cold], is_slow, strict=False) if slow]


def _size(step: StepRecord) -> tuple[int, int, int]:
    return step.decode_tokens, step.prefill_tokens, step.kv_tokens_read


_PROBE_VLLM = OtherCure(
    sentence="Send no traffic before GET /health answers 200 and some requests of the usual lengths have been sent to "
    "warm it up; leave the first seconds out of a measurement."
)


def _cold(claim: str, ids: tuple[str, ...], share: Share, confidence: float, facts: list[Fact]) -> Finding:
    return Finding(
        claim=claim,
        evidence=tuple(facts),
        request_ids=ids,
        **share.as_fields,
        share_of=share.of,
        confidence=confidence,
        confidence_from="the time of readiness and the accounts are on one clock",
        cure=Cure(
            sentence="Send no traffic before GET /ready answers 200 (a readiness probe); leave the first seconds out "
            "of a measurement; keep a packed_cache folder for quantised weights, so that the next start is quick.",
            elsewhere={"vllm": _PROBE_VLLM, "sglang": "GET /health_generate", "tgi": "GET /health"},
        ),
        cost="The server takes part in the load some seconds later.",
        counter_check="With the probe, the same requests some seconds later are as slow.",
        regime="the first seconds of a process",
    )


OFF_BY = 1.5  # times: moments of one machine differ by less, on most days
MIN_PROMPT_STEPS = 10
MAX_CONTEXT_TOKENS = 512


@rule("accounts", "steps", "facts", root_of=("prefill_interference",))
def start_measurement_is_off(books: Books) -> Answer:
    """What a start measured of prompts, and sized its steps by, is not what the steps that were run took."""
    measured_ns, budget = shown.setting(books, "prefill_ns_per_token"), shown.setting(books, "max_prefill_tokens")
    is_whole = budget is None or budget >= (shown.setting(books, "max_num_batched_tokens") or 0)
    if not measured_ns or is_whole:  # not measured, or without effect
        return None
    alike = [step for step in books.steps if _is_alike(step, budget)]
    if not alike:
        return None
    if len(alike) < MIN_PROMPT_STEPS:
        why = f"steps that computed the beginning of a prompt alone: {len(alike)}; {MIN_PROMPT_STEPS} are the least"
        return Abstention(why=why)
    run_ns = shown.median(_undisturbed_ns(step) / step.prefill_tokens for step in alike) or 0.0
    if 1 / OFF_BY < run_ns / measured_ns < OFF_BY:
        return None
    share = of_requests(_lost_by_size(books, run_ns / measured_ns), shown.served(books.accounts))
    return _finding(books, alike, measured_ns, run_ns, budget, share) if share.is_worth_it else share.unsure()


def _lost_by_size(books: Books, times: float) -> dict[str, float]:
    """Returns what steps lose that were made for another time, by request: of too long ones what others' prompts took
    beyond what was meant; of too short ones what each takes whatever is in it, for as many as there are too many."""
    if times > 1:
        held = attribution(books).of(Computed.OTHERS_PROMPTS)
        return {request_id: ns * (1 - 1 / times) for request_id, ns in held.items()}
    cost, tokens = step_cost.fit(books.steps), max((step.prefill_tokens for step in books.steps), default=0)
    if cost is None:
        return {}
    of_step = cost.fixed_ns / max(1.0, cost.step_ns(0, tokens, 0))
    return {request_id: ns * of_step * (1 - times) for request_id, ns in attribution(books).of(Stage.PREFILL).items()}


def _is_alike(step: StepRecord, budget: int) -> bool:
    """Is this step like those that were measured at start?"""
    is_large = step.prefill_tokens >= min(budget, MAX_CONTEXT_TOKENS) / 2
    is_early = all(start + num_tokens <= MAX_CONTEXT_TOKENS for _, start, num_tokens in step.rows)
    return step.decode_tokens == 0 and is_early and is_large and step.device_ns > 0


def _undisturbed_ns(step: StepRecord) -> int:
    """Without what others took of the processor meanwhile: that is no fault of the start's."""
    return max(0, step.device_ns - (step.cpu_wait_ns or 0) - (step.off_cpu_ns or 0))


def _finding(
    books: Books, alike: list[StepRecord], measured_ns: float, run_ns: float, budget: int, share: Share
) -> Finding:
    longer = (
        f"{run_ns / measured_ns:.1f} times as long as they were made for"
        if run_ns > measured_ns
        else "less time than they were made for"
    )
    return Finding(
        claim=f"A prompt's token takes {run_ns / 1e6:.2f} ms where {measured_ns / 1e6:.2f} were measured at start: "
        f"steps of {budget} prompt tokens take {longer}, which costs {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("a prompt's token in these books, the median step", round(run_ns / 1e6, 3), "ms"),
            Fact("measured at start", round(measured_ns / 1e6, 3), "ms"),
            Fact("how", str(shown.setting(books, "prefill_reason") or "not told")),
            Fact("steps compared", len(alike)),
        ),
        step_ids=shown.slowest_steps(alike),
        **share.as_fields,
        confidence=shown.LIKELY,
        confidence_from="the same kind of step, timed at start and in these books",
        cure=Cure(sentence="Measure again at the next start.", flags=("--remeasure",)),
        cost="Some tenths of a second at start, a second or two with a large model.",
        counter_check="After a start with --remeasure the new figure is within a third of the old one.",
        regime="prompts that are cut by max_prefill_tokens",
    )
