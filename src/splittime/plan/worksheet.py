"""The worksheet of a plan: from one server's capacity to servers, money and memory, each line with its formula.

    sheet = worksheet("h100", replica, found, PlanTerms(peak=40.0, price=2.5))
    sheet.lines[0].name, .value, .low, .high, .unit, .formula

A line's formula has its inputs in it, so that a reader can work it out again. Low and high come from the capacity's
interval: the more a server carries, the fewer are needed. Spares, and what is paid for them, are counted for the upper
end of the interval.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from splittime.bench.book.metrics import shown, shown_ns
from splittime.bench.book.requests import PER_REQUEST_LIMITS
from splittime.bench.book.slo import SloResult
from splittime.core.errors import ConfigError
from splittime.core.facts import Machine, TokenCost
from splittime.diagnose.floor import read_bytes_per_s
from splittime.ledger.stages import CAUSE_MEANING, STAGE_MEANING
from splittime.plan.capacity import Capacity, RateTrial
from splittime.simulate.replica import AnyReplica


def notes_of(replica: AnyReplica, found: Capacity, has_peak: bool) -> Iterator[str]:
    """Yields a sentence each. has_peak: whether servers were counted."""
    if not has_peak:
        yield "how many servers: give the load's --rate"
    if found.likeliest.stopped is not None:
        yield f"no higher rate was simulated: {found.likeliest.stopped}"
    if not found.rate.middle:
        yield "most of the models that fit as well keep the SLO at no rate: nobody can tell what it costs"
    config = replica.config
    yield (
        f"the scheduler has max_num_seqs {config.max_num_seqs:,}, max_num_batched_tokens "
        f"{config.max_num_batched_tokens:,}, max_model_len {config.max_model_len:,}"
    )
    if replica.guesses_ahead:
        yield "the server guesses tokens ahead; nobody knows what it would guess of these requests, so here it does not"
    if is_from_outside(replica):
        yield from _notes_from_outside(replica.costs.about)
    others = f"{found.draws} others" if found.draws > 1 else "another"
    yield (
        "in brackets: nobody knows exactly what steps take, so the rate was looked for with the likeliest model of "
        f"them and with {others} that fit as well (--draws {found.draws}); yet another would lie within the brackets "
        f"with a probability of {found.share:.0%}, and more draws raise that"
    )
    error = replica.costs.errors.median_relative
    if error and replica.costs.num_steps:
        yield f"step times: the median error of held-out steps is {error:.1%}"
    elif error:
        yield f"step times: no device attains what its sheet says; as good kernels do, give or take {error:.0%}"
    if replica.costs.unsure:
        unsure = ", ".join(replica.costs.unsure)
        yield f"the recorded steps cannot separate the costs of {unsure}; the intervals are wider for that reason"
    yield "requests come when they come, whatever the answers before (an open loop), spread evenly over the servers"


def is_from_outside(replica: AnyReplica) -> bool:
    """Whether `plan.outside` made it, which says how far off its own runs are."""
    return "off" in replica.costs.about


def _notes_from_outside(about: dict[str, Any]) -> Iterator[str]:
    """about: as `plan.outside` tells it."""
    yield "the scheduler's settings are guesses, from what was in flight: give those that you know, as --max-num-seqs"
    off = ", ".join(f"{name.upper()} {share:+.0%}" for name, share in about["off"].items())
    yield f"a simulation of the runs themselves is off by {off} at the median"
    if about["void"]:
        yield f"{about['void']} of {about['runs']} runs VOID: the client was at fault (splittime bench report says why)"


PER_MILLION = 1e6
S_PER_HOUR = 3600.0
LEAST_WAIT = 0.1  # a smaller share is not what breaks
WAITS_FOR = {str(name): words for told in (STAGE_MEANING, CAUSE_MEANING) for name, words in told.items()}
SCALED = ("int8", "float8_e4m3fn")  # numbers of the KV cache that have scales beside them
KNEE = "where the SLO begins to break: from the lowest rate that a model kept to the highest that one broke"
BEYOND = "keeps the SLO; more could not be simulated (below), so more may be kept"


MOST_RATE, MOST_REGIONS = 1e9, 1_000  # more is a slip of the pen


class PlanTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What the servers are for. peak: requests a second that all of them carry together. price: of one server for an
    hour. growth: how many times the peak is planned for. regions: each carries its part, and has its own spare.
    start_up_s: what a new server takes until it serves."""

    peak: float | None = None
    price: float | None = None
    currency: str = "$"
    growth: float = 1.0
    regions: int = 1
    start_up_s: float | None = None

    def validate(self) -> "PlanTerms":
        """Raises ConfigError for a term that cannot be."""
        for name, least in (("peak", 0.0), ("price", 0.0), ("growth", 0.0), ("start_up_s", 0.0)):
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                words = "the peak rate" if name == "peak" else name
                raise ConfigError(f"{words} is {value:g}; it must be {least:g} or more", param=name, value=value)
        if not 1 <= self.regions <= MOST_REGIONS:
            words = f"regions is {self.regions}; it must be 1 to {MOST_REGIONS}"
            raise ConfigError(words, param="regions", value=self.regions, limit=MOST_REGIONS)
        if (self.peak or 0.0) * self.growth > MOST_RATE:
            words = f"a peak of {self.peak:g} requests/s, {self.growth:g} times, is more than {MOST_RATE:g} requests/s"
            raise ConfigError(words, param="peak", value=self.peak, limit=MOST_RATE)
        alone = {"growth": self.growth != 1, "regions": self.regions != 1, "start_up": self.start_up_s is not None}
        unused = next((name for name, is_given in alone.items() if is_given and self.peak is None), None)
        if unused is not None:
            raise ConfigError(f"{unused} says nothing without a peak rate", param=unused, hint="Give the load's rate.")
        return self


