"""Cores that are there and not used, while steps are long enough to share among them."""

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.evidence import POSSIBLE, median, ms, served, setting, threads_and_cores, worst
from splittime.diagnose.rules.share import of_requests
from splittime.ledger.stages import Stage

LONG_STEP_NS = 5_000_000  # a hundred times what it takes to wake a thread: such a step is worth sharing
MIN_LOST_SHARE = 0.15  # of the requests' time, which the other cores would take of such steps at the most
MAX_CPU_WAIT = 0.05  # of it: where the one thread must wait for a processor, a second one finds none
MEASURED = "measured"  # how the runner's reason begins where it has tried several numbers itself (`runner.threads`)


@rule("accounts", "steps", "machine", root_of=("overload", "slot_bound", "prefill_interference"))
def too_few_threads(books: Books) -> Answer:
    """Fewer threads than cores were asked for, and steps are long enough that more of them would make them shorter."""
    threads, cores = threads_and_cores(books)
    reason = str(setting(books, "num_threads_reason") or "")
    if threads >= cores or not reason or reason.startswith(MEASURED):
        return None
    accounts, found = served(books.accounts), attribution(books)
    device_ns = sum(step.device_ns for step in books.steps)
    long_ns = sum(step.device_ns for step in books.steps if step.device_ns >= LONG_STEP_NS)
    computed = found.of(Stage.PREFILL, Stage.DECODE, Stage.RECOMPUTE, Computed.OTHERS_PROMPTS)
    part = long_ns / max(1, device_ns) * (1 - threads / cores)
    lost = {name: ns * part for name, ns in computed.items() if part}
    share = of_requests(lost, accounts, MIN_LOST_SHARE)
    if found.share(Computed.CPU_WAIT) > MAX_CPU_WAIT or not share.is_worth_it:
        return None
    return Finding(
        claim=f"{threads} of {cores} cores compute{'s' * (threads == 1)} steps of {ms(LONG_STEP_NS):.0f} ms or more: "
        f"the others would take up to {share.value:.0%} of all requests' time away.",
        evidence=(
            Fact("threads and cores", f"{threads} and {cores}"),
            Fact("why so many threads", reason),
            Fact("device, the median step", ms(median(s.device_ns for s in books.steps) or 0), "ms"),
            Fact("waiting for a processor", f"{found.share(Computed.CPU_WAIT):.0%}", "of the requests' time"),
        ),
        request_ids=worst(lost),
        **share.as_fields,
        confidence=POSSIBLE,
        confidence_from="the settings and the length of the steps; what a second thread gains is not measured here",
        cure=Cure(sentence=f"Use all {cores} cores.", flags=("--num-threads", str(cores))),
        cost="The other cores have no room for other work; steps of a millisecond or two gain nothing.",
        counter_check=f"With {cores} threads and the same load TPOT p50 and TTFT p50 do not fall by a tenth.",
        regime="steps of several milliseconds: larger models, long prompts, large batches",
    )
