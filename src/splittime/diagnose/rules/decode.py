"""What the device itself is bound by, held against the floor of each step (`diagnose.floor`). These are limits, not
illnesses: a healthy server is always bound by something, and what helps depends on the batch.

    crossover batch = time to read the weights / time to multiply one token

Below it a step takes as long as reading the weights takes, however few rows share them; above it every row costs its
products, and fewer bytes no longer help (weight-only 4-bit was found slower than 16-bit from about 64 rows on: vllm
issue 3399, AutoAWQ issue 235).
"""

from collections.abc import Sequence

from splittime.diagnose.agree import BYTES_OF
from splittime.diagnose.attribution import Computed, attribution
from splittime.diagnose.books import Books
from splittime.diagnose.finding import Answer, Cure, Fact, Finding, rule
from splittime.diagnose.floor import Bound, FloorGroup, Kind, floors, read_bytes_per_s, sentence
from splittime.diagnose.rules.evidence import LIKELY, served, setting, slowest_steps, threads_and_cores
from splittime.diagnose.rules.share import MIN_SHARE, Share, of_requests
from splittime.ledger.stages import Stage

MIN_LIMIT_SHARE = 0.3  # of the requests' time: a limit is told when it is where the time goes
MIN_OF_CEILING = 0.5  # a step at less than half of a ceiling is not held by it, where no smaller kind of bytes is known
MIN_SAVED = 0.1  # of a step: what a cure saves at the least, by the best rate at which this machine was seen to read

_COMPUTED = (Stage.PREFILL, Stage.DECODE, Stage.RECOMPUTE, Computed.OTHERS_PROMPTS)


def _bound_by(books: Books, bound: Bound, kept: float = 1.0) -> tuple[list[FloorGroup], Share]:
    """The groups of steps that are held by this ceiling, and their share of the requests' time. kept: of the bytes,
    with the cure; how much it saves decides then, since a ceiling is of the machine's best moment and reading may take
    longer, never less.

    What is read is also told where it is most of decoding alone: long prompts may have most of the time, and TPOT is
    felt by itself."""
    groups = floors(books.steps, books.facts)
    held = [g for g in groups if g.bound is bound and _is_held(g, bound, kept)]
    share = _share(books, _COMPUTED, _part(held, groups), MIN_LIMIT_SHARE)
    decoding, held_decoding = ([g for g in of if g.kind is Kind.DECODE] for of in (groups, held))
    of_decoding = _part(held_decoding, decoding)
    if share.is_worth_it or bound is Bound.COMPUTE or of_decoding < MIN_LIMIT_SHARE:
        return held, share
    return held_decoding, _share(books, (Stage.DECODE,), of_decoding, MIN_SHARE)


def _part(some: Sequence[FloorGroup], groups: Sequence[FloorGroup]) -> float:
    return sum(group.device_ns for group in some) / max(1, sum(group.device_ns for group in groups))


def _share(books: Books, owners: Sequence[str], part: float, least: float) -> Share:
    """Returns how much of the requests' time these owners have."""
    lost = {request_id: ns * part for request_id, ns in attribution(books).of(*owners).items() if part}
    return of_requests(lost, served(books.accounts), least)


def _is_held(group: FloorGroup, bound: Bound, kept: float) -> bool:
    """Products hold a step at the rate of the server's kernels, whatever the processor could do."""
    saved_ns = group.device_ns - _then_ns(group, bound, kept)
    share = group.attained if bound is Bound.COMPUTE else group.share
    return (share or 0.0) >= MIN_OF_CEILING or saved_ns >= MIN_SAVED * max(1, group.device_ns)


def _then_ns(group: FloorGroup, bound: Bound, kept: float) -> float:
    """What the steps would take with so much of the bytes: the rest of them, and at least their products."""
    read_ns = min(_read_ns(group, bound), group.device_ns)
    return max(group.device_ns - read_ns * (1 - kept), float(min(group.operations_ns, group.device_ns)))


def _kept(now: str | None, smaller: str | None) -> float:
    """Returns the ratio of the bytes, where both dtypes are known and the second is smaller."""
    before, after = BYTES_OF.get(now or ""), BYTES_OF.get(smaller or "")
    return after / before if before and after and after < before else 1.0


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
    return tuple(Fact(f"{group.num_steps} steps", sentence(group)) for group in groups[:3])


def _read_share(groups: Sequence[FloorGroup], bound: Bound) -> str:
    """Returns the share of the steps' time that reading what they are bound by takes, without what else they read."""
    device_ns = sum(group.device_ns for group in groups)
    return f"{min(1.0, sum(_read_ns(group, bound) for group in groups) / max(1, device_ns)):.0%}"


def _read_ns(group: FloorGroup, bound: Bound) -> int:
    return group.weights_ns if bound is Bound.WEIGHTS else group.kv_ns


def _kv_dtype(books: Books) -> str:
    """Returns the type of the KV cache: that of the weights where none is set."""
    told = setting(books, "kv_cache_dtype")
    return str(setting(books, "dtype") if told in (None, "auto") else told)


def _limit(
    claim: str,
    share: Share,
    groups: Sequence[FloorGroup],
    books: Books,
    more: tuple[Fact, ...] = (),
    **told: object,
) -> Finding:
    lows, highs = zip(*(group.rows for group in groups), strict=True)
    within = [s for s in books.steps if min(lows) <= len(s.rows) <= max(highs)]
    return Finding(
        claim=claim,
        evidence=(*_evidence(groups), *more),
        step_ids=slowest_steps(within),
        share_of_time=share.value,
        share_interval=share.interval,
        confidence=LIKELY,
        confidence_from="the step's bytes and operations over this machine's measured ceilings: an estimate",
        is_limit=True,
        **told,  # type: ignore[arg-type]
    )