class SheetLine(msgspec.Struct, frozen=True):
    """A figure of a plan. low, high: its interval, if it has one. is_money: its unit is the price's."""

    name: str
    value: float | str
    unit: str
    formula: str
    low: float | None = None
    high: float | None = None
    is_money: bool = False


class Sheet(msgspec.Struct, frozen=True):
    """A server's plan. source: where its costs come from. notes: its limits, for people."""

    label: str
    source: str
    capacity: Capacity
    lines: tuple[SheetLine, ...]
    notes: tuple[str, ...]


def worksheet(label: str, replica: AnyReplica, found: Capacity, terms: PlanTerms) -> Sheet:
    """Returns the plan of one server. found: what `capacity` says of this replica. Without a peak in `terms` there are
    no lines about servers and money."""
    low, middle, high = found.rate
    most = "the most that keeps the SLO, simulated" if found.likeliest.stopped is None else BEYOND
    lines = [SheetLine("highest rate", middle, "requests/s", f"{most}; {_lengths(found)}", low, high)]
    if terms.peak:
        lines += _of_all(replica, found, terms, terms.peak)
    elif terms.price is not None and middle:
        words = _hourly(terms, terms.price)
        lines += _of_tokens(found, terms, terms.price, words, middle, "in an hour at the highest rate", (low, high))
    lines += [*_of_one(replica, found), *_of_memory(replica, found)]
    return Sheet(label, replica.source, found, tuple(lines), tuple(notes_of(replica, found, bool(terms.peak))))


def _lengths(found: Capacity) -> str:
    """Returns how long a request is, and whence that is known."""
    whence = f", {found.lengths}" if found.lengths else ""
    return f"{found.kept.input_tokens:,.4g} + {found.kept.output_tokens:,.4g} tokens a request in the mean{whence}"


def _of_one(replica: AnyReplica, found: Capacity) -> Iterator[SheetLine]:
    kept = found.kept
    low, middle, high = found.rate
    yield SheetLine("knee", middle, "requests/s", KNEE, *found.knee)
    for name, tokens in (("input", kept.input_tokens), ("output", kept.output_tokens)):
        formula = f"highest rate x {tokens:,.4g} tokens a request"
        yield SheetLine(f"{name} tokens", middle * tokens, "tokens/s", formula, low * tokens, high * tokens)
    broken = found.likeliest.broken
    if broken is not None:
        yield SheetLine(
            "breaks first", first_to_break(broken, found.slo), "", f"at {broken.rate:.3g} requests/s, simulated"
        )
    yield SheetLine(
        "requests in a step", kept.running, "", f"mean at {kept.rate:.3g} requests/s; slots: {_slots(replica)}"
    )


