"""What kept the engine's thread from running: nobody let it, its quota was used up, others had the processors, or too
many threads share them.

Read from what the kernel states of each step (`StepRecord.cpu_wait_ns`, `off_cpu_ns`), never from how long a step took;
`beside` says whose turn it was meanwhile: it divides the engine's wait for a processor (`StepRecord.cpu_wait_ns`) in
proportion to who ran in that time, by what the kernel counted (`drive.host_time`). What is counted is told about once a
second: from one reading to the next is a stretch, and a stretch counts by the wait in it. What ran in an hour without
requests made no step wait, and one minute of other work is not thinned by ten quiet ones.

`quota_part` is stated, not divided: a group that is throttled runs nothing, whoever else would. Kernels differ in what
they call that time of a thread, a wait or no wish to run (`off_cpu_ns`), so it is taken from both.

Cores that are there and not used, while steps are long enough to share among them.
"""

from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import msgspec

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    MIN_SHARE,
    POSSIBLE,
    Share,
    median,
    ms,
    of_requests,
    overlap_ns,
    served,
    setting,
    slowest_steps,
    stated,
    threads_and_cores,
    union,
    worst,
)
from splittime.diagnose.timeline import Part, timeline
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord

NOT_STATED = "this server's kernel does not say when its engine's thread was kept from running"
STARVED_SHARE = 0.2  # where nobody tells who ran: a server's own two processes and a client on two cores take a tenth
LONG_NS = 10_000_000  # a stop that is worth counting
UNHEARD_NS = 500_000_000  # before an engine that does nothing; a server's busy event loop sends later, by less
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
_Reading = tuple[int, int, int, int]  # when, what this server had run, what others had, how long it was throttled
LOOPBACK = ("127.0.0.1", "localhost", "::1")
LEAST_NS = 3 * 10**9  # of counters that are read once a second: over less their ends matter


class Beside(msgspec.Struct, frozen=True):
    """How many cores each kept busy while the engine waited for one, on average. server: this server's other threads
    and processes. client: the load generator, as far as it says how busy it was; nothing where it is
    on another machine. others: all other processes."""

    server: float
    client: float
    others: float

    @property
    def others_part(self) -> float:
        return self.others / max(1e-9, self.server + self.client + self.others)


class _Stretch(msgspec.Struct):
    """From one reading to the next. server_ns: without the engine's thread. waited_ns, off_ns: by the engine's
    thread."""

    lasted_ns: int
    server_ns: int
    others_ns: int
    throttled_ns: int
    waited_ns: int
    off_ns: int


def beside(books: Books) -> Beside | None:
    stretches = list(_stretches(books.steps))
    waited_ns = sum(one.waited_ns for one in stretches)
    if sum(one.lasted_ns for one in stretches) < LEAST_NS or not waited_ns:
        return None
    server = sum(one.server_ns / one.lasted_ns * one.waited_ns for one in stretches) / waited_ns
    others = sum(one.others_ns / one.lasted_ns * one.waited_ns for one in stretches) / waited_ns
    client = min(_client_cores(books), others)
    return Beside(server, client, others - client)


def quota_part(books: Books) -> tuple[float, float]:
    """Returns how much of the time in which the engine's thread was kept from running its group was throttled: at the
    least, if that was on all processors at once, over which the kernel sums, and at the most."""
    kept = [(one.waited_ns + one.off_ns, one.throttled_ns) for one in _stretches(books.steps)]
    threads, cores = threads_and_cores(books)
    has_quota = books.facts is not None and books.facts.machine is not None and books.facts.machine.quota is not None
    # One for each thread that computes and one for the rest; no more than it may use, unless that is the quota itself.
    at_once = threads + 1 if has_quota else min(threads + 1, max(1, cores))
    kept_ns = max(1, sum(kept_ns for kept_ns, _ in kept))
    return sum(min(ns, counted / at_once) for ns, counted in kept) / kept_ns, sum(map(min, kept)) / kept_ns


