"""The machine around the model: a host that keeps the device waiting, pauses, slow tokenising.

Choosing tokens that takes as long as computing them, and a device apart from the host that the host keeps waiting,
by the device's own marks (`ledger.steps`).
"""

from collections.abc import Sequence

import numpy

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules import evidence as shown
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import Share, of_requests
from splittime.diagnose.timeline import Part, timeline
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage
from splittime.ledger.steps import DeviceTime, StepRecord, device_time, is_paced

NATIVE_IN_THEIR_PLACE = ("torch", "reference")  # not a card's; and native ones multiply no fp8
HOST_SHARE = 0.5  # of busy time: the device waits longer than it works; a small model (4 M parameters) is at a third
ODD_TIMES = 4.0  # what the host took of a step counts up to so many times the median: beyond, the process was put aside
GROWS_SHARE = 0.5  # of what the host takes: then it is what is to be cured
RENDER_SHARE = 0.5  # of rendering and tokenising: then the template is what is to be cured
PAUSE_SHARE = 0.02  # pauses hit everybody at once and at the worst moment: less of them is felt
LONG_PAUSE_NS = 100_000_000  # as long as a whole answer of a fast server's first token
MIN_LONG_PAUSES = 3  # of these, whatever their share is

_COMPUTING = shown.in_stages(Stage.PREFILL, Stage.DECODE, Stage.RECOMPUTE, Stage.PREFILL_STALL, Stage.DECODE_STALL)


@rule(
    "accounts",
    "steps",
    root_of=("overload", "slot_bound", "engine_loop_late"),
    explains=(Computed.HOST,),
    reads=("launch_ns", "sample_ns"),
)
def host_bound(books: Books) -> Answer:
    """The device waits for Python: planning, launching and committing take a large part of the steps' time."""
    if device_time(books.steps) is not None:
        return None  # what a device apart from the host waits is measured there: `device_idle`
    host_ns, device_ns = _usual_ns(books)
    host_share = host_ns / max(1.0, host_ns + device_ns)
    found = attribution(books)
    share = of_requests(found.of(Computed.HOST), shown.served(books.accounts))
    if found.share(Computed.CPU_WAIT, Computed.STOPPED) > found.share(Computed.HOST):
        return None  # a thread that is put aside comes back to cold caches: its own work seems longer than it is
    if host_share < HOST_SHARE or not share.is_worth_it:
        return share.unsure() if host_share >= HOST_SHARE else None
    return _waiting_for_host(books, share, host_ns + device_ns, host_share)


def answers_part(books: Books) -> float:
    """Returns how much of what the host takes of the steps grows with how many tokens their answers have so far: by a
    line fitted to the steps (`step_cost`), by rows and by these tokens."""
    prompts = {account.request_id: account.prompt_tokens for account in books.accounts}
    answered = [sum(max(0, start - prompts.get(name, start)) for name, start, _ in step.rows) for step in books.steps]
    if len(answered) < step_cost.MIN_STEPS_TO_FIT or not any(answered):
        return 0.0
    known = numpy.array([(1.0, len(s.rows), n) for s, n in zip(books.steps, answered, strict=True)], dtype=float)
    taken = timeline(books).by_step[:, Part.HOST]
    return float(step_cost.robust_fit(known, taken)[2] * known[:, 2].sum() / max(1.0, taken.sum()))


def _waiting_for_host(books: Books, share: Share, worked_ns: float, host_share: float) -> Finding:
    busy_ns = sum(step.length_ns for step in books.steps)
    parts = {name: sum(getattr(step, name) for step in books.steps) for name in _HOST_PARTS}
    largest = max(parts, key=lambda name: parts[name])
    rows = sum(len(step.rows) for step in books.steps) / len(books.steps)
    kernels = str(shown.setting(books, "kernels") or "")
    grows = answers_part(books)
    return Finding(
        claim=f"Of {worked_ns / 1e9:.1f} s of work the device waited {host_share:.0%} for the host, most "
        f"of it in {_HOST_PARTS[largest]}."
        + (f" {grows:.0%} of that grows with the answers' length." if grows >= GROWS_SHARE else ""),
        evidence=(
            *(Fact(meaning, f"{parts[name] / busy_ns:.1%}", "of busy time") for name, meaning in _HOST_PARTS.items()),
            Fact("host, the median step", shown.ms(shown.median(map(_host_ns, books.steps)) or 0), "ms"),
            Fact("device, the median step", shown.ms(shown.median(step.device_ns for step in books.steps) or 0), "ms"),
            Fact("rows in a step, mean", round(rows, 1)),
            Fact("kernels", kernels or "not told"),
            Fact("the host's part that grows with the tokens of the answers so far", f"{grows:.0%}"),
        ),
        request_ids=shown.worst(shown.times_ns(shown.served(books.accounts), _COMPUTING)),
        step_ids=shown.slowest_steps(
            step for step in books.steps if step.host_gap_ns + step.launch_ns > step.device_ns
        ),
        **share.as_fields,
        confidence=shown.CERTAIN if largest != "host_gap_ns" else shown.LIKELY,
        confidence_from="each step's own split, which sums to its length",
        cure=_cure(
            kernels not in NATIVE_IN_THEIR_PLACE or shown.setting(books, "quantization") == "fp8", grows >= GROWS_SHARE
        ),
        cost="An answer that is cut goes on in the next request."
        if grows >= GROWS_SHARE
        else "Fewer threads compute large prompts more slowly.",
        counter_check="With the change the host's share of busy time stays.",
        regime=f"steps of about {rows:.0f} rows; the host's part shrinks as batches and models grow",
    )