def _of_memory(replica: AnyReplica, found: Capacity) -> Iterator[SheetLine]:
    config, cost, machine = replica.config, replica.token_cost, replica.machine
    if is_from_outside(replica):
        return  # the size of its cache is a guess
    formula = f"most blocks in use / {config.num_blocks:,} blocks of {config.block_size} tokens"
    yield SheetLine("KV cache in use", 100 * found.kept.kv_usage, "%", formula)
    if cost is None:
        return
    yield from _of_cache(replica, cost, found.kept)
    if machine is not None and machine.read_bytes_per_s:
        yield from _of_weights(machine, cost.weight_bytes)


def _of_cache(replica: AnyReplica, cost: TokenCost, kept: RateTrial) -> Iterator[SheetLine]:
    config, per_token = replica.config, cost.kv_bytes_per_token
    whole = per_token * config.block_size * config.num_blocks
    yield SheetLine("KV bytes of a token", per_token, "bytes", _kv_formula(replica))
    formula = f"{config.num_blocks:,} blocks x {config.block_size} tokens x {per_token:,} bytes"
    yield SheetLine("KV cache", whole / 2**20, "MiB", formula)
    longest = -(-config.max_model_len // config.block_size) / config.num_blocks  # a server does not start with less
    spare = 1 - max(kept.kv_usage, longest)
    formula = f"{spare:.0%} of it: could be smaller by so much, and hold what was used and the longest request"
    yield SheetLine("KV cache to spare", spare * whole / 2**20, "MiB", formula)


def _kv_formula(replica: AnyReplica) -> str:
    formula: str = replica.costs.about.get("kv_formula", "")
    scales = " and scales" if replica.settings.get("kv_cache_dtype") in SCALED else ""
    return formula or f"as the server says: keys, values{scales} of all layers"


def _of_weights(machine: Machine, weight_bytes: int) -> Iterator[SheetLine]:
    """Yields what a step takes to read the weights, and what it saves if they have half the bytes, which a cache may
    hold."""
    half_bytes = weight_bytes // 2
    rate, half_rate = (read_bytes_per_s(machine, size) for size in (weight_bytes, half_bytes))
    if rate is None:
        return  # a cache holds them, and nobody knows how fast it is
    floor_ms = weight_bytes / rate * 1e3
    formula = f"{_size(weight_bytes)} of weights / {_size(rate)}/s, at which the memory reads so many"
    yield SheetLine("decode floor", floor_ms, "ms", formula)
    if half_rate is None:
        return
    faster = "" if half_rate <= rate else ", at which it reads so few: caches hold more of them"
    formula = (
        "a step that waits for weights, with half the bits for each (8 instead of 16, say): "
        f"{floor_ms:.3g} ms - {_size(half_bytes)} / {_size(half_rate)}/s{faster}"
    )
    yield SheetLine("smaller weights save", floor_ms - half_bytes / half_rate * 1e3, "ms", formula)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.3g} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.3g} MB"


def _of_all(replica: AnyReplica, found: Capacity, terms: PlanTerms, peak: float) -> Iterator[SheetLine]:
    need = peak * terms.growth / terms.regions
    low, middle, high = (math.ceil(need / rate) * terms.regions if rate else None for rate in reversed(found.rate))
    grown = f" x {terms.growth:g}" if terms.growth != 1 else ""
    split = f" / {terms.regions} regions" if terms.regions > 1 else ""
    formula = f"{peak:g} requests/s{grown}{split} / highest rate, rounded up"
    yield SheetLine("servers", "nobody can tell" if middle is None else middle, "", formula, low, high)
    if middle is None or high is None:
        yield SheetLine(
            "servers with spares", "nobody can tell", "", "a somewhat slower machine keeps the SLO at no rate"
        )
        return
    with_spares = high + terms.regions
    formula = f"the most of the interval, and one spare in each region: {high} + {terms.regions}"
    yield SheetLine("servers with spares", with_spares, "", formula)
    rate = peak * terms.growth
    yield from _of_start_up(replica, terms, rate, high)
    if terms.price is not None:
        an_hour = with_spares * terms.price
        formula = f"{_servers(with_spares)} x {_hourly(terms, terms.price)}"
        yield SheetLine("an hour", an_hour, terms.currency, formula, is_money=True)
        yield from _of_tokens(found, terms, an_hour, "an hour", rate, f"in an hour at {rate:g} requests/s")