def _stretches(steps: Sequence[StepRecord]) -> Iterator[_Stretch]:
    """From one new reading to the next, since the first step's may be a second old; without those in which a counter
    went back: another server's, or a process that was not seen for a moment."""
    latest: tuple[int, int, int] | None = None
    begin: _Reading | None = None
    engine_ns = waited_ns = off_ns = 0
    for step in steps:
        engine_ns += step.length_ns - (step.cpu_wait_ns or 0) - (step.off_cpu_ns or 0)
        waited_ns, off_ns = waited_ns + (step.cpu_wait_ns or 0), off_ns + (step.off_cpu_ns or 0)
        if step.server_ran_ns is None or step.others_ran_ns is None:
            continue
        reading = step.server_ran_ns, step.others_ran_ns, step.throttled_ns or 0
        if reading == latest:
            continue
        now = (step.end_ns, *reading) if latest is not None else None
        if begin is not None and now is not None:
            lasted_ns, server_ns, others_ns, throttled_ns = (b - a for a, b in zip(begin, now, strict=True))
            if lasted_ns > 0 and min(server_ns, others_ns, throttled_ns) >= 0:
                own_ns = max(0, server_ns - engine_ns)
                yield _Stretch(lasted_ns, own_ns, others_ns, throttled_ns, waited_ns, off_ns)
        latest, begin, engine_ns, waited_ns, off_ns = reading, now, 0, 0, 0


def _client_cores(books: Books) -> float:
    """The load generator's, where it asks this machine as its own; one that is elsewhere takes nothing here."""
    if books.run is None or books.served is None or urlsplit(books.served.url).hostname not in LOOPBACK:
        return 0.0
    return sum(check.value or 0.0 for check in books.run.checks if check.name == "cpu")


@rule(
    "accounts",
    "steps",
    root_of=("engine_stopped", "cpu_starved", "too_many_threads", "too_few_threads", *SLOWED),
    explains=(Computed.CPU_WAIT, Computed.STOPPED),
    reads=("cpu_wait_ns",),
)
def cpu_quota(books: Books) -> Answer:
    """The server's control group has used up its quota of processor time, and nothing in it runs till the next
    period."""
    low, high = quota_part(books)
    lost = _kept_from_running(books, low, Computed.CPU_WAIT, Computed.STOPPED)
    share = stated(lost, served(books.accounts))
    most = max(share.value, attribution(books).share(Computed.CPU_WAIT, Computed.STOPPED) * high)
    if not share.is_worth_it:
        why = f"throttled for {share.value:.0%} to {most:.0%} of the requests' time: the kernel sums over processors"
        return Abstention(why=why) if most >= share.least else None
    threads, cores = threads_and_cores(books)
    told = [step.throttled_ns for step in books.steps if step.throttled_ns is not None]
    quota = books.facts.machine.quota if books.facts is not None and books.facts.machine is not None else None
    of_cores = "" if quota is None else f" of {quota:g} cores"
    return Finding(
        claim=f"The server's control group used up its processor quota{of_cores} and was throttled for "
        f"{(told[-1] - told[0]) / 1e9:.1f} processor-seconds: {share.value:.0%} to {most:.0%} of all "
        "requests' time.",
        evidence=(
            Fact("throttled", ms(told[-1] - told[0]), "ms, summed over its processors"),
            Fact("requests' time in it", ms(sum(lost.values())), "ms over all requests"),
            Fact("threads that compute", threads),
            Fact("quota when it started", "none" if quota is None else quota, "cores"),
        ),
        request_ids=worst(lost),
        step_ids=_steps_with_most(books, Part.CPU_WAIT, Part.STOPPED),
        share_of_time=most,
        share_interval=(share.value, most),
        confidence=CERTAIN,
        confidence_from="the kernel's own counts: how long the group was throttled (cpu.stat), and how long the "
        "engine's thread was kept from running meanwhile",
        cure=Cure(
            sentence=f"Give its container or unit {threads + 1} cores or more (limits.cpu, --cpus, CPUQuota, cpu.max): "
            "one for each thread that computes and one for the rest of the server; or no quota, and a weight."
            + (f" Within this quota, {cores} thread{'s' * (cores != 1)}." if threads > cores else ""),
            flags=("--num-threads", str(cores)) if threads > cores else (),
        ),
        cost="Others on this machine get less of it.",
        counter_check="With the quota raised and the same load nr_throttled in cpu.stat stays, or TPOT p50 does.",
        regime="any load that keeps more cores busy than the quota has",
    )