def _cure(is_native: bool, grows: bool) -> Cure:
    if grows:
        return Cure(
            sentence="Find what goes through the whole answer again at each token (`py-spy dump` of the engine process "
            "in such a step; what looks back is guessing, penalties, forms and stop strings), and do without; until "
            "then bound the answers (max_tokens). No setting of cores or threads changes it."
        )
    elsewhere = {"vllm": "--async-scheduling, no --enforce-eager", "sglang": "no --disable-cuda-graph"}
    if not is_native:
        sentence = "Use the native kernels: one call a layer instead of one an operation."
        return Cure(sentence=sentence, flags=("--kernels", "native"), elsewhere=elsewhere)
    sentence = "Give the engine process a core of its own: nothing else busy on this machine, one thread fewer."
    return Cure(sentence=sentence, flags=("--num-threads", "1"), elsewhere=elsewhere)


def _usual_ns(books: Books) -> tuple[float, float]:
    """What the host and the device took of all steps, after what kept the thread from running, and with the host's odd
    moments cut: where the kernel does not say so, a machine that others keep busy puts the process aside for tens of
    steps' time now and then, and no flag of this server cures that."""
    by_step = timeline(books).by_step
    host_ns = by_step[:, Part.HOST]
    most_ns = ODD_TIMES * (shown.median(host_ns) or 0.0)
    return float(host_ns.clip(max=most_ns).sum()), float(by_step[:, [Part.SAMPLE, Part.PROMPTS, Part.DEVICE]].sum())


def _host_ns(step: StepRecord) -> int:
    return step.host_gap_ns + step.plan_ns + step.launch_ns + step.commit_ns


_HOST_PARTS = {
    "host_gap_ns": "between steps",
    "plan_ns": "planning",
    "launch_ns": "launching",
    "commit_ns": "committing",
}


@rule("accounts", "steps", "facts", root_of=("host_bound",), explains=(Computed.GC,))
def gc_pauses(books: Books) -> Answer:
    """Collections of garbage hold up the requests that were in flight."""
    assert books.facts is not None
    accounts = shown.served(books.accounts)
    pauses = [(process.name, b, b + ns) for process in books.facts.processes for b, ns in process.pauses]
    if books.engine and not pauses:
        return Abstention(why=f"cannot tell: {books.facts.engine} does not say when its garbage is collected")
    spans = shown.union((begin_ns, end_ns) for _, begin_ns, end_ns in pauses)
    held = {a.request_id: float(shown.overlap_ns(a.start_ns, a.end_ns, spans)) for a in accounts}
    held = {request_id: ns for request_id, ns in held.items() if ns > 0}
    share = of_requests(held, accounts, PAUSE_SHARE)
    felt = [(name, end_ns - begin_ns) for name, begin_ns, end_ns in pauses if _meets(begin_ns, end_ns, accounts)]
    longest_ns = max((ns for _, ns in felt), default=0)
    if not share.is_worth_it and sum(ns >= LONG_PAUSE_NS for _, ns in felt) < MIN_LONG_PAUSES:
        return share.unsure()
    where = " and ".join(sorted({name for name, _ in felt}))
    return Finding(
        claim=f"{len(felt)} collections of garbage in the {where} process, up to {shown.ms(longest_ns):.0f} ms, "
        f"held up {len(held)} requests: {share.value:.1%} of all requests' time.",
        evidence=(
            Fact("collections of a millisecond or more", len(felt)),
            Fact("the longest", shown.ms(longest_ns), "ms"),
            Fact("requests' time in them", shown.ms(sum(held.values())), "ms over all requests"),
        ),
        request_ids=shown.worst(held),
        step_ids=shown.slowest_steps(
            s for s in books.steps if shown.overlap_ns(s.begin_ns - s.host_gap_ns, s.end_ns, spans)
        ),
        **share.as_fields,
        confidence=shown.CERTAIN,
        confidence_from="the collector's own callbacks, on the same clock as the accounts",
        cure=Cure(
            sentence="Find what keeps so many objects alive (a large ledger in memory, huge bodies): the server "
            "freezes what start-up made, so long pauses come from what was made since. Restart to confirm."
        ),
        cost="A restart drops the prefix cache.",
        counter_check="After a restart, at the same load, the pauses are as long at once.",
        regime="any load; the pauses grow with the number of live objects, not with the batch",
    )