def _of_start_up(replica: AnyReplica, terms: PlanTerms, rate: float, servers: int) -> Iterator[SheetLine]:
    """rate: of all requests, which so many servers share."""
    own_s = None if replica.start_up_ns is None else replica.start_up_ns / 1e9
    start_up_s = terms.start_up_s if terms.start_up_s is not None else own_s
    if start_up_s is None:
        return
    formula = (
        f"that wait or go elsewhere, without a spare: {rate:g} requests/s / {_servers(servers)} x {start_up_s:.3g} s "
        "until a new one serves, rounded up"
    )
    yield SheetLine("a lost server leaves", math.ceil(rate / servers * start_up_s), "requests", formula)
    if terms.price is not None:
        paid = terms.price * start_up_s / S_PER_HOUR
        formula = f"{_hourly(terms, terms.price)} x {start_up_s:.3g} s in which a new server serves nobody yet"
        yield SheetLine("a start costs", paid, terms.currency, formula, is_money=True)


def _hourly(terms: PlanTerms, price: float) -> str:
    return f"{money(price)} {terms.currency} an hour"


def money(amount: float) -> str:
    """Returns three digits or more, and at least two behind the point: `0.40`, `0.000068`, `1,250.00`."""
    digits = 2 if amount == 0 else max(2, 2 - math.floor(math.log10(abs(amount))))
    whole, _, rest = f"{amount:,.{digits}f}".partition(".")
    return f"{whole}.{rest.rstrip('0'):0<2}"


def _servers(count: int) -> str:
    return f"{count} server{'' if count == 1 else 's'}"


def _of_tokens(
    found: Capacity,
    terms: PlanTerms,
    an_hour: float,
    paid: str,
    rate: float,
    when: str,
    ends: tuple[float, float] = (0.0, 0.0),
) -> Iterator[SheetLine]:
    """Yields what a million tokens cost if an hour with so many requests a second costs `an_hour`. paid, when: for
    people. ends: the interval of the rate; 0: that end is not known."""
    for name, tokens, share in (
        ("input", found.kept.input_tokens, found.kept.prompt_share),
        ("output", found.kept.output_tokens, 1 - found.kept.prompt_share),
    ):
        millions = rate * S_PER_HOUR * tokens / PER_MILLION
        cost = an_hour * share / millions
        least, most = (cost * rate / end if end else None for end in reversed(ends))
        formula = f"{paid} x {share:.0%} (their part of the steps' time) / {millions:,.4g} million {when}"
        yield SheetLine(f"a million {name} tokens", cost, terms.currency, formula, least, most, is_money=True)


def first_to_break(broken: RateTrial, slo: Mapping[str, float]) -> str:
    """Returns the terms that a rate breaks, and what the requests wait for most in the time that these are about. slo:
    what makes a request good."""
    missed = [term.name for term in broken.terms if not term.ok]
    waits, time = _time_missed(broken, missed)
    cause, share = next(iter(waits.items()), ("", 0.0))
    terms = ", ".join(_term_words(term, slo) for term in broken.terms if not term.ok)
    if missed == ["error_rate"]:
        return f"error_rate: {broken.term('error_rate').value or 0:.1%} of the requests are refused, or fail"
    if share < LEAST_WAIT:
        return f"{terms}: the steps themselves take too long, with {broken.running:.3g} requests in each"
    return f"{terms}: {share:.0%} of {time} is a wait for {cause} ({WAITS_FOR.get(cause, cause)})"


def _term_words(term: SloResult, slo: Mapping[str, float]) -> str:
    """`goodput (ttft within 2s), limit 95%`; of any other term its name."""
    if term.name != "goodput":
        return term.name
    within = ", ".join(f"{name} within {shown_ns(slo[name])}" for name in PER_REQUEST_LIMITS if name in slo)
    return f"goodput ({within}), limit {shown(term.name, term.limit)}"


def _time_missed(broken: RateTrial, missed: Sequence[str]) -> tuple[dict[str, float], str]:
    """Returns the waits in the time that these terms are about, and what that time is called."""
    if any(name.startswith(("ttft", "service_ttft")) for name in missed):
        return broken.first_waits, "the time to the first token"
    if any(name.startswith(("e2e", "service_e2e", "goodput")) for name in missed):
        return broken.all_waits, "the time of a request"
    return broken.later_waits, "the time behind the first token"


def _slots(replica: AnyReplica) -> str:
    return f"{replica.config.max_num_seqs:,}"
