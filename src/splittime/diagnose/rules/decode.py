"""What the device itself is bound by, held against the floor of each step (`diagnose.floor`). These are limits, not
illnesses: a healthy server is always bound by something, and what helps depends on the batch.

    crossover batch = time to read the weights / time to multiply one token

Below it a step takes as long as reading the weights takes, however few rows share them; above it every row costs its
products, and fewer bytes no longer help (weight-only 4-bit was found slower than 16-bit from about 64 rows on: vllm
issue 3399, AutoAWQ issue 235).
"""

from collections.abc import Sequence
from typing import NamedTuple

from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import BYTES_OF, Abstention, Answer, Cure, Fact, Finding, RuleEnd, rule
from splittime.diagnose.floor import Bound, FloorGroup, Kind, floors, read_bytes_per_s, sentence
from splittime.diagnose.rules.evidence import (
    LIKELY,
    MIN_SHARE,
    Share,
    of_requests,
    served,
    setting,
    slowest_steps,
    threads_and_cores,
)
from splittime.ledger.stages import Stage

MIN_PART = 0.3  # of the steps' time, that a ceiling takes: a limit is told where the time goes
MIN_OF_CEILING = 0.6  # a step at little more than half of a ceiling has other reasons
BEYOND, ODD = 1.2, 0.1  # times the ceiling, for so much of such steps' time: more shows that it is none

_COMPUTED = (Stage.PREFILL, Stage.DECODE, Stage.RECOMPUTE, Computed.OTHERS_PROMPTS)


class NearCeiling(NamedTuple):
    """The groups of steps that run near this ceiling, and what it takes of the requests' time at the least."""

    bound: Bound
    groups: list[FloorGroup]
    share: Share

    @property
    def of_step(self) -> float:
        """What the ceiling takes of such a step, at the least."""
        return sum(min(_own_ns(g, self.bound), g.device_ns) for g in self.groups) / max(1, _device_ns(self.groups))

    def require(self) -> "NearCeiling":
        """Returns itself. Raises `RuleEnd` where there is nothing to tell, and where steps beyond a ceiling show that
        it is none, if they are most, or far beyond: it was measured in a worse moment, or counts what rows share for
        each.
        """
        self.share.require()
        beyond = [group for group in self.groups if _nearness(group, self.bound) > 1]
        far = [group for group in beyond if _nearness(group, self.bound) > BEYOND]
        if _device_ns(far) >= ODD * _device_ns(self.groups) or _device_ns(beyond) >= _device_ns(self.groups) / 2:
            why = f"what was measured as this machine's ceiling is none: {sentence(beyond[0])}"
            raise RuleEnd(Abstention(why=why))
        return self


def _held_by(books: Books, bound: Bound) -> NearCeiling:
    """Reading is told of decoding alone, whose every step reads it all: of prompts it is a small part. Where it is most
    of decoding it is told though prompts have most of the time, as TPOT is felt by itself."""
    is_reading = bound is not Bound.COMPUTE
    groups = [g for g in floors(books.steps, books.facts) if g.kind is Kind.DECODE or not is_reading]
    held = [g for g in groups if g.bound is bound and _nearness(g, bound) >= MIN_OF_CEILING]
    part = sum(min(_own_ns(g, bound), g.device_ns) for g in held) / max(1, _device_ns(groups))
    owners, least = ((Stage.DECODE,), MIN_SHARE) if is_reading else (_COMPUTED, MIN_PART)
    lost = {request_id: ns * part for request_id, ns in attribution(books).of(*owners).items() if part >= MIN_PART}
    return NearCeiling(bound, held, of_requests(lost, served(books.accounts), least))


def _device_ns(groups: Sequence[FloorGroup]) -> int:
    return sum(group.device_ns for group in groups)


def _nearness(group: FloorGroup, bound: Bound) -> float:
    """Returns the share of the ceiling: of memory's with all that is read, of products' at the kernels' own rate."""
    return (group.operations_ns if bound is Bound.COMPUTE else group.bytes_ns) / max(1, group.device_ns)


def _own_ns(group: FloorGroup, bound: Bound) -> int:
    """Returns the time of what the steps are bound by, at the ceiling."""
    return {Bound.WEIGHTS: group.weights_ns, Bound.KV: group.kv_ns}.get(bound, group.operations_ns)