def _unheard(books: Books) -> dict[str, float]:
    """Returns, by request, how long it lay before the engine's process while no step ran, if for long: one that runs
    takes it in at once."""
    busy = union((step.begin_ns - step.host_gap_ns, step.end_ns) for step in books.steps)
    lying = ((a.request_id, i) for a in served(books.accounts) for i in a.intervals if i.stage is Stage.HANDOFF)
    waits = ((name, i.duration_ns - overlap_ns(i.begin_ns, i.end_ns, busy)) for name, i in lying)
    return {name: float(ns) for name, ns in waits if ns >= UNHEARD_NS}


def _kept_from_running(books: Books, part: float, *owners: Computed) -> dict[str, float]:
    """Returns, by request, this part of the time that these owners have."""
    return {name: ns * part for name, ns in attribution(books).of(*owners).items() if part}


@rule(
    "accounts",
    "steps",
    root_of=("cpu_starved", "too_few_threads", *SLOWED),
    explains=(Computed.STOPPED, Stage.HANDOFF),
    reads=("off_cpu_ns",),
)
def engine_stopped(books: Books) -> Answer:
    """The engine was not run for long at a time, and did not ask to be: stopped from outside."""
    if all(step.off_cpu_ns is None for step in books.steps):
        return Abstention(why=NOT_STATED)
    unheard, waiting = _unheard(books), attribution(books).share(Computed.CPU_WAIT)
    lost = _kept_from_running(books, 1 - quota_part(books)[1], Computed.STOPPED)
    lost = {name: lost.get(name, 0.0) + unheard.get(name, 0.0) for name in (*lost, *unheard)}
    share = stated(lost, served(books.accounts))
    ran = beside(books)
    free = max(0, 1 - ran.others / threads_and_cores(books)[1]) if ran is not None and waiting >= MIN_SHARE else 1
    if waiting > share.value * free:
        return None  # on a machine as full as that a thread is also off for those that it waits for: `cpu_starved`
    share.require()
    off_ns = [float(step[Part.STOPPED]) for step in timeline(books).by_step]
    stopped = [ns for ns in (*off_ns, *sorted(unheard.values())[-1:]) if ns >= LONG_NS]
    if sum(stopped) < sum(off_ns) / 2:
        why = f"off the processor for {share.value:.0%} of the time, but mostly for less than {ms(LONG_NS):.0f} ms "
        return Abstention(why=f"{why}in a step, as where it waits for another thread")
    return Finding(
        claim=f"The engine's thread was not run, and did not ask to be, {len(stopped)} times for "
        f"{ms(max(stopped, default=0)):.0f} ms at most: {share.value:.0%} of all requests' time.",
        evidence=(
            Fact(f"stops of {ms(LONG_NS):.0f} ms or more", len(stopped)),
            Fact("the longest", ms(max(stopped, default=0)), "ms"),
            Fact("requests' time in them", ms(sum(lost.values())), "ms over all requests"),
            Fact("of it before an engine that had nothing to do", ms(sum(unheard.values())), "ms"),
            Fact("waiting for a processor instead", f"{waiting:.0%}", "of the time"),
        ),
        request_ids=worst(lost),
        step_ids=_steps_with_most(books, Part.STOPPED),
        **share.as_fields,
        confidence=CERTAIN,
        confidence_from="the kernel's own count of what the engine's thread ran and waited in each step"
        + "; how long requests lay before it while no step ran" * bool(unheard),
        cure=Cure(
            sentence="Find who stops it: a signal (SIGSTOP, a debugger, a checkpoint), memory that is swapped out, or "
            "a virtual machine whose host does not run it (steal in /proc/stat)."
        ),
        cost="None: no setting of this server changes it.",
        counter_check="With the engine left alone, at the same load, steps are off the processor as long.",
        regime="any load",
    )


