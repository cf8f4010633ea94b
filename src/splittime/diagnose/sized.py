"""How much each finding's cure would gain: the latest requests, replayed with that one change.

    sized(books, diagnosis) -> Diagnosis

A finding whose cure consists of flags that the simulator can change gets `predicted`: the figure that it is about
(`ABOUT`, else the mean request), with and without the change, and an interval. If the simulator cannot tell, the
finding gets the reason and stays as it is. The simulator also abstains if its replay without the change is further than
`MAX_ERROR` from the record.

A cure is withdrawn if its interval is not a gain throughout. The finding then keeps its claim, its evidence and its
place among the illnesses (what the books state outranks what is inferred), but has no flags any more, and comes after
the others, whose cures help. A cure is judged by its own value only, and no figure is of another than is prescribed: if
that needs steps beyond the recorded ones, a step on the way is prescribed instead, the largest of `WAY` that can be
replayed and helps. If there is none, the cure stays, and no gain is told.

A printed interval is where a run with the cure would lie, made in another hour (`simulate.what_if`). Whether a cure
helps is judged by what it does in the very hour, widened by the replay's error without it, at least by `LEAST_ERROR`.
The replay is bounded: `DRAWS` pairs of simulations of the excerpt that `latest_excerpt` picks.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from splittime.core.errors import ConfigError
from splittime.diagnose.books import Books
from splittime.diagnose.doctor import Diagnosis, found_again
from splittime.diagnose.excerpt import Excerpt, latest_excerpt
from splittime.diagnose.finding import OUR_PROGRAM, Finding, Gain, flags_of, number_of
from splittime.simulate.change import LIMITS, SIMULATED_KNOBS, Change, PredictedFigure
from splittime.simulate.cost import OutOfRange

if TYPE_CHECKING:
    from splittime.simulate.what_if import Prediction, ReplicaOf

DRAWS = 8
WAY = (4.0, 2.0, 1.5)  # times what is set: how far a cure goes that cannot be replayed whole
MAX_ERROR = 0.3  # of the replay as it was, against the record
LEAST_ERROR = 0.03  # that no replay is free of: an interval is at least so wide on either side
NO_HARM = 0.95  # an interval that begins above: it would not help; below, it might

MEAN, TTFT, ITL, REFUSED = "e2e_ms_mean", "ttft_ms_p99", "itl_ms_p99", "refused"
TTFT_P50, ITL_P50 = "ttft_ms_p50", "itl_ms_p50"
ABOUT: dict[str, tuple[str, ...]] = {
    "slot_bound": (MEAN, TTFT, ITL_P50),  # more at once: each one's tokens come slower
    "kv_bound": (MEAN, TTFT),
    "preemption_thrash": (MEAN, ITL),
    "token_budget_bound": (MEAN, TTFT),
    "head_of_line": (MEAN, TTFT),
    "static_batching": (MEAN, TTFT),
    "starvation": (TTFT, MEAN),
    "prefill_interference": (ITL, TTFT_P50, TTFT, MEAN),  # the gaps are bought with first tokens
    "queue_bound": (REFUSED, MEAN),
    "overload": (MEAN, TTFT, REFUSED),
}
WORDS = {
    MEAN: "the mean request",
    TTFT: "the first token (p99)",
    TTFT_P50: "the first token (p50)",
    ITL: "the gap between tokens (p99)",
    ITL_P50: "the gap between tokens (p50)",
    REFUSED: "the number of refused requests",
}

Say = Callable[[str, float], None]


class Replays(NamedTuple):
    """How the books of an engine are replayed. program: whose flags its cures name. knobs: the settings that a replay
    can change. setting_of: of a flag's name and value. to_replica: makes the server of a ledger; None: one of ours."""

    program: str
    knobs: Collection[str]
    setting_of: Callable[[str, Any], tuple[str, Any]] = lambda name, value: (name, value)
    to_replica: "ReplicaOf | None" = None


OUR_REPLAYS = Replays(OUR_PROGRAM, (*SIMULATED_KNOBS, *LIMITS))


def sized(
    books: Books, diagnosis: Diagnosis, say: Say = lambda words, share: None, replays: Replays = OUR_REPLAYS
) -> Diagnosis:
    """Returns the diagnosis with its gains. say: is told what is replayed, and which share of all is done. replays: of
    the engine whose books these are."""
    wanted = [finding.name for finding in diagnosis.findings if finding.cure.flags]
    excerpt = latest_excerpt(books) if wanted else None
    findings = []
    for finding in diagnosis.findings:
        if finding.name not in wanted:
            findings.append(finding)
            continue
        done = wanted.index(finding.name)

        def of_all(share: float, done: int = done, name: str = finding.name) -> None:
            say(f"replaying the cure of {name}", (done + share) / len(wanted))

        findings.append(_sized(books, finding, excerpt, of_all, replays))
    ordered = sorted(findings, key=lambda finding: (finding.comes_last, is_withdrawn(finding)))
    return replace(diagnosis, findings=tuple(ordered))