def _meets(begin_ns: int, end_ns: int, accounts: Sequence[ClosedAccount]) -> bool:
    return any(account.start_ns < end_ns and account.end_ns > begin_ns for account in accounts)


@rule("accounts", root_of=("loop_stalls",), explains=(Stage.TOKENIZE,))
def slow_tokenizing(books: Books) -> Answer:
    """Turning texts into tokens takes a large part of the requests' time."""
    accounts = shown.served(books.accounts)
    taken = shown.times_ns(accounts, shown.in_stages(Stage.TOKENIZE, Stage.TOKENIZE_QUEUE))
    share = of_requests(taken, accounts).require()
    waited = shown.times_ns(accounts, shown.in_stages(Stage.TOKENIZE_QUEUE))
    worked_ns = sum(taken.values()) - sum(waited.values())
    rendered_ns = sum(account.render_ns for account in accounts)
    is_template = rendered_ns >= RENDER_SHARE * worked_ns
    tokens = sum(account.prompt_tokens for account in accounts)
    rate = tokens / max(1e-9, worked_ns / 1e9)
    what = f"The chat template, by {rendered_ns / max(1, worked_ns):.0%}, and t" if is_template else "T"
    return Finding(
        claim=f"{what}okenising, and waiting for it, took {share.value:.0%} of all requests' time: {rate:.0f} prompt "
        "tokens/s.",
        evidence=(
            Fact("tokenising and waiting for it", shown.ms(sum(taken.values())), "ms over all requests"),
            Fact("of it waiting", shown.ms(sum(waited.values())), "ms over all requests"),
            Fact("of it in the chat template", shown.ms(rendered_ns), "ms over all requests"),
            Fact("median of a request", shown.ms(shown.median(taken.values()) or 0), "ms"),
            Fact("prompt tokens", tokens, "tokens"),
            Fact("of them from the prefix cache", sum(account.cached_tokens for account in accounts), "tokens"),
        ),
        request_ids=shown.worst(taken),
        **share.as_fields,
        confidence=shown.CERTAIN,
        confidence_from="a stage of the accounts",
        cure=Cure(
            sentence="Make the chat template quicker (--chat-template FILE): no loop within a loop over the messages, "
            "no text put together piece by piece; until then keep the history short, or write the prompt in the client "
            "(/v1/completions)."
            if is_template
            else "Send token ids instead of text (`prompt: [1, 2, ...]`), or shorter texts; for chats keep the history "
            "short.",
            elsewhere={"vllm": "--api-server-count", "sglang": "--tokenizer-worker-num", "any": "send token ids"},
        ),
        cost="Another template may write another prompt: compare what both write."
        if is_template
        else "The client must have the model's tokenizer.",
        counter_check="With the prompts sent as token ids TTFT does not fall by about this time.",
        regime="long texts with little to compute: short answers, prompts that the prefix cache holds",
    )


SAMPLE_SHARE = 0.2  # of the requests' time: an argmax or a plain draw takes a few hundredths


@rule("accounts", "steps", root_of=("overload", "slot_bound"), explains=(Computed.SAMPLE,), reads=("sample_ns",))
def sampling_bound(books: Books) -> Answer:
    """Choosing the tokens takes a large part of each step."""
    accounts = shown.served(books.accounts)
    lost = attribution(books).of(Computed.SAMPLE)
    share = of_requests(lost, accounts, SAMPLE_SHARE).require()
    of_step = [s.sample_ns / max(1, s.end_ns - s.begin_ns) for s in books.steps if s.decode_tokens]
    rows = sum(s.decode_tokens for s in books.steps)
    each_ns = sum(s.sample_ns for s in books.steps) / max(1, rows)
    return Finding(
        claim=f"Choosing tokens takes {shown.median(of_step) or 0:.0%} of a step (median), {shown.ms(each_ns):.2f} ms "
        f"for each token: {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("sampling, the median step", shown.ms(shown.median(s.sample_ns for s in books.steps) or 0), "ms"),
            Fact("device, the median step", shown.ms(shown.median(s.device_ns for s in books.steps) or 0), "ms"),
            Fact("for each sampled token", shown.ms(each_ns), "ms"),
            Fact("requests' time in it", shown.ms(sum(lost.values())), "ms over all requests"),
        ),
        request_ids=shown.worst(lost),
        step_ids=shown.slowest_steps(s for s in books.steps if s.sample_ns > s.device_ns / 2),
        **share.as_fields,
        confidence=shown.CERTAIN,
        confidence_from="each step's own split, which sums to its length",
        cure=Cure(
            sentence="Ask for less with each token: fewer logprobs (`logprobs`, `top_logprobs`), no penalties, no "
            "logit_bias, no grammar where none is needed, top_k before top_p; temperature 0 is the cheapest."
        ),
        cost="Answers without what is not asked for any more; other draws, where top_k is new.",
        counter_check="With plain requests (temperature 0, nothing else) of the same lengths sampling takes as long.",
        regime="small models, whose steps are short beside what is done with their vocabulary",
    )