def _kept(now: str | None, smaller: str | None) -> float:
    """Returns the ratio of the bytes, where both dtypes are known and the second is smaller."""
    before, after = BYTES_OF.get(now or ""), BYTES_OF.get(smaller or "")
    return after / before if before and after and after < before else 1.0


def _weights(books: Books) -> tuple[str, str]:
    """Returns the format of a checkpoint that came quantised, "" for another's, and what the layers are kept in: by
    what was loaded, by the settings only where that is not told."""
    told = str(setting(books, "weights") or setting(books, "quantization") or setting(books, "dtype") or "")
    form, _, kept = told.rpartition(": ") if ": " in told else ("", "", told)
    return form, (kept.replace(",", " ").replace(";", " ").split() or [""])[0]


def crossover_rows(books: Books) -> float | None:
    """The batch from which products, not weights, bind a decode step."""
    facts = books.facts
    if facts is None or facts.cost is None or facts.machine is None:
        return None
    cost, machine = facts.cost, facts.machine
    if not machine.read_bytes_per_s or not machine.operations_per_s:
        return None
    rate = read_bytes_per_s(machine, cost.weight_bytes)
    token_s = (cost.operations_per_token + cost.operations_per_sample) / machine.operations_per_s
    return cost.weight_bytes / rate / token_s if token_s > 0 and rate else None


def _evidence(groups: Sequence[FloorGroup]) -> tuple[Fact, ...]:
    """The groups that take most of the time, in their own words."""
    told = [group for group in groups if (group.share or 0) <= 1]
    return tuple(Fact(f"{group.num_steps} steps", sentence(group)) for group in told[:3])


def _kv_dtype(books: Books) -> str:
    """Returns the type of the KV cache: that of the weights where none is set."""
    told = setting(books, "kv_cache_dtype")
    return str(setting(books, "dtype") if told in (None, "auto") else told)


def _limit(claim: str, held: NearCeiling, books: Books, more: tuple[Fact, ...] = (), **told: object) -> Finding:
    lows, highs = zip(*(group.rows for group in held.groups), strict=True)
    within = [s for s in books.steps if min(lows) <= len(s.rows) <= max(highs)]
    return Finding(
        claim=claim,
        evidence=(*_evidence(held.groups), *more),
        step_ids=slowest_steps(within),
        share_of_time=held.share.value,
        share_interval=held.share.interval,
        confidence=LIKELY,
        confidence_from="the step's bytes and operations over this machine's measured ceilings: an estimate",
        is_limit=True,
        **told,  # type: ignore[arg-type]
    )


def _expected(held: NearCeiling, smaller: str | None, kept: float) -> tuple[Fact, ...]:
    """What a step of the first group would take with fewer bytes. The bytes are read at the best rate that was seen, or
    slower, so the cure saves this much at the least; at the most all but the other kind's bytes shrinks with them."""
    if kept == 1.0:
        return ()
    group = held.groups[0]
    own_ns, products_ns = _own_ns(group, held.bound), float(min(group.operations_ns, group.device_ns))
    others_ns = min(group.bytes_ns - own_ns, group.device_ns)
    least_ns = max(others_ns + kept * (group.device_ns - others_ns), products_ns)
    then_ns = max(group.device_ns - min(own_ns, group.device_ns) * (1 - kept), products_ns)
    span = f"{min(least_ns, then_ns) / group.num_steps / 1e6:.3g} to {then_ns / group.num_steps / 1e6:.3g}"
    told = f"{span} instead of {group.device_ns / group.num_steps / 1e6:.3g}"
    what = f"a step's time on the device with {smaller} ({kept:.2g} of the bytes), expected"
    return (Fact(what, told, "ms: so much less for each token"),)


@rule("accounts", "steps", "floor")
def weight_bandwidth_bound(books: Books) -> Answer:
    """Decoding takes as long as reading the weights from memory takes."""
    held = _held_by(books, Bound.WEIGHTS).require()
    form, now = _weights(books)
    smaller = None if form else {"float32": "int8", "bfloat16": "int8", "float16": "int8", "int8": "int4"}.get(now)
    crossover = crossover_rows(books)
    until = f"up to about {crossover:.0f} rows" if crossover is not None else "small batches"
    return _limit(
        f"{held.share.value:.0%} of the requests' time is decoding that reads the weights from memory, "
        f"{held.of_step:.0%} of such a step at the least.",
        held,
        books,
        cure=_fewer_bytes(form, smaller),
        cost="Rounded weights change answers a little: see the routes in BENCHMARKS.md for perplexity and KL."
        if smaller is not None
        else "Larger batches lengthen TPOT; a smaller model answers worse.",
        more=_expected(held, smaller, _kept(now, smaller)),
        counter_check="With weights of half the bytes TPOT p50 at the same batch does not fall by a quarter.",
        regime=f"{until}; beyond, products bind, and at 64 rows smaller weights gain nothing or cost time",
    )


