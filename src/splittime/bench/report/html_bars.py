"""A row of pieces: what a bar of a report is made of, and what its pieces are called and drawn in.

A piece's key is a stage and a cause, or a part of the client's side. Colours are classes of the dashboard's own file,
so that a stage looks the same here and there; short parts that share a colour share a name in a legend.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from splittime.bench.join import CLIENT_BEFORE, LINE_ORDER, Key
from splittime.bench.join_view import MEANING
from splittime.bench.report.text import digits, ms
from splittime.ledger.stages import CAUSE_MEANING, Cause, Stage
from splittime.present.scale import duration, from_zero

SLOTS = 600  # a bar shows no piece narrower than one of so many; of those within one, the longest is shown
MIN_SHARE = 0.0005  # of a bar; less is not drawn
BEFORE_ENGINE = (Stage.RECEIVE, Stage.TOKENIZE, Stage.ADMIT, Stage.HANDOFF)
CAUSES: tuple[str | None, ...] = (None, *(cause.value for cause in Cause))
FIRST, STREAM = "until the first chunk", "from the first chunk to the end"

Timed = tuple[Key, int]  # and its duration in ns


class BarPiece(NamedTuple):
    """left, width: % of the row's room."""

    key: Key
    classes: str
    words: str
    left: float
    width: float


class Bar(NamedTuple):
    name: str
    detail: str
    total: str
    pieces: list[BarPiece]
    ticks: str = ""  # an SVG path


class BarLine(NamedTuple):
    classes: str
    name: str
    meaning: str
    cells: tuple[str, ...]


class Bars(NamedTuple):
    """Rows on one axis. lines: what the pieces are, those that are seen."""

    title: str
    axis: list[tuple[float, str]]
    bars: list[Bar]
    lines: list[BarLine]
    verdict: str = ""


def key_classes(key: Key) -> str:
    stage, cause = key
    if stage in CLIENT_BEFORE:
        return "ink client"
    if stage in (FIRST, STREAM):
        return "ink " + ("first" if stage == FIRST else "stage-decode")
    return f"ink stage-{stage}" + (f" cause-{cause}" if cause else "")


def place(key: Key) -> tuple[int, int]:
    """Where a key stands in a list: in the order of a request's life."""
    stage, cause = key
    return (*CLIENT_BEFORE, FIRST, STREAM, *LINE_ORDER).index(stage), CAUSES.index(cause)


def group_name(key: Key) -> str:
    """Short parts that share a colour share a name."""
    stage = key[0]
    if stage in CLIENT_BEFORE:
        return "client"
    return "before the engine" if stage in BEFORE_ENGINE else key_name(key)


def key_name(key: Key) -> str:
    stage, cause = (word and word.replace("_", " ") for word in key)
    return f"{stage}: {cause}" if cause else str(stage)


def key_meaning(key: Key) -> str:
    """A whole sentence."""
    stage, cause = key
    text = MEANING.get(stage, stage) if cause is None else CAUSE_MEANING[Cause(cause)]
    return f"{text[:1].upper()}{text[1:]}."


def seen(bars: Iterable[Bar]) -> list[BarLine]:
    """A line for each name and colour that is drawn."""
    keys = sorted({piece.key for bar in bars for piece in bar.pieces}, key=place)
    named = {group_name(key): key for key in reversed(keys)}
    return [BarLine(key_classes(key), name, key_meaning(key), ()) for name, key in reversed(named.items())]


def pieces(timed: Iterable[Timed], high_ns: float) -> list[BarPiece]:
    """Neighbours of one kind are one piece. What a bar of `SLOTS` cannot tell apart goes to the longest there."""
    made, left = [], 0.0
    for key, ns in _merged(_in_slots(timed, high_ns / SLOTS)):
        width = 100 * ns / high_ns
        if width >= 100 * MIN_SHARE:
            made.append(BarPiece(key, key_classes(key), f"{key_name(key)}, {duration_words(ns)}", left, width))
        left += width
    return made


def _merged(timed: Iterable[Timed]) -> list[Timed]:
    return [(key, sum(ns for _, ns in group)) for key, group in groupby(timed, key=lambda item: item[0])]


def _in_slots(timed: Iterable[Timed], slot_ns: float) -> Iterable[Timed]:
    """Runs of pieces that are each shorter than a slot become one piece, once they fill it, of whichever kind had most
    of it. Durations are kept: the pieces sum to what they did."""
    waiting: dict[Key, int] = {}
    for key, ns in _merged((key, ns) for key, ns in timed if ns > 0):
        waiting[key] = waiting.get(key, 0) + ns
        if sum(waiting.values()) >= slot_ns:
            yield max(waiting, key=lambda k: waiting[k]), sum(waiting.values())
            waiting = {}
    if waiting:
        yield max(waiting, key=lambda k: waiting[k]), sum(waiting.values())


def axis(high_ns: float) -> list[tuple[float, str]]:
    scale = from_zero([high_ns], 1.0)
    return [(100 * float(scale.share(tick)), duration(tick)) for tick in scale.ticks()]


def duration_words(ns: float) -> str:
    return f"{digits(ns / 1e9)} s" if abs(ns) >= 1e9 else f"{ms(ns)} ms"
