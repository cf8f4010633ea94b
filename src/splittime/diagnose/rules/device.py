"""Choosing tokens that takes as long as computing them, and a device apart from the host that the host keeps waiting,
by the device's own marks (`ledger.device_time`)."""

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, rule
from splittime.diagnose.rules.evidence import (
    CERTAIN,
    LIKELY,
    in_stages,
    median,
    ms,
    served,
    setting,
    slowest_steps,
    times_ns,
    worst,
)
from splittime.diagnose.rules.share import of_requests
from splittime.ledger.device_time import DeviceTime, device_time, is_paced
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord

SAMPLE_SHARE = 0.2  # of the requests' time: an argmax or a plain draw takes a few hundredths


@rule("accounts", "steps", root_of=("overload", "slot_bound"), explains=(Computed.SAMPLE,), reads=("sample_ns",))
def sampling_bound(books: Books) -> Answer:
    """Choosing the tokens takes a large part of each step."""
    accounts = served(books.accounts)
    lost = attribution(books).of(Computed.SAMPLE)
    share = of_requests(lost, accounts, SAMPLE_SHARE)
    if not share.is_worth_it:
        return share.unsure()
    of_step = [s.sample_ns / max(1, s.end_ns - s.begin_ns) for s in books.steps if s.decode_tokens]
    rows = sum(s.decode_tokens for s in books.steps)
    each_ns = sum(s.sample_ns for s in books.steps) / max(1, rows)
    return Finding(
        claim=f"Choosing tokens takes {median(of_step) or 0:.0%} of a step (median), {ms(each_ns):.2f} ms for each "
        f"token: {share.value:.0%} of all requests' time.",
        evidence=(
            Fact("sampling, the median step", ms(median(s.sample_ns for s in books.steps) or 0), "ms"),
            Fact("device, the median step", ms(median(s.device_ns for s in books.steps) or 0), "ms"),
            Fact("for each sampled token", ms(each_ns), "ms"),
            Fact("requests' time in it", ms(sum(lost.values())), "ms over all requests"),
        ),
        request_ids=worst(lost),
        step_ids=slowest_steps(s for s in books.steps if s.sample_ns > s.device_ns / 2),
        **share.as_fields,
        confidence=CERTAIN,
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
_COMPUTING = in_stages(Stage.PREFILL, Stage.DECODE, Stage.RECOMPUTE, Stage.PREFILL_STALL, Stage.DECODE_STALL)
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
    accounts = served(books.accounts)
    computing = times_ns(accounts, _COMPUTING)
    share = of_requests({name: ns * waiting for name, ns in computing.items()}, accounts)
    if not share.is_worth_it:
        return share.unsure()
    rows = sum(len(step.rows) for step in books.steps) / len(books.steps)
    return Finding(
        claim=_claim(device),
        evidence=_evidence(books, device),
        request_ids=worst(computing),
        step_ids=_waited_for(books),
        **share.as_fields,
        confidence=LIKELY if device.paced_ns > device.gap_ns else CERTAIN,
        confidence_from="the device's own marks at each step's begin and end; of steps told launch by launch, that "
        "telling took as long as doing",
        cure=_cure(books, device),
        cost="A request that ends is noticed a step later." if _is_off(books, "async_scheduling") else "None known.",
        counter_check="With the change the device waits as long between steps, and tokens a second stay.",
        regime=f"steps of about {rows:.0f} rows; what the host takes is the same for larger ones, which take longer",
    )


def _claim(device: DeviceTime) -> str:
    told = f"Of {device.elapsed_ns / 1e9:.1f} s of steps the card waited {device.gap_share:.0%} for the next one"
    paced = device.paced_ns / max(1, device.elapsed_ns)
    return f"{told}, and {paced:.0%} went at the pace of single launches." if paced >= 0.01 else f"{told}."


def _evidence(books: Books, device: DeviceTime) -> tuple[Fact, ...]:
    enqueued_ms = ms(device.enqueue_ns / device.num_steps)
    return (
        Fact("device at work", f"{device.busy_share:.1%}", "of the steps' time"),
        Fact("device waiting between steps", f"{device.gap_share:.1%}", "of the steps' time"),
        Fact("a step's work, mean", ms(device.busy_ns / device.num_steps), "ms"),
        Fact("the host takes to launch a step, mean", enqueued_ms, "ms"),
        Fact("captured", f"{device.captured_share:.0%}", "of the steps"),
        Fact("padding", f"{device.padded_share:.0%}", "of captured rows"),
        Fact("async_scheduling", str(setting(books, "async_scheduling"))),
        Fact("enforce_eager", str(setting(books, "enforce_eager"))),
    )


def _cure(books: Books, device: DeviceTime) -> Cure:
    """What costs more first."""
    if device.paced_ns > device.gap_ns and not _is_off(books, "enforce_eager"):
        return _CAPTURE
    if _is_off(books, "async_scheduling"):
        return _OVERLAP
    return _HOST if _is_off(books, "enforce_eager") else _CAPTURE


def _is_off(books: Books, name: str) -> bool:
    return setting(books, name) is False


def _waited_for(books: Books) -> tuple[int, ...]:
    def waited_ns(step: StepRecord) -> int:
        return step.gap_ns + (step.busy_ns if is_paced(step) else 0)

    longest = sorted(books.steps, key=lambda step: -waited_ns(step))[:WORST_STEPS]
    return tuple(step.step_id for step in longest if waited_ns(step))