def is_withdrawn(finding: Finding) -> bool:
    """Whether the finding had a flag that would not help."""
    return finding.predicted is not None and not helps(finding.predicted)


def helps(gain: Gain) -> bool:
    """Whether all of the interval of what the finding is about is a gain."""
    high = gain.figures[0].own_high
    return high is not None and high < 1


def _sized(
    books: Books, finding: Finding, excerpt: Excerpt | None, say: Callable[[float], None], replays: Replays
) -> Finding:
    try:
        gain = _gain(books, finding, excerpt, say, replays)
    except OutOfRange as error:
        return _first_step(books, finding, excerpt, say, replays, error.info.message)
    except ConfigError as error:
        return replace(finding, not_predicted=error.info.message)
    finding = replace(finding, predicted=gain)
    if not is_withdrawn(finding):
        return finding
    flags = " ".join(finding.cure.flags)
    cure = replace(finding.cure, flags=(), sentence=f"{finding.cure.sentence} ({flags} is withdrawn: see the gain.)")
    return replace(finding, cure=cure)


def _first_step(
    books: Books, finding: Finding, excerpt: Excerpt | None, say: Callable[[float], None], replays: Replays, why: str
) -> Finding:
    """Returns the finding with a cure that goes a part of the way and helps; or as it is, and why no gain is told. why:
    not of the whole cure."""
    tried, names = [finding.cure.flags], dict(flags_of(finding.cure.flags)).keys()
    for most in WAY:
        step = found_again(replace(books, most_times=most), finding.name)
        if step is None or step.cure.flags in tried or not dict(flags_of(step.cure.flags)).keys() <= names:
            continue
        tried.append(step.cure.flags)
        try:
            gain = _gain(books, step, excerpt, say, replays)
        except OutOfRange:
            continue
        except ConfigError as error:
            why = error.info.message
            break
        if helps(gain):
            told = f"{' '.join(finding.cure.flags)} may be right in the end; the recorded steps are too small to tell"
            cure = replace(step.cure, sentence=f"{step.cure.sentence} Ask again with this set: {told}.")
            return replace(step, cure=cure, predicted=gain)
        why = f"{why}; and a replay with {' '.join(step.cure.flags)} does not show that it helps"
    return replace(finding, not_predicted=why)


def _gain(
    books: Books, finding: Finding, excerpt: Excerpt | None, say: Callable[[float], None], replays: Replays
) -> Gain:
    """Raises ConfigError where it cannot be told."""
    if books.engine and books.facts is not None and replays.to_replica is None:
        raise ConfigError(f"a replay here runs our own scheduler, and these books are of {books.facts.engine}")
    if finding.cure.program != replays.program:
        raise ConfigError(
            f"only the books of a splittime server can be replayed, and these are of {finding.cure.program}"
        )
    if excerpt is None:
        raise ConfigError("too little of the books can be replayed: it takes their steps, facts and ended requests")
    from splittime.simulate.replica import replica_of
    from splittime.simulate.what_if import predict  # scipy: half a second

    settings, to_replica = settings_of(finding, books, replays), replays.to_replica or replica_of
    on_draw = lambda number: say(number / DRAWS)  # noqa: E731
    prediction = predict(excerpt.recorded, Change(settings), DRAWS, 0, on_draw, 1, to_replica)
    names = dict.fromkeys((*ABOUT.get(finding.name, (MEAN,)), MEAN))
    figures = tuple(_figure(prediction, name) for name in names)
    _require_like(figures[0])
    gain = Gain(
        settings=settings, figures=figures, num_requests=prediction.num_requests, draws=prediction.draws, sentence=""
    )
    return replace(gain, sentence=_sentence(gain, excerpt.num_open, prediction.interval_words))


def settings_of(finding: Finding, books: Books, replays: Replays = OUR_REPLAYS) -> dict[str, Any]:
    """Returns what the cure's flags set. Raises ConfigError for one that no simulation can change."""
    return dict(_setting(typed, value, books, replays) for typed, value in flags_of(finding.cure.flags))


