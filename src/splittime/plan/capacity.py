"""The highest rate at which one server keeps an SLO, found in the simulator, as an interval.

    found = capacity(replica, load, parse_slo("ttft_p99=500ms"), draws=8)
    found.rate              requests a second: low, middle, high
    found.trials            what each simulated rate came to, on the likeliest model

Each rate is a `RateTrial`: the load as `bench` would send it for as long (longer where the requests would be too
few to judge by), simulated. So what is found is what `bench search` with the same load would find.

For the likeliest model the rate is doubled or halved until the knee lies between two rates, and these are brought
together by bisection. Each draw (`Replica.drawn`: another model that fits as well) is then searched near that knee. All
trials share their random numbers, so that two trials differ by nothing but the rate.

A run of a load at one rate, simulated: whether it keeps the SLO, and what its requests wait for.

The load is drawn as `bench` would send it and judged as `bench` judges a run, so what is found is what `bench` would
find, and can be checked by it. The first tenth of a trial fills an empty server and does not count.
"""

import itertools
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from splittime.bench.book.metrics import RATES
from splittime.bench.book.records import Arm, Ending, Outcome, Phase, Run
from splittime.bench.book.slo import SloResult, check_slo
from splittime.core.errors import ConfigError, EngineError, SplittimeError
from splittime.core.request import FinishReason
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage
from splittime.plan.load import MAX_REQUESTS, lengths_words, load_at, requests_for
from splittime.simulate.change import Change
from splittime.simulate.cost import OutOfRange
from splittime.simulate.draws import hours, interval, over_cores, share_within
from splittime.simulate.replica import AnyReplica
from splittime.simulate.run import SimulatedBooks
from splittime.simulate.shape import shape_of_record

WARM_UP = 0.1
WAITS = (Stage.QUEUE, Stage.PREFILL_STALL, Stage.DECODE_STALL, Stage.PREEMPTED)


def judged(books: SimulatedBooks, slo: Mapping[str, float], warm_up_share: float = 0.0) -> list[SloResult]:
    """Returns a result for each term of the SLO, in base units. warm_up_share: of the run's time, whose requests do not
    count."""
    return check_slo(run_of(books, slo, warm_up_share), slo)


def run_of(books: SimulatedBooks, slo: Mapping[str, float] | None = None, warm_up_share: float = 0.0) -> Run:
    """Returns the run of a client without lateness and network of its own."""
    accounts = sorted(books.accounts, key=lambda account: account.start_ns)
    begin_ns, end_ns = accounts[0].start_ns, accounts[-1].start_ns + 1
    from_ns = round((end_ns - begin_ns) * warm_up_share)
    return Run(
        label="simulated",
        begin_ns=begin_ns,
        begin_unix_ns=0,
        measured_from_ns=from_ns,
        measured_until_ns=end_ns - begin_ns,
        slo=dict(slo or {}),
        arms=(Arm(url="simulated", kind="splittime", accounts=tuple(accounts), steps=tuple(books.steps)),),
        outcomes=tuple(_outcomes(accounts, begin_ns, from_ns)),
    )


def _outcomes(accounts: Iterable[ClosedAccount], begin_ns: int, from_ns: int) -> Iterable[Outcome]:
    for index, account in enumerate(accounts):
        at_ns = account.start_ns - begin_ns
        chunks = tuple([written - begin_ns for written in account.token_written_ns])
        yield Outcome(
            index=index,
            request_id=account.request_id,
            phase=Phase.MEASURED if at_ns >= from_ns else Phase.WARM_UP,
            ending=_ending(account),
            intended_ns=at_ns,
            picked_up_ns=at_ns,
            sent_ns=at_ns,
            headers_ns=chunks[0] if chunks else None,
            chunk_ns=chunks,
            chunk_tokens=(1,) * len(chunks),
            end_ns=account.end_ns - begin_ns,
            finish_reason=account.finish_reason,
            prompt_tokens=account.prompt_tokens,
            output_tokens=account.output_tokens,
            cached_tokens=account.cached_tokens,
        )


