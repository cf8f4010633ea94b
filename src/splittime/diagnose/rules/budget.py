"""Steps too small for prompts: they wait for the token budget, or are cut into so many chunks that what each step takes
whatever is in it is paid again and again."""

from collections.abc import Mapping, Sequence

from splittime.diagnose.attribution import attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import CERTAIN, median, ms, num_requests, served, setting, worst
from splittime.diagnose.rules.share import Share, of_requests
from splittime.ledger.stages import Cause, Stage
from splittime.ledger.steps import StepRecord

MIN_GAIN = 1.2  # what a doubled budget must gain for a prompt; with less the order of prompts matters more
TIMES = (2, 4, 8, 16)  # by which the budget may grow
LONGEST_STEP_NS = 40_000_000  # that a larger budget may make of a step: below what is felt between tokens


@rule("accounts", "steps", explains=(Cause.TOKEN_BUDGET,))
def token_budget_bound(books: Books) -> Answer:
    """Prompts wait for the step's token budget, or are computed in small pieces, though a larger one would be "
    "faster."""
    accounts = served(books.accounts)
    largest = max((step.prefill_tokens for step in books.steps), default=0)
    cost = step_cost.fit(books.steps)
    waits = attribution(books).of(Cause.TOKEN_BUDGET)
    if largest == 0 or (cost is None and not waits):
        return None
    if cost is None or cost.prefill_ns <= 0:
        share = of_requests(waits, accounts)
        why = "prompts wait for the token budget; steps are too much alike to say more"
        return Abstention("token_budget_bound", why) if share.is_worth_it else None
    chunks = _chunks(books.steps, largest)
    rows = median(step.decode_tokens for step in books.steps if step.prefill_tokens) or 0
    again_ns = cost.step_ns(rows, 0, 0)
    lost = _lost(waits, chunks, again_ns, attribution(books).of(Stage.PREFILL))
    share = of_requests(lost, accounts)
    if not share.is_worth_it:
        return share.unsure("token_budget_bound")
    gain = (again_ns + largest * cost.prefill_ns) / (again_ns / 2 + largest * cost.prefill_ns)
    if gain < MIN_GAIN:
        why = f"prompts wait for the token budget, but twice as many tokens a step would be only {gain - 1:.0%} faster"
        return Abstention("token_budget_bound", why)
    return _finding(books, waits, chunks, cost, largest, gain, share)


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


def _lost(
    waits: Mapping[str, float], chunks: Mapping[str, int], again_ns: float, prefill_ns: Mapping[str, float]
) -> dict[str, float]:
    """Waiting for the budget, and what was paid again with each further chunk: at most what the prompt took."""
    again = {name: min(prefill_ns.get(name, 0.0), count * again_ns) for name, count in chunks.items()}
    return {name: waits.get(name, 0.0) + again.get(name, 0.0) for name in (*waits, *again)}


def _times(cost: step_cost.StepCost, rows: float, largest: int) -> int:
    """By how much the budget may grow before a step is felt between tokens; at least twice."""
    fitting = [t for t in TIMES if cost.step_ns(rows, t * largest, 0) <= LONGEST_STEP_NS]
    return max(fitting, default=TIMES[0])


def _finding(
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
    times = _times(cost, rows, largest)
    lost = {**chunks, **waits}
    return Finding(
        name="token_budget_bound",
        claim=f"Steps compute at most {largest} tokens of prompts: {num_requests(accounts, lost)} requests waited for "
        f"that budget or had their prompts cut into many chunks, {share.value:.0%} of all requests' time; twice as "
        f"many "
        f"prompt tokens a step would be {gain:.2f} times as fast.",
        evidence=(
            Fact("waiting for the token budget", ms(sum(waits.values())), "ms over all requests"),
            Fact("prompt tokens in a step at most", largest),
            Fact("further chunks of a prompt, mean", round(sum(chunks.values()) / max(1, len(accounts)), 1)),
            Fact("a step without prompt tokens (fitted)", ms(cost.step_ns(rows, 0, 0)), "ms"),
            Fact("each prompt token (fitted)", ms(cost.prefill_ns), "ms"),
        ),
        request_ids=worst({name: waits.get(name, 0.0) for name in lost}),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=CERTAIN * 0.9,
        confidence_from="the scheduler stated the cause; the gain is from the fitted cost of steps",
        cure=Cure(
            sentence="Let a step compute more prompt tokens.",
            flags=_flags(books, times * largest),
            elsewhere={"vllm": "--max-num-batched-tokens", "sglang": "--chunked-prefill-size"},
        ),
        cost=f"Requests that decode meanwhile stall for up to {ms(cost.step_ns(rows, times * largest, 0)):.0f} ms.",
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