def _setting(typed: str, value: str | None, books: Books, replays: Replays) -> tuple[str, Any]:
    name = typed.removeprefix("--").replace("-", "_")
    if name == "kv_cache_memory_bytes" and value is not None:
        return "num_blocks", _blocks(value, books)
    is_off = value is None and name.startswith("no_")
    name = name.removeprefix("no_") if is_off else name
    name, asked = replays.setting_of(name, not is_off if value is None else _value(value))
    if name not in replays.knobs:
        raise ConfigError(f"no replay can change {typed}", param=typed)
    return name, asked


def _value(text: str) -> Any:
    number = number_of(text)
    if number is None:
        return text
    return int(number) if number == int(number) else number


def _blocks(size: str, books: Books) -> int:
    """Returns how many blocks fit into so many bytes."""
    number, facts = number_of(size), books.facts
    block_size = None if facts is None else facts.settings.get("block_size")
    if number is None or not block_size or facts is None or facts.cost is None:
        raise ConfigError("these books do not say how large a block of the KV cache is")
    return int(number) // (block_size * facts.cost.kv_bytes_per_token)


def _figure(prediction: "Prediction", name: str) -> PredictedFigure:
    """Returns the figure. Whether the change helps is judged by its own part of the interval, wider by the replay's
    own error."""
    found = prediction.figure(name)
    off = abs(found.before / found.recorded - 1) if found.before and found.recorded else 0.0
    wider = 1 + max(off, LEAST_ERROR)
    low = None if found.own_low is None else found.own_low / wider
    high = None if found.own_high is None else found.own_high * wider
    return replace(found, own_low=low, own_high=high)


def _require_like(figure: PredictedFigure) -> None:
    """Raises ConfigError for a replay that is not like the record, and for a figure that it does not have."""
    if figure.ratio is None or figure.before is None:
        raise ConfigError(f"a replay as it was says nothing of {WORDS[figure.name]}")
    if figure.recorded and abs(figure.before / figure.recorded - 1) > MAX_ERROR:
        unit = " ms" if "_ms" in figure.name else ""
        raise ConfigError(
            f"a replay as it was has {figure.before:.3g}{unit} for {WORDS[figure.name]} where "
            f"{figure.recorded:.3g}{unit} are recorded: too far off to go by"
        )


def _sentence(gain: Gain, num_open: int, interval: str) -> str:
    change = ", ".join(f"{name} {value}" for name, value in gain.settings.items())
    left_out = f" ({num_open} that were in flight at their begin left out)" if num_open else ""
    told = "; ".join(_change_words(figure) for figure in gain.figures if figure.ratio is not None)
    main = gain.figures[0]
    return (
        f"A replay of the latest {gain.num_requests} requests{left_out} with {change} changes {told}: "
        f"{_verdict(gain)}.{_refusals(gain)} {interval} Replayed as it was, {_off(main)}."
    )


def _refusals(gain: Gain) -> str:
    """A shorter wait for those who are let in has a price."""
    found = next((figure for figure in gain.figures if figure.name == REFUSED), None)
    if found is None or not found.after or found.after <= (found.before or 0):
        return ""
    return f" It would refuse {found.after:.0f} requests, where {found.before:.0f} are refused without."


def _change_words(figure: PredictedFigure) -> str:
    assert figure.ratio is not None
    assert figure.low is not None
    assert figure.high is not None
    change = f"{WORDS[figure.name]} by {_percent(figure.ratio)} ({_percent(figure.low)} to {_percent(figure.high)})"
    if not figure.recorded or figure.after is None:
        return change
    return f"{change}, from {_shown(figure.recorded)} to {_shown(figure.after)}{' ms' * ('_ms' in figure.name)}"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(ratio: float) -> str:
    told = f"{ratio:.3g} times" if ratio >= 2 else f"{round(100 * ratio) - 100:+d} %"
    return "0 %" if told == "+0 %" else told


def _verdict(gain: Gain) -> str:
    main, *others = gain.figures
    harmed = [WORDS[other.name] for other in others if other.own_low is not None and other.own_low > 1 / NO_HARM]
    if helps(gain):
        return f"it would help, and harm {' and '.join(harmed)}" if harmed else "it would help"
    is_useless = main.own_low is not None and main.own_low >= NO_HARM
    return "it would not help" if is_useless else "nobody can tell whether it helps"


def _off(figure: PredictedFigure) -> str:
    if not figure.recorded or figure.before is None:
        return f"{WORDS[figure.name]} has {figure.before:g} where {figure.recorded:g} are recorded"
    return f"{WORDS[figure.name]} is off by {_percent(figure.before / figure.recorded)}"
