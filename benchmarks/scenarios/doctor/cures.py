"""Cures applied: the same load again on a server that has the printed flags too, and each printed figure beside the
measured one, by turns: then the load again on the server as it was. Two equal runs differ by a quarter on a virtual
machine, so a ratio is of the cured run to the mean (the root of the product) of the run before it and that behind it.

Figures are of the same requests as the printed ones: the excerpt that was replayed, by the places of its requests in
the schedule.
"""

import math
import shlex
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.scenarios.doctor.patients import Patient
from benchmarks.scenarios.doctor.visit import Visit, admitted, books_of
from benchmarks.scenarios.doctor.wards import Ward
from benchmarks.server_process import served
from splittime.bench.book.requests import sent_as
from splittime.diagnose.books import Books
from splittime.diagnose.excerpt import latest_excerpt
from splittime.diagnose.finding import Finding
from splittime.simulate.change import PredictedFigure
from splittime.simulate.figures import Figures, figures


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """A printed figure. low and high are those that were printed, of the ratio and of the figure itself. recorded,
    again: without the cure, before it and behind it; is_ratio_inside: by turns."""

    name: str
    recorded: float | None
    expected: float | None
    low: float | None
    high: float | None
    ratio: tuple[float, float] | None
    measured: float
    again: float | None = None
    is_inside: bool
    is_ratio_inside: bool


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """A prescription. why: the server's words, where it did not start with the flags; why nothing was printed.
    settings: what was replayed, and measured here."""

    name: str
    flags: tuple[str, ...]
    starts: bool
    is_withdrawn: bool = False
    why: str = ""
    settings: dict[str, Any] = {}
    figures: tuple[Compared, ...] = ()


def applied(ward: Ward, patient: Patient, visited: Visit) -> list[Applied]:
    """Tries each prescription of a diagnosis: the first that has figures with the whole load, the others by a start."""
    found: list[Applied] = []
    for finding in visited.diagnosis.findings:
        if finding.cure.flags:
            is_measured = any(one.figures for one in found) or finding.name not in ward.may_be_named
            found.append(_applied(ward, patient, visited, finding, not is_measured))
    return found


def _applied(ward: Ward, patient: Patient, visited: Visit, finding: Finding, is_measured: bool) -> Applied:
    flags, gain = tuple(shlex.split(" ".join(finding.cure.flags))), finding.predicted  # as a shell hands them over
    told = Applied(name=finding.name, flags=flags, starts=False, why=finding.not_predicted)
    with admitted(ward, patient) as (asked, settings):
        if gain is None or not is_measured:
            refused = _refused((*settings, *flags))
            return msgspec.structs.replace(told, starts=not refused, why=refused or told.why)
        after = books_of(ward, asked, visited.schedule, (*settings, *flags))
        behind = books_of(ward, asked, visited.schedule, settings)
    seen, again = (_same_requests(visited.books, books) for books in (after, behind))
    compared = tuple(_compared(figure, seen, again) for figure in gain.figures if figure.ratio is not None)
    return msgspec.structs.replace(told, starts=True, settings=gain.settings, figures=compared)


def _refused(settings: Sequence[str]) -> str:
    """Returns the last words of a server that does not start with these; "" of one that does."""
    try:
        with served(*settings):
            return ""
    except RuntimeError as error:
        return str(error)[-300:]


def _same_requests(before: Books, after: Books) -> Figures:
    """Returns the figures of those requests of the later run that the replay of the first one was about."""
    excerpt = latest_excerpt(before)
    assert excerpt is not None
    wanted = set(map(_places(before).get, map(sent_as, excerpt.recorded.accounts)))
    places = _places(after)
    kept = [account for account in after.accounts if places.get(sent_as(account)) in wanted]
    return figures(kept, after.steps)


def _places(books: Books) -> dict[str, int]:
    """Returns the place of each request in the schedule, by the id that the client sent."""
    assert books.run is not None
    return {outcome.request_id: outcome.index for outcome in books.run.outcomes}


def _compared(figure: PredictedFigure, seen: Figures, again: Figures) -> Compared:
    measured = seen.get(figure.name, 0.0)
    assert figure.low is not None
    assert figure.high is not None
    is_inside = figure.after_low is not None and figure.after_high is not None
    is_inside = is_inside and figure.after_low <= measured <= figure.after_high  # type: ignore[operator]
    before = figure.recorded or figure.before or 1.0
    behind = again.get(figure.name, before)
    return Compared(
        name=figure.name,
        recorded=figure.recorded,
        expected=figure.after,
        low=figure.after_low,
        high=figure.after_high,
        ratio=(figure.low, figure.high),
        measured=measured,
        again=behind,
        is_inside=is_inside,
        is_ratio_inside=figure.low <= measured / math.sqrt(before * (behind or before)) <= figure.high,
    )
