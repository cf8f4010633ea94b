"""What a start measured of this machine, held against the steps that were really run.

`max_prefill_tokens` is worked out from what a token of a prompt took at start, or at an earlier start (it is
remembered). A moment that was worse or better than the ones that followed makes steps with prompts too short or too
long for as long as the server lives. Only steps that computed a prompt alone are compared, and only its beginning:
further on attention takes its own, growing part.
"""

from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.evidence import LIKELY, median, setting, slowest_steps
from splittime.diagnose.rules.share import Share, counted
from splittime.ledger.steps import StepRecord

OFF_BY = 1.5  # times: moments of one machine differ by less, on most days
MIN_PROMPT_STEPS = 10
MIN_TOKENS, MAX_CONTEXT_TOKENS = 16, 512


@rule("steps", "facts", root_of=("prefill_interference",))
def start_measurement_is_off(books: Books) -> Answer:
    """What a start measured of prompts, and sized its steps by, is not what the steps that were run took."""
    measured_ns, budget = setting(books, "prefill_ns_per_token"), setting(books, "max_prefill_tokens")
    is_whole = budget is None or budget >= (setting(books, "max_num_batched_tokens") or 0)
    if not measured_ns or is_whole:  # not measured, or without effect
        return None
    alike = [step for step in books.steps if _is_alike(step)]
    if len(alike) < MIN_PROMPT_STEPS:
        why = f"{len(alike)} steps computed the beginning of a prompt alone; {MIN_PROMPT_STEPS} are the least"
        return Abstention("start_measurement_is_off", why)
    run_ns = median(_undisturbed_ns(step) / step.prefill_tokens for step in alike) or 0.0
    if 1 / OFF_BY < run_ns / measured_ns < OFF_BY:
        return None
    with_prompts_ns = sum(step.device_ns for step in books.steps if step.prefill_tokens)
    share = counted(with_prompts_ns / max(1, sum(step.end_ns - step.begin_ns for step in books.steps)), len(alike))
    return _finding(books, alike, measured_ns, run_ns, budget, share) if share.is_worth_it else None


def _is_alike(step: StepRecord) -> bool:
    """Is this step like those that were measured at start?"""
    is_early = all(start + num_tokens <= MAX_CONTEXT_TOKENS for _, start, num_tokens in step.rows)
    return step.decode_tokens == 0 and step.prefill_tokens >= MIN_TOKENS and is_early and step.device_ns > 0


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
        name="start_measurement_is_off",
        claim=f"A prompt's token takes {run_ns / 1e6:.2f} ms where {measured_ns / 1e6:.2f} were measured at start: "
        f"steps of {budget} prompt tokens take {longer}.",
        evidence=(
            Fact("a prompt's token in these books, the median step", round(run_ns / 1e6, 3), "ms"),
            Fact("measured at start", round(measured_ns / 1e6, 3), "ms"),
            Fact("how", str(setting(books, "prefill_reason") or "not told")),
            Fact("steps compared", len(alike)),
        ),
        step_ids=slowest_steps(alike),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY,
        confidence_from="the same kind of step, timed at start and in these books",
        cure=Cure(sentence="Measure again at the next start.", flags=("--remeasure",)),
        cost="Some tenths of a second at start, a second or two with a large model.",
        counter_check="After a start with --remeasure the new figure is within a third of the old one.",
        regime="prompts that are cut by max_prefill_tokens",
    )
