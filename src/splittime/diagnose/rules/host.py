"""The machine around the model: a host that keeps the device waiting, pauses, slow tokenising."""

from collections.abc import Sequence

import numpy

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Abstention, Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules import step_cost
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    in_stages,
    median,
    ms,
    overlap_ns,
    served,
    setting,
    slowest_steps,
    times_ns,
    union,
    worst,
)
from splittime.diagnose.rules.share import Share, of_requests
from splittime.diagnose.timeline import Part, timeline
from splittime.ledger.account import ClosedAccount
from splittime.ledger.device_time import device_time
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord

NATIVE_IN_THEIR_PLACE = ("torch", "reference")  # not a card's; and native ones multiply no fp8
HOST_SHARE = 0.5  # of busy time: the device waits longer than it works; a small model (4 M parameters) is at a third
ODD_TIMES = 4.0  # what the host took of a step counts up to so many times the median: beyond, the process was put aside
GROWS_SHARE = 0.5  # of what the host takes: then it is what is to be cured
RENDER_SHARE = 0.5  # of rendering and tokenising: then the template is what is to be cured
PAUSE_SHARE = 0.02  # pauses hit everybody at once and at the worst moment: less of them is felt
LONG_PAUSE_NS = 100_000_000  # as long as a whole answer of a fast server's first token
MIN_LONG_PAUSES = 3  # of these, whatever their share is

_COMPUTING = in_stages(Stage.PREFILL, Stage.DECODE, Stage.RECOMPUTE, Stage.PREFILL_STALL, Stage.DECODE_STALL)


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
    share = of_requests(found.of(Computed.HOST), served(books.accounts))
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
    kernels = str(setting(books, "kernels") or "")
    grows = answers_part(books)
    return Finding(
        claim=f"Of {worked_ns / 1e9:.1f} s of work the device waited {host_share:.0%} for the host, most "
        f"of it in {_HOST_PARTS[largest]}."
        + (f" {grows:.0%} of that grows with the answers' length." if grows >= GROWS_SHARE else ""),
        evidence=(
            *(Fact(meaning, f"{parts[name] / busy_ns:.1%}", "of busy time") for name, meaning in _HOST_PARTS.items()),
            Fact("host, the median step", ms(median(map(_host_ns, books.steps)) or 0), "ms"),
            Fact("device, the median step", ms(median(step.device_ns for step in books.steps) or 0), "ms"),
            Fact("rows in a step, mean", round(rows, 1)),
            Fact("kernels", kernels or "not told"),
            Fact("the host's part that grows with the tokens of the answers so far", f"{grows:.0%}"),
        ),
        request_ids=worst(times_ns(served(books.accounts), _COMPUTING)),
        step_ids=slowest_steps(step for step in books.steps if step.host_gap_ns + step.launch_ns > step.device_ns),
        **share.as_fields,
        confidence=CERTAIN if largest != "host_gap_ns" else LIKELY,
        confidence_from="each step's own split, which sums to its length",
        cure=_cure(
            kernels not in NATIVE_IN_THEIR_PLACE or setting(books, "quantization") == "fp8", grows >= GROWS_SHARE
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
    most_ns = ODD_TIMES * (median(host_ns) or 0.0)
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
    accounts = served(books.accounts)
    pauses = [(process.name, b, b + ns) for process in books.facts.processes for b, ns in process.pauses]
    if books.engine and not pauses:
        return Abstention(why=f"cannot tell: {books.facts.engine} does not say when its garbage is collected")
    spans = union((begin_ns, end_ns) for _, begin_ns, end_ns in pauses)
    held = {a.request_id: float(overlap_ns(a.start_ns, a.end_ns, spans)) for a in accounts}
    held = {request_id: ns for request_id, ns in held.items() if ns > 0}
    share = of_requests(held, accounts, PAUSE_SHARE)
    felt = [(name, end_ns - begin_ns) for name, begin_ns, end_ns in pauses if _meets(begin_ns, end_ns, accounts)]
    longest_ns = max((ns for _, ns in felt), default=0)
    if not share.is_worth_it and sum(ns >= LONG_PAUSE_NS for _, ns in felt) < MIN_LONG_PAUSES:
        return share.unsure()
    where = " and ".join(sorted({name for name, _ in felt}))
    return Finding(
        claim=f"{len(felt)} collections of garbage in the {where} process, up to {ms(longest_ns):.0f} ms, held up "
        f"{len(held)} requests: {share.value:.1%} of all requests' time.",
        evidence=(
            Fact("collections of a millisecond or more", len(felt)),
            Fact("the longest", ms(longest_ns), "ms"),
            Fact("requests' time in them", ms(sum(held.values())), "ms over all requests"),
        ),
        request_ids=worst(held),
        step_ids=slowest_steps(s for s in books.steps if overlap_ns(s.begin_ns - s.host_gap_ns, s.end_ns, spans)),
        **share.as_fields,
        confidence=CERTAIN,
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
    accounts = served(books.accounts)
    taken = times_ns(accounts, in_stages(Stage.TOKENIZE, Stage.TOKENIZE_QUEUE))
    share = of_requests(taken, accounts)
    if not share.is_worth_it:
        return share.unsure()
    waited = times_ns(accounts, in_stages(Stage.TOKENIZE_QUEUE))
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
            Fact("tokenising and waiting for it", ms(sum(taken.values())), "ms over all requests"),
            Fact("of it waiting", ms(sum(waited.values())), "ms over all requests"),
            Fact("of it in the chat template", ms(rendered_ns), "ms over all requests"),
            Fact("median of a request", ms(median(taken.values()) or 0), "ms"),
            Fact("prompt tokens", tokens, "tokens"),
            Fact("of them from the prefix cache", sum(account.cached_tokens for account in accounts), "tokens"),
        ),
        request_ids=worst(taken),
        **share.as_fields,
        confidence=CERTAIN,
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
