"""What kept the engine's thread from running (nobody let it, others had the processors, too many threads share them),
and cores that are there and not used.

Waits are what the kernel states of each step (`StepRecord.cpu_wait_ns`, `off_cpu_ns`), never how long a step took;
whose turn it was when the thread waited is told by how long others ran (`diagnose.beside`).
"""

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.beside import Beside, beside
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    POSSIBLE,
    median,
    ms,
    served,
    setting,
    slowest_steps,
    threads_and_cores,
    worst,
)
from splittime.diagnose.rules.share import MIN_SHARE, Share, of_requests, stated
from splittime.diagnose.timeline import Part, timeline
from splittime.ledger.stages import Stage

NOT_STATED = "this server's kernel does not say when its engine's thread was kept from running"
STARVED_SHARE = 0.2  # where nobody tells who ran: a server's own two processes and a client on two cores take a tenth
LONG_NS = 10_000_000  # a stop that is worth counting
# All that a slower engine makes longer.
SLOWED = (
    "overload",
    "slot_bound",
    "kv_bound",
    "token_budget_bound",
    "head_of_line",
    "host_bound",
    "prefill_interference",
    "sampling_bound",
    "burst",
    "deadlines_missed",
    "queue_bound",
    "engine_loop_late",
)


@rule("accounts", "steps", root_of=("cpu_starved", "too_few_threads", *SLOWED), explains=(Computed.STOPPED,))
def engine_stopped(books: Books) -> Answer:
    """The engine was not run for long at a time, and did not ask to be: stopped from outside."""
    if all(step.off_cpu_ns is None for step in books.steps):
        return Abstention("engine_stopped", NOT_STATED)
    lost = attribution(books).of(Computed.STOPPED)
    share = stated(lost, served(books.accounts))
    if attribution(books).share(Computed.CPU_WAIT) > share.value:
        return None  # on a machine as full as that a thread is also off for those that it waits for: `cpu_starved`
    if not share.is_worth_it:
        return share.unsure("engine_stopped")
    off_ns = [float(step[Part.STOPPED]) for step in timeline(books).by_step]
    stopped = [ns for ns in off_ns if ns >= LONG_NS]
    if sum(stopped) < sum(off_ns) / 2:
        why = f"off the processor for {share.value:.0%} of the time, but mostly for less than {ms(LONG_NS):.0f} ms "
        return Abstention("engine_stopped", f"{why}in a step, as where it waits for another thread")
    return Finding(
        name="engine_stopped",
        claim=f"The engine's thread was not run, and did not ask to be, {len(stopped)} times for "
        f"{ms(max(stopped, default=0)):.0f} ms at most: {share.value:.0%} of all requests' time.",
        evidence=(
            Fact(f"stops of {ms(LONG_NS):.0f} ms or more", len(stopped)),
            Fact("the longest", ms(max(stopped, default=0)), "ms"),
            Fact("requests' time in them", ms(sum(lost.values())), "ms over all requests"),
            Fact(
                "waiting for a processor instead", f"{attribution(books).share(Computed.CPU_WAIT):.0%}", "of the time"
            ),
        ),
        request_ids=worst(lost),
        step_ids=_steps_with_most(books, Part.STOPPED),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=CERTAIN,
        confidence_from="the kernel's own count of what the engine's thread ran and waited in each step",
        cure=Cure(
            sentence="Find who stops it: a signal (SIGSTOP, a debugger, a checkpoint), a container's processor quota "
            "(cpu.max; cpu.stat counts nr_throttled), memory that is swapped out, or a virtual machine whose host does "
            "not run it (steal in /proc/stat)."
        ),
        cost="None: no setting of this server changes it.",
        counter_check="With the engine left alone, at the same load, steps are off the processor as long.",
        regime="any load",
    )


@rule("accounts", "steps", root_of=("too_few_threads", *SLOWED), explains=(Computed.CPU_WAIT, Computed.STOPPED))
def cpu_starved(books: Books) -> Answer:
    """The engine was ready to run and others had the processors: this machine has too few for all that is busy on
    it."""
    if all(step.cpu_wait_ns is None for step in books.steps):
        return Abstention("cpu_starved", NOT_STATED)
    threads, cores = threads_and_cores(books)
    ran = beside(books)
    if threads > cores:
        return None
    accounts, lost = served(books.accounts), attribution(books).of(Computed.CPU_WAIT)
    share = whole = of_requests(lost, accounts, STARVED_SHARE)
    if ran is not None:
        lost = {request_id: ns * ran.others_part for request_id, ns in lost.items()}
        share = of_requests(lost, accounts)
    if not share.is_worth_it:
        return share.unsure("cpu_starved") or _as_usual(whole, share, ran)
    waited_ns = sum(step.cpu_wait_ns or 0 for step in books.steps)
    tokens = sum(account.output_tokens for account in accounts)
    each = ms(sum(lost.values()) / max(1, tokens))
    return Finding(
        name="cpu_starved",
        claim=f"The engine's thread was ready to run and had no processor for {waited_ns / 1e9:.1f} s. Other processes "
        f"of this machine had it for {share.value:.0%} of all requests' time: {each} ms for each token.",
        evidence=(
            Fact("waiting for a processor", ms(waited_ns), "ms over all steps"),
            Fact("of the steps' time", f"{waited_ns / max(1.0, timeline(books).by_step.sum()):.0%}"),
            Fact("requests' time in it, for others", ms(sum(lost.values())), "ms over all requests"),
            *_who_ran(ran),
            Fact("threads and cores of the server", f"{threads} and {cores}"),
        ),
        request_ids=worst(lost),
        step_ids=_steps_with_most(books, Part.CPU_WAIT),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=CERTAIN,
        confidence_from="the kernel's own count of what the engine's thread waited in its run queue"
        + ("; whose turn it was, in proportion to who ran" if ran is not None else ""),
        cure=Cure(
            sentence="Keep the processors for the server: move the other work away (`top` names it; a load "
            "generator on the same machine is other work too), or give the server a higher priority (nice, "
            "cpu.weight) or cores of its own (taskset, cpuset)."
        ),
        cost="The other work runs slower, or elsewhere.",
        counter_check="With the other processes stopped, at the same load, the wait for a processor stays.",
        regime="a machine with more that wants to run than cores",
    )