def _ending(account: ClosedAccount) -> Ending:
    if account.is_refused:
        return Ending.REFUSED
    if account.finish_reason == FinishReason.ABORT:
        return Ending.CANCELLED
    return Ending.FAILED if account.error is not None else Ending.COMPLETE


class RateTrial(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated run at one rate. input_tokens, output_tokens: of a request, in the mean. first_waits, later_waits,
    all_waits: the share of the time up to the first token, of the time behind it, and of both together, that the
    requests wait, by cause. prompt_share: the share of the steps' time that prompts need. kv_usage: the most blocks in
    use, as a share of all. running: requests in a step, in the mean."""

    rate: float
    terms: tuple[SloResult, ...]
    num_requests: int
    input_tokens: float
    output_tokens: float
    first_waits: dict[str, float]
    later_waits: dict[str, float]
    all_waits: dict[str, float]
    prompt_share: float
    kv_usage: float
    running: float

    @property
    def num_tokens(self) -> int:
        """How many tokens all prompts and answers have."""
        return round(self.num_requests * (self.input_tokens + self.output_tokens))

    @property
    def keeps(self) -> bool:
        return all(term.ok for term in self.terms)

    def term(self, name: str) -> SloResult:
        return next(term for term in self.terms if term.name == name)


class TooMany(ConfigError):
    """A trial would have more requests than anybody waits for."""


def simulated_trial(
    replica: AnyReplica, load: Mapping[str, Any], slo: Mapping[str, float], rate: float, seed: int
) -> RateTrial:
    """Returns what this load comes to. Raises TooMany, and OutOfRange for steps beyond the model."""
    requests = requests_for(dict(load), replica)
    if len(requests) > MAX_REQUESTS:
        raise TooMany(f"{len(requests):,} requests are too many for a trial", limit=MAX_REQUESTS)
    return _trial_of(replica, replica.run(requests, Change(), seed), slo, rate)


def _trial_of(replica: AnyReplica, books: SimulatedBooks, slo: Mapping[str, float], rate: float) -> RateTrial:
    """Returns the trial whose ledger this is."""
    served = [account for account in books.accounts if not account.is_refused]
    count = max(1, len(served))
    return RateTrial(
        rate=rate,
        terms=tuple(judged(books, slo, WARM_UP)),
        num_requests=len(books.accounts),
        input_tokens=sum(account.prompt_tokens for account in served) / count,
        output_tokens=sum(account.output_tokens for account in served) / count,
        first_waits=_waits(books, is_first=True),
        later_waits=_waits(books, is_first=False),
        all_waits=_waits(books, is_first=None),
        prompt_share=_prompt_share(replica, books),
        kv_usage=max((step.blocks_used for step in books.steps), default=0) / replica.config.num_blocks,
        running=sum(len(step.rows) for step in books.steps) / max(1, len(books.steps)),
    )


def _waits(books: SimulatedBooks, is_first: bool | None) -> dict[str, float]:
    """Returns the shares of the time up to the first token, or behind it, or of both (None), by cause; largest
    first."""
    spent: Counter[str] = Counter()
    total = 0
    for account in books.accounts:
        first_ns = account.token_ready_ns[0] if account.token_ready_ns else account.end_ns
        for each in account.intervals:
            if is_first is None or (each.begin_ns < first_ns) == is_first:
                total += each.end_ns - each.begin_ns
                if each.stage in WAITS:
                    spent[str(each.cause or each.stage)] += each.end_ns - each.begin_ns
    return {name: ns / max(1, total) for name, ns in spent.most_common()}


def _prompt_share(replica: AnyReplica, books: SimulatedBooks) -> float:
    """Returns the share of all steps' time by which steps with prompts take longer than with their decoding rows
    alone."""
    all_ns = prompts_ns = 0
    for step in books.steps:
        shape = shape_of_record(step)
        taken_ns = replica.costs.step_time(shape).step_ns
        all_ns += taken_ns
        prompt_tokens = shape.tokens - shape.decode_rows
        if prompt_tokens:
            alone = shape._replace(rows=shape.decode_rows, tokens=shape.decode_rows, prompt_pairs=0)
            prompts_ns += taken_ns - (replica.costs.step_time(alone).step_ns if shape.decode_rows else 0)
    return max(0.0, min(1.0, prompts_ns / all_ns)) if all_ns else 0.0


RESOLUTION = 1.03  # both ends of the knee are this close
STRIDE = 1.12  # of the search near a rate that is nearly right
FIRST_RATE = 1.0
MOST = 1e5  # times the first rate, or less


class Knee(msgspec.Struct, frozen=True):
    """The highest rate that keeps and the lowest that breaks. None: not found; `stopped` says why the search could not
    go on there, and what to do."""

    kept: RateTrial | None
    broken: RateTrial | None
    trials: tuple[RateTrial, ...]
    stopped: str | None = None


UNBREAKABLE = (("error_rate", 1.0), ("goodput", 0.0))


class RateInterval(NamedTuple):
    """A rate with its interval over the draws."""

    low: float
    middle: float
    high: float


class Capacity(msgspec.Struct, frozen=True):
    """rate: the highest that keeps the SLO, over the likeliest model and the draws. share: the probability with which
    another model lies within its interval. knee: from the lowest kept to the highest broken rate. likeliest: the search
    on the likeliest model. slo: the terms that are kept. lengths: where those of the requests come from that the load
    did not say, for people."""

    rate: RateInterval
    share: float
    knee: tuple[float, float]
    likeliest: Knee
    draws: int
    slo: dict[str, float]
    lengths: str = ""

    @property
    def kept(self) -> RateTrial:
        """The highest rate that keeps, on the likeliest model."""
        assert self.likeliest.kept is not None
        return self.likeliest.kept


Try = Callable[[float], RateTrial]
Ends = tuple[float, float]
Say = Callable[[str, float | None], None]


def capacity(
    replica: AnyReplica,
    load: Mapping[str, Any],
    slo: Mapping[str, float],
    draws: int = 8,
    seed: int = 0,
    processes: int = 1,
    say: Say = lambda words, share: None,
) -> Capacity:
    """Returns the highest rate within the SLO, with its interval. load: fields of `LoadSpec`. slo: terms as `parse_slo`
    gives them. draws: how many other models are searched, for the interval. processes: at most so many simulate at a
    time. say: called with what is simulated, and the share of the draws that is done. Raises ConfigError for a load
    that cannot be simulated and for a term that asks for a rate, EngineError if no rate keeps the SLO."""
    _require_limits(slo)
    replica = replica.steady()
    likeliest = find_knee(_trier(replica, load, slo, seed, _counted(say, draws)), FIRST_RATE)
    if likeliest.kept is None:
        raise _hopeless(likeliest, slo)
    knees = [_ends(likeliest)]
    rng = random.Random(seed)
    others = [replica.drawn(factor, rng) for factor in hours(draws, replica.costs.errors.drift, rng)]
    tokens = draws * sum(trial.num_tokens for trial in likeliest.trials)
    say(f"0 of {draws} draws simulated", 0.0)
    for ends in over_cores(_knee_of, others, (load, slo, seed, likeliest.kept.rate), tokens, processes):
        say(f"{len(knees)} of {draws} draws simulated", len(knees) / draws)
        knees.append(ends)
    kept, broken = zip(*knees, strict=True)
    low, high = interval(kept)
    rate = RateInterval(low, statistics.median(kept), high)
    lengths = lengths_words(dict(load), replica)
    return Capacity(rate, share_within(len(knees)), (min(kept), max(broken)), likeliest, draws, dict(slo), lengths)


def _counted(say: Say, draws: int) -> Say:
    """Returns what says a trial of the likeliest model with its number, so that nobody takes the search for a hang."""
    numbers = itertools.count(1)
    return lambda words, share: say(f"likeliest model, before {draws} draws, trial {next(numbers)}: {words}", share)


def _require_limits(slo: Mapping[str, float]) -> None:
    """Raises ConfigError for a term that a low rate misses, and for an SLO that no rate breaks: there is no highest
    rate to look for."""
    name = next((name for name in slo if name in RATES), None)
    if name is not None:
        hint = "Leave it out: the rate is what plan looks for."
        words = f"{name} grows with the rate, and is no limit to plan with"
        raise ConfigError(words, param="slo", value=name, hint=hint)
    if all((name, limit) in UNBREAKABLE for name, limit in slo.items()):
        told = ", ".join(f"{name}={limit:.0%}" for name, limit in slo.items())
        raise ConfigError("no rate breaks this SLO", param="slo", value=told, hint="Set a limit: ttft_p99=500ms.")


def _knee_of(replica: AnyReplica, load: Mapping[str, Any], slo: Mapping[str, float], seed: int, near: float) -> Ends:
    """Returns the ends of the knee of a replica, looked for near a rate."""
    return _ends(find_knee(_trier(replica, load, slo, seed, lambda words, share: None), near, STRIDE))


def _ends(knee: Knee) -> Ends:
    """Returns the highest rate that keeps, 0 for none, and the lowest that breaks, where one was found."""
    kept = 0.0 if knee.kept is None else knee.kept.rate
    return kept, kept if knee.broken is None else knee.broken.rate


def find_knee(trial_at: Try, first: float, stride: float = 2.0) -> Knee:
    """Returns the knee, looked for from `first` on. A rate that cannot be simulated counts as one that breaks, and
    `stopped` says why, if it is the knee's upper end."""
    search = _Search(trial_at)
    low, high = search.bracket(first, stride)
    while low is not None and high is not None and high / low > RESOLUTION:
        rate = (low * high) ** 0.5
        low, high = (rate, high) if search.keeps(rate) else (low, rate)
    trials = search.trials
    kept, broken = (None if end is None else trials.get(end) for end in (low, high))
    stopped = None if high is None else search.refused.get(high)
    return Knee(kept, broken, tuple(trials[rate] for rate in sorted(trials)), stopped)


class _Search:
    """The rates that were tried. refused: why a rate could not be simulated."""

    def __init__(self, trial_at: Try) -> None:
        self._trial_at = trial_at
        self.trials: dict[float, RateTrial] = {}
        self.refused: dict[float, str] = {}

    def keeps(self, rate: float) -> bool:
        try:
            self.trials[rate] = trial = self._trial_at(rate)
        except (OutOfRange, TooMany) as error:
            way_out = "Give a shorter --duration." if isinstance(error, TooMany) else "Plan from a heavier load."
            self.refused[rate] = f"at {rate:.3g} requests/s {error.info.message}. {way_out}"
            return False
        return trial.keeps

    def bracket(self, first: float, stride: float) -> tuple[float | None, float | None]:
        """Returns a rate that keeps and a higher one that does not; None where none was found. Strides grow to 2."""
        keeps, rate = self.keeps(first), first
        while 1 / MOST < rate / first < MOST:
            before, rate = rate, rate * stride if keeps else rate / stride
            if self.keeps(rate) != keeps:
                return (before, rate) if keeps else (rate, before)
            stride = min(stride * stride, 2.0)
        return (rate, None) if keeps else (None, rate)


def _trier(replica: AnyReplica, load: Mapping[str, Any], slo: Mapping[str, float], seed: int, say: Say) -> Try:
    def trial_at(rate: float) -> RateTrial:
        trial = simulated_trial(replica, load_at(load, rate), slo, rate, seed)
        say(f"{rate:.3g} requests/s {'keep' if trial.keeps else 'break'} the SLO", None)
        return trial

    return trial_at


def _hopeless(knee: Knee, slo: Mapping[str, float]) -> SplittimeError:
    """The SLO cannot be kept at any rate: says what can."""
    if not knee.trials:
        return ConfigError(f"no rate could be simulated: {knee.stopped}", param="rate")
    lightest = knee.trials[0]
    missed = " ".join(term.sentence for term in lightest.terms if not term.ok)
    way_out = "Set limits that are no stricter than these values."
    hint = f"With requests that come one at a time, each alone on the server: {missed} {way_out}"
    return EngineError("no rate keeps the SLO", param="slo", value=", ".join(slo), hint=hint)