@rule(
    "accounts",
    "steps",
    root_of=("too_few_threads", *SLOWED),
    explains=(Computed.CPU_WAIT, Computed.STOPPED),
    reads=("cpu_wait_ns",),
)
def cpu_starved(books: Books) -> Answer:
    """The engine was ready to run and others had the processors: this machine has too few for all that is busy on
    it."""
    if all(step.cpu_wait_ns is None for step in books.steps):
        return Abstention(why=NOT_STATED)
    threads, cores = threads_and_cores(books)
    ran = beside(books)
    if threads > cores:
        return None
    accounts, by_others = served(books.accounts), 1 - quota_part(books)[1]
    lost = _kept_from_running(books, by_others, Computed.CPU_WAIT)
    share = whole = of_requests(lost, accounts, STARVED_SHARE)
    if ran is not None:
        lost = _kept_from_running(books, by_others * ran.others_part, Computed.CPU_WAIT)
        share = of_requests(lost, accounts)
    if not share.is_worth_it:
        return share.unsure() or _as_usual(whole, share, ran)
    return _starved(books, ran, lost, share)


def _starved(books: Books, ran: Beside | None, lost: dict[str, float], share: Share) -> Finding:
    threads, cores = threads_and_cores(books)
    waited_ns = sum(step.cpu_wait_ns or 0 for step in books.steps)
    tokens = sum(account.output_tokens for account in served(books.accounts))
    each = ms(sum(lost.values()) / max(1, tokens))
    who = "Other processes of this machine" if ran is not None else "Nobody tells who"
    return Finding(
        claim=f"The engine's thread was ready to run and had no processor for {waited_ns / 1e9:.1f} s. {who} had it "
        f"for {share.value:.0%} of all requests' time: {each} ms for each token.",
        evidence=(
            Fact("waiting for a processor", ms(waited_ns), "ms over all steps"),
            Fact("of the steps' time", f"{waited_ns / max(1.0, timeline(books).by_step.sum()):.0%}"),
            Fact("requests' time in it" + ", for others" * bool(ran), ms(sum(lost.values())), "ms over all requests"),
            *_who_ran(ran),
            Fact("threads and cores of the server", f"{threads} and {cores}"),
        ),
        request_ids=worst(lost),
        step_ids=_steps_with_most(books, Part.CPU_WAIT),
        **share.as_fields,
        confidence=CERTAIN if ran is not None else POSSIBLE,
        confidence_from="the kernel's own count of what the engine's thread waited in its run queue"
        + ("; whose turn it was, " + ("in proportion to who ran" if ran is not None else "is not in these books")),
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
        return Abstention(why=f"{why}{STARVED_SHARE:.0%} is more")
    why += f": by what they ran, {share.value:.0%} for other processes, "
    own = f"{whole.value - share.value:.0%} for this server's own and for a client beside it"
    return Abstention(why=why + own)


@rule(
    "accounts",
    "machine",
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
    share = of_requests(lost, accounts).require()
    return Finding(
        claim=f"{threads} threads compute on {cores} core{'s' * (cores != 1)}: while one waits for its turn the others "
        f"wait for it, for up to {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("threads", threads),
            Fact("cores that the server may use", cores),
            Fact("waiting for a processor", f"{found.share(Computed.CPU_WAIT):.0%}", "of the requests' time"),
        ),
        request_ids=worst(lost),
        **share.as_fields,
        confidence=LIKELY,
        confidence_from="the settings and the machine's own number of cores; the share is the most that it can be",
        cure=Cure(sentence=f"One thread for each core: {cores}.", flags=("--num-threads", str(cores))),
        cost="None known.",
        counter_check=f"With {cores} threads and the same load TPOT p50 does not fall.",
        regime="any load; the longer the products, the more is lost",
    )


def _steps_with_most(books: Books, *parts: Part) -> tuple[int, ...]:
    amounts = timeline(books).by_step[:, list(parts)].sum(axis=1)
    return slowest_steps(step for step, ns in zip(books.steps, amounts, strict=True) if ns >= LONG_NS)


LONG_STEP_NS = 5_000_000  # a hundred times what it takes to wake a thread: such a step is worth sharing
MIN_LOST_SHARE = 0.15  # of the requests' time, which the other cores would take of such steps at the most
MAX_CPU_WAIT = 0.1  # of it: where the one thread must wait for a processor, a second one finds none
MEASURED = (
    "measured"  # how the runner's reason begins where it has tried several numbers itself (`runner.start_memory`)
)


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