def _who_ran(ran: Beside | None) -> tuple[Fact, ...]:
    if ran is None:
        return ()
    client = Fact("that the load generator on this machine did", round(ran.client, 2))
    return (
        Fact("cores that other processes kept busy meanwhile, mean", round(ran.others, 2)),
        Fact("that this server did beside the engine's thread", round(ran.server, 2)),
        *((client,) if ran.client else ()),
    )


def _as_usual(whole: Share, share: Share, ran: Beside | None) -> Abstention | None:
    """Why a wait is none of others' making, or not known to be."""
    if whole.value < MIN_SHARE:
        return None
    why = f"the engine waits for a processor for {whole.value:.0%} of the requests' time"
    if ran is None:
        why += ", which a server's own processes and a client beside it on two cores make it do; "
        return Abstention("cpu_starved", f"{why}{STARVED_SHARE:.0%} is more")
    why += f": by what they ran, {share.value:.0%} for other processes, "
    own = f"{whole.value - share.value:.0%} for this server's own and for a client beside it"
    return Abstention("cpu_starved", why + own)


@rule(
    "accounts",
    "facts",
    root_of=("cpu_starved", "too_few_threads", *SLOWED),
    explains=(Computed.CPU_WAIT, Computed.STOPPED),
)
def too_many_threads(books: Books) -> Answer:
    """The server computes with more threads than it has cores, so that they wait for each other's turn."""
    threads, cores = threads_and_cores(books)
    if threads <= cores:
        return None
    accounts, found = served(books.accounts), attribution(books)
    waited = found.of(Computed.CPU_WAIT)
    computed = found.of(Stage.PREFILL, Stage.DECODE, Stage.RECOMPUTE, Computed.OTHERS_PROMPTS)
    lost = {name: waited.get(name, 0.0) + computed.get(name, 0.0) * (1 - cores / threads) for name in computed}
    share = of_requests(lost, accounts)
    if not share.is_worth_it:
        return share.unsure("too_many_threads")
    return Finding(
        name="too_many_threads",
        claim=f"{threads} threads compute on {cores} core{'s' * (cores != 1)}: while one waits for its turn the others "
        f"wait for it, for up to {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("threads", threads),
            Fact("cores that the server may use", cores),
            Fact("waiting for a processor", f"{found.share(Computed.CPU_WAIT):.0%}", "of the requests' time"),
        ),
        request_ids=worst(lost),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY,
        confidence_from="the settings and the machine's own number of cores; the share is the most that it can be",
        cure=Cure(sentence=f"One thread for each core: {cores}.", flags=("--num-threads", str(cores))),
        cost="None known.",
        counter_check=f"With {cores} threads and the same load TPOT p50 does not fall.",
        regime="any load; the longer the products, the more is lost",
    )


def _steps_with_most(books: Books, part: Part) -> tuple[int, ...]:
    amounts = timeline(books).by_step[:, part]
    return slowest_steps(step for step, ns in zip(books.steps, amounts, strict=True) if ns >= LONG_NS)


LONG_STEP_NS = 5_000_000  # a hundred times what it takes to wake a thread: such a step is worth sharing
MIN_LONG_SHARE = 0.3  # of the requests' time, in such steps
MAX_CPU_WAIT = 0.05  # of it: where the one thread must wait for a processor, a second one finds none
MEASURED = "measured"  # how the runner's reason begins where it has tried several numbers itself (`runner.threads`)


@rule("accounts", "steps", "facts", root_of=("overload", "slot_bound", "prefill_interference"))
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
    in_long = {name: ns * long_ns / max(1, device_ns) for name, ns in computed.items() if long_ns}
    share = of_requests(in_long, accounts, MIN_LONG_SHARE)
    if found.share(Computed.CPU_WAIT) > MAX_CPU_WAIT or not share.is_worth_it:
        return None
    return Finding(
        name="too_few_threads",
        claim=f"{threads} of {cores} cores compute{'s' * (threads == 1)}, and {share.value:.0%} of all requests' time "
        f"is in steps of {ms(LONG_STEP_NS):.0f} ms or more, which more threads share.",
        evidence=(
            Fact("threads and cores", f"{threads} and {cores}"),
            Fact("why so many threads", reason),
            Fact("device, the median step", ms(median(s.device_ns for s in books.steps) or 0), "ms"),
            Fact("waiting for a processor", f"{found.share(Computed.CPU_WAIT):.0%}", "of the requests' time"),
        ),
        request_ids=worst(in_long),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=POSSIBLE,
        confidence_from="the settings and the length of the steps; what a second thread gains is not measured here",
        cure=Cure(sentence=f"Use all {cores} cores.", flags=("--num-threads", str(cores))),
        cost="The other cores have no room for other work; steps of a millisecond or two gain nothing.",
        counter_check=f"With {cores} threads and the same load TPOT p50 and TTFT p50 do not fall by a tenth.",
        regime="steps of several milliseconds: larger models, long prompts, large batches",
    )