def _fewer_bytes(form: str, smaller: str | None) -> Cure:
    if smaller is None:
        another = f", or another {form} checkpoint, of fewer bits (this one is served as it is)" if form else ""
        return Cure(
            sentence=f"Share the weights among more rows (more requests at once), or take a smaller model{another}."
        )
    return Cure(
        sentence=f"Read fewer bytes: {smaller} weights.",
        flags=("--quantization", smaller),
        elsewhere={"vllm": "an AWQ or GPTQ checkpoint", "sglang": "--quantization", "llama.cpp": "a Q4_K_M file"},
    )


@rule("accounts", "steps", "floor")
def kv_bandwidth_bound(books: Books) -> Answer:
    """Decoding takes as long as reading the cached keys and values takes."""
    held = _held_by(books, Bound.KV).require()
    kept = _kept(_kv_dtype(books), "int8")
    cure = Cure(sentence="Shorten the context, or take a model with fewer KV heads (GQA, MQA).")
    if kept < 1:
        cure = Cure(
            sentence="Read fewer bytes: an int8 KV cache.",
            flags=("--kv-cache-dtype", "int8"),
            elsewhere={"vllm": "--kv-cache-dtype fp8", "sglang": "--kv-cache-dtype fp8_e5m2"},
        )
    return _limit(
        f"{held.share.value:.0%} of the requests' time is decoding that reads keys and values from memory, "
        f"{held.of_step:.0%} of such a step at the least.",
        held,
        books,
        cure=cure,
        cost="int8 KV rounds keys and values: check answers at long contexts, where it matters most."
        if kept < 1
        else "Answers without what is not in the context any more; a smaller model may answer worse.",
        more=_expected(held, "int8", kept),
        counter_check="With an int8 cache TPOT p50 at the same contexts does not fall by a fifth.",
        regime="large batches of long contexts; at one short request the weights are more bytes than the KV",
    )


@rule("accounts", "steps", "floor")
def compute_bound(books: Books) -> Answer:
    """Steps take as long as their multiplications take."""
    held = _held_by(books, Bound.COMPUTE).require()
    threads, cores = threads_and_cores(books)
    is_meant = _are_threads_meant(books)
    flags: tuple[str, ...] = ()
    sentence = "Compute less (share prefixes, shorten prompts) or elsewhere too (a second server)."
    if threads < cores and not is_meant:
        flags, sentence = ("--num-threads", str(cores)), f"Use all {cores} cores; the server uses {threads}."
    elif threads < cores:
        sentence = f"Compute less (share prefixes, shorten prompts), or let a second server use the {cores - threads} "
        sentence += f"other core{'s' * (cores - threads > 1)}: {threads} of {cores} threads is {is_meant}."
    elsewhere = {} if flags else {"vllm": "an FP8 or W8A8 checkpoint", "sglang": "--quantization w8a8_int8"}
    return _limit(
        f"{held.share.value:.0%} of the requests' time is multiplying at the rate of the server's kernels, "
        f"{held.of_step:.0%} of such a step at the least.",
        held,
        books,
        cure=Cure(sentence=sentence, flags=flags, elsewhere=elsewhere),
        cost=_cost(threads < cores, bool(flags)),
        counter_check="With half the prompt tokens a step these steps do not take about half as long.",
        regime="prompts, and decoding in batches above the crossover; at batch 1 memory binds, not products",
    )


def _are_threads_meant(books: Books) -> str:
    """Who has settled their number, so that no other is prescribed; empty if a rule has. `num_threads_reason` is the
    runner's sentence (`runner.start_memory`, `runner.machine`)."""
    reason = str(setting(books, "num_threads_reason") or "")
    if reason.startswith("measured"):
        return "what was fastest when it was measured at start"
    return "what was asked for" if "as asked" in reason else ""


def _cost(has_spare_cores: bool, takes_them: bool) -> str:
    if takes_them:
        return "Small steps gain less from a second thread than waiting for it costs."
    return "Memory for the weights once more." if has_spare_cores else "A second machine."