def _expected(groups: Sequence[FloorGroup], smaller: str | None, bound: Bound, kept: float) -> tuple[Fact, ...]:
    """What a step of the first group would take with fewer bytes. The bytes are read at the best rate that was seen, or
    slower, so the cure saves this much at the least; at the most all but the other kind's bytes shrinks with them."""
    if kept == 1.0:
        return ()
    group = groups[0]
    others_ns = min(group.bytes_ns - _read_ns(group, bound), group.device_ns)
    least_ns = max(others_ns + kept * (group.device_ns - others_ns), float(group.operations_ns))
    then_ns = _then_ns(group, bound, kept)
    span = f"{min(least_ns, then_ns) / group.num_steps / 1e6:.3g} to {then_ns / group.num_steps / 1e6:.3g}"
    told = f"{span} instead of {group.device_ns / group.num_steps / 1e6:.3g}"
    what = f"a step's time on the device with {smaller} ({kept:.2g} of the bytes), expected"
    return (Fact(what, told, "ms: so much less for each token"),)


@rule("accounts", "steps", "floor")
def weight_bandwidth_bound(books: Books) -> Answer:
    """Decoding takes as long as reading the weights from memory takes."""
    now = setting(books, "quantization")
    smaller = {None: "int8", "int8": "int4"}.get(now)
    kept = _kept(now or setting(books, "dtype"), smaller)
    groups, share = _bound_by(books, Bound.WEIGHTS, kept)
    if not share.is_worth_it:
        return share.unsure()
    crossover = crossover_rows(books)
    until = f"up to about {crossover:.0f} rows" if crossover is not None else "small batches"
    cure = Cure(sentence="Share the weights among more rows (more requests at once), or take a smaller model.")
    if smaller is not None:
        cure = Cure(
            sentence=f"Read fewer bytes: {smaller} weights.",
            flags=("--quantization", smaller),
            elsewhere={"vllm": "an AWQ or GPTQ checkpoint", "sglang": "--quantization", "llama.cpp": "a Q4_K_M file"},
        )
    return _limit(
        f"{share.value:.0%} of the requests' time is decoding that waits for the weights to be read from memory, "
        f"for {_read_share(groups, Bound.WEIGHTS)} of a step at the least.",
        share,
        groups,
        books,
        cure=cure,
        cost="Rounded weights change answers a little: see the routes in BENCHMARKS.md for perplexity and KL."
        if smaller is not None
        else "Larger batches lengthen TPOT; a smaller model answers worse.",
        more=_expected(groups, smaller, Bound.WEIGHTS, kept),
        counter_check="With weights of half the bytes TPOT p50 at the same batch does not fall by a quarter.",
        regime=f"{until}; beyond, products bind, and at 64 rows smaller weights gain nothing or cost time",
    )


@rule("accounts", "steps", "floor")
def kv_bandwidth_bound(books: Books) -> Answer:
    """Decoding takes as long as reading the cached keys and values takes."""
    is_small = setting(books, "kv_cache_dtype") == "int8"
    kept = 1.0 if is_small else _kept(_kv_dtype(books), "int8")
    groups, share = _bound_by(books, Bound.KV, kept)
    if not share.is_worth_it:
        return share.unsure()
    cure = Cure(sentence="Shorten the context, or take a model with fewer KV heads (GQA, MQA).")
    if not is_small:
        cure = Cure(
            sentence="Read fewer bytes: an int8 KV cache.",
            flags=("--kv-cache-dtype", "int8"),
            elsewhere={"vllm": "--kv-cache-dtype fp8", "sglang": "--kv-cache-dtype fp8_e5m2"},
        )
    return _limit(
        f"{share.value:.0%} of the requests' time is decoding that waits for keys and values to be read from memory, "
        f"for {_read_share(groups, Bound.KV)} of a step at the least.",
        share,
        groups,
        books,
        cure=cure,
        cost="int8 KV rounds keys and values: check answers at long contexts, where it matters most.",
        more=_expected(groups, "int8", Bound.KV, kept),
        counter_check="With an int8 cache TPOT p50 at the same contexts does not fall by a fifth.",
        regime="large batches of long contexts; at one short request the weights are more bytes than the KV",
    )


@rule("accounts", "steps", "floor")
def compute_bound(books: Books) -> Answer:
    """Steps take as long as their multiplications take."""
    groups, share = _bound_by(books, Bound.COMPUTE)
    if not share.is_worth_it:
        return share.unsure()
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
        f"{share.value:.0%} of the requests' time is steps that are bound by multiplications.",
        share,
        groups,
        books,
        cure=Cure(sentence=sentence, flags=flags, elsewhere=elsewhere),
        cost=_cost(threads < cores, bool(flags)),
        counter_check="With half the prompt tokens a step these steps do not take about half as long.",
        regime="prompts, and decoding in batches above the crossover; at batch 1 memory binds, not products",
    )


def _are_threads_meant(books: Books) -> str:
    """Who has settled their number, so that no other is prescribed; empty if a rule has. `num_threads_reason` is the
    runner's sentence (`runner.threads`, `runner.machine`)."""
    reason = str(setting(books, "num_threads_reason") or "")
    if reason.startswith("measured"):
        return "what was fastest when it was measured at start"
    return "what was asked for" if "as asked" in reason else ""


def _cost(has_spare_cores: bool, takes_them: bool) -> str:
    if takes_them:
        return "Small steps gain less from a second thread than waiting for it costs."
    return "Memory for the weights once more." if has_spare_cores else "A second machine."