WORST_STEPS = 5
_OVERLAP = Cure(
    sentence="Plan the next step while one runs, so that the device finds it in line.",
    flags=("--async-scheduling",),
    elsewhere={"vllm": "--async-scheduling", "sglang": "no --disable-overlap-schedule"},
)
_CAPTURE = Cure(
    sentence="Have decode steps captured, so that each is one launch: leave --enforce-eager out.",
    elsewhere={"vllm": "no --enforce-eager", "sglang": "no --disable-cuda-graph"},
)
_HOST = Cure(sentence="Give the engine process a core of its own: nothing else busy on this machine.")


@rule("accounts", "steps", root_of=("overload", "slot_bound"), explains=(Computed.HOST,))
def device_idle(books: Books) -> Answer:
    """A card has nothing to do between steps, or is told single launches as slowly as it does them."""
    device = device_time(books.steps)
    if device is None:
        return None
    waiting = min(1.0, (device.gap_ns + device.paced_ns) / max(1, device.elapsed_ns))
    accounts = shown.served(books.accounts)
    computing = shown.times_ns(accounts, _COMPUTING)
    share = of_requests({name: ns * waiting for name, ns in computing.items()}, accounts).require()
    rows = sum(len(step.rows) for step in books.steps) / len(books.steps)
    return Finding(
        claim=_claim(device),
        evidence=_evidence(books, device),
        request_ids=shown.worst(computing),
        step_ids=_waited_for(books),
        **share.as_fields,
        confidence=shown.LIKELY if device.paced_ns > device.gap_ns else shown.CERTAIN,
        confidence_from="the device's own marks at each step's begin and end; of steps told launch by launch, that "
        "telling took as long as doing",
        cure=_device_cure(books, device),
        cost="A request that ends is noticed a step later." if _is_off(books, "async_scheduling") else "None known.",
        counter_check="With the change the device waits as long between steps, and tokens a second stay.",
        regime=f"steps of about {rows:.0f} rows; what the host takes is the same for larger ones, which take longer",
    )


def _claim(device: DeviceTime) -> str:
    told = f"Of {device.elapsed_ns / 1e9:.1f} s of steps the card waited {device.gap_share:.0%} for the next one"
    paced = device.paced_ns / max(1, device.elapsed_ns)
    return f"{told}, and {paced:.0%} went at the pace of single launches." if paced >= 0.01 else f"{told}."


def _evidence(books: Books, device: DeviceTime) -> tuple[Fact, ...]:
    enqueued_ms = shown.ms(device.enqueue_ns / device.num_steps)
    return (
        Fact("device at work", f"{device.busy_share:.1%}", "of the steps' time"),
        Fact("device waiting between steps", f"{device.gap_share:.1%}", "of the steps' time"),
        Fact("a step's work, mean", shown.ms(device.busy_ns / device.num_steps), "ms"),
        Fact("the host takes to launch a step, mean", enqueued_ms, "ms"),
        Fact("captured", f"{device.captured_share:.0%}", "of the steps"),
        Fact("padding", f"{device.padded_share:.0%}", "of captured rows"),
        Fact("async_scheduling", str(shown.setting(books, "async_scheduling"))),
        Fact("enforce_eager", str(shown.setting(books, "enforce_eager"))),
    )


def _device_cure(books: Books, device: DeviceTime) -> Cure:
    """What costs more first."""
    if device.paced_ns > device.gap_ns and not _is_off(books, "enforce_eager"):
        return _CAPTURE
    if _is_off(books, "async_scheduling"):
        return _OVERLAP
    return _HOST if _is_off(books, "enforce_eager") else _CAPTURE


def _is_off(books: Books, name: str) -> bool:
    return shown.setting(books, name) is False


def _waited_for(books: Books) -> tuple[int, ...]:
    def waited_ns(step: StepRecord) -> int:
        return step.gap_ns + (step.busy_ns if is_paced(step) else 0)

    longest = sorted(books.steps, key=lambda step: -waited_ns(step))[:WORST_STEPS]
    return tuple(step.step_id for step in longest if waited_ns(step))
