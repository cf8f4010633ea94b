"""What a diagnosis is made of: findings, abstentions, and the order in which they are told.

One function is one finding, and its name is the finding's. A rule reads closed books and answers with a `Finding`, with
an `Abstention` (it could not tell, and why), or with None (it looked and found nothing). `rule` gives that answer its
name, and notes what the function needs to read and whose root it is. An *illness* is something that a change cures; a
*limit* is what a healthy server is bound by: it is told, and is no reason to fail a build.

The order of what is told (`in_order`):
1. illnesses and what no cure is known for before limits; of either the larger share of the requests' time first;
2. but a root before its symptoms, if it explains most of their time (`COVERS`). (An overloaded server makes everything
   queue; a server with two slots is overloaded because of the slots. What has a fifth of the time is not told before
   what has all of it, whoever causes whom.) A root that explains nobody's time (`Rule.explains`) has a share of
   something else, of requests that failed or of the client's clock, and comes before its symptoms whatever its share.

Findings agree with each other (`one_direction`): over all of a diagnosis, a flag is prescribed in one direction only.
The finding that is told first keeps its flag. A later one that asks for the opposite loses it, and says so; and a flag
that asks for what is set already is no prescription. Nor are flags with which the server would not start: its
scheduler's own checks say so (`simulate.change`), beside what is set, and what its runner would refuse is in its facts.
"""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import wraps
from typing import Any

import msgspec
from msgspec.structs import replace

from splittime.core.facts import RefusedValues
from splittime.simulate.change import PredictedFigure, refusal

NO_CURE_KNOWN = "no_cure_known"  # what the books state and no finding explains (`diagnose.unexplained`)
NOTHING_FOUND, FOUND, CANNOT_TELL = 0, 1, 3  # exit codes, for a CI; 2 is a usage error


class Fact(msgspec.Struct, frozen=True):
    """One piece of evidence: what was looked at, what was found, in which unit."""

    what: str
    value: float | int | str
    unit: str = ""


OUR_PROGRAM = "splittime serve"
OF_TIME, OF_REQUESTS = "the requests' time", "the requests"  # what a share is of: of their time, or of their number


class OtherCure(msgspec.Struct, frozen=True, kw_only=True):
    """A cure that is made otherwise on another server. flags: its own, as they are typed. cost, counter_check: where
    they are not the finding's."""

    sentence: str
    flags: tuple[str, ...] = ()
    cost: str = ""
    counter_check: str = ""


class Cure(msgspec.Struct, frozen=True, kw_only=True):
    """What to try: a sentence, and the flag of the server's own program with the value, where a flag does it.

    flags: as they are typed, ("--max-num-seqs", "16"). program: what they are given to, another server's if the
    finding is about one (`words.in_their_words`). elsewhere: by server, what it calls it, or how it is cured there.
    """

    sentence: str
    flags: tuple[str, ...] = ()
    program: str = OUR_PROGRAM
    elsewhere: Mapping[str, str | OtherCure] = {}

    @property
    def command(self) -> str | None:
        return " ".join((self.program, *self.flags)) if self.flags else None


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """What the latest requests would be with the cure (`diagnose.sized`).

    settings: what was changed, all that the cure's flags set. figures: the one that the finding is about first.
    sentence: all this for people.
    """

    settings: dict[str, Any]
    figures: tuple[PredictedFigure, ...]
    num_requests: int
    draws: int
    sentence: str


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that holds the requests back.

    name: the rule's; `rule` sets it. claim: one plain sentence with its numbers.
    request_ids, step_ids: where to look (`splittime explain ID`).
    share_of_time: how much of all requests' time it explains; time that two findings share is counted in both.
    share_of: what else it is a share of, in words: requests that failed have no time.
    share_interval: what another run of the same load would show (`rules.share`), one in ten less than its lower end.
    confidence: 0 to 1, and confidence_from: what it was worked out from.
    cost: what the cure will cost. counter_check: what, when measured, would refute the finding.
    regime: the batch sizes or loads in which it holds.
    predicted: what the cure would gain; not_predicted: why that is not told ("": nobody asked, or no flag is the cure).
    """

    name: str = ""
    claim: str
    evidence: tuple[Fact, ...]
    share_of_time: float
    confidence: float
    confidence_from: str
    cure: Cure
    cost: str
    counter_check: str
    regime: str
    request_ids: tuple[str, ...] = ()
    step_ids: tuple[int, ...] = ()
    is_limit: bool = False
    share_interval: tuple[float, float] | None = None
    share_of: str = OF_TIME
    predicted: Gain | None = None
    not_predicted: str = ""

    @property
    def comes_last(self) -> bool:
        """Whether it is told behind all illnesses: a limit, but not a wait that nobody explains."""
        return self.is_limit and self.name != NO_CURE_KNOWN


class Abstention(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that could not tell, and why. name: as in `Finding`. was_asked: it looked, and was not sure; else the
    books lack what it reads."""

    name: str = ""
    why: str
    was_asked: bool = True


Answer = Finding | Abstention | None
Check = Callable[[Any], Answer]


class Rule(msgspec.Struct, frozen=True):
    """A check with what it needs of the books (`accounts`, `steps`, `run`, ...), the names of its symptoms, whose
    time (`attribution.Owner`) its finding explains, and the quantities without which it cannot tell where the books say
    that nobody could measure them (`ServerFacts.unknown`)."""

    name: str
    check: Check
    needs: tuple[str, ...]
    root_of: tuple[str, ...]
    meaning: str
    explains: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


RULES: dict[str, Rule] = {}


class RuleEnd(Exception):
    """Ends a rule with this answer: an abstention, or None where there is nothing to tell."""

    def __init__(self, answer: Abstention | None) -> None:
        super().__init__()
        self.answer = answer


def rule(
    *needs: str, root_of: tuple[str, ...] = (), explains: tuple[str, ...] = (), reads: tuple[str, ...] = ()
) -> Callable[[Check], Check]:
    """Register a check under its function's name, which its answers get too; the first paragraph of its docstring is
    what the finding means."""

    def register(check: Check) -> Check:
        name, meaning = check.__name__, " ".join((check.__doc__ or "").split("\n\n")[0].split())

        @wraps(check)
        def named(books: Any) -> Answer:
            try:
                answer = check(books)
            except RuleEnd as end:
                answer = end.answer
            return None if answer is None else replace(answer, name=name)

        RULES[name] = Rule(name, named, needs, root_of, meaning, tuple(map(str, explains)), reads)
        return named

    return register


COVERS = 0.5  # of a symptom's share, its root's: most of it


def in_order(
    findings: Iterable[Finding], roots: Mapping[str, tuple[str, ...]], of_time: Collection[str]
) -> tuple[Finding, ...]:
    """See the module's docstring. roots: of which names a finding is the root; a limit is nobody's. of_time: names of
    those that explain somebody's time."""
    largest_first = sorted(findings, key=lambda f: (f.comes_last, -f.share_of_time, f.is_limit))
    told: dict[str, Finding] = {}

    def tell(finding: Finding, least: float, above: frozenset[str]) -> None:
        for root in largest_first:
            is_root = not root.is_limit and finding.name in roots.get(root.name, ())
            is_large = root.name not in of_time or root.share_of_time >= least
            if is_root and is_large and not finding.comes_last and root.name not in told and root.name not in above:
                tell(root, least, above | {finding.name})
        told.setdefault(finding.name, finding)

    for finding in largest_first:
        tell(finding, COVERS * finding.share_of_time, frozenset())
    return tuple(told.values())


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
BYTES_OF = {"int4": 0.5, "int8": 1.0, "fp8": 1.0, "bfloat16": 2.0, "float16": 2.0, "float32": 4.0}  # bytes of a weight

OTHER_BOUND = {"long_prefill_token_threshold": "max_num_batched_tokens"}  # vLLM's, of one prompt; 0: only the other is

Flag = tuple[str, str | None]  # as typed, and its value


def one_direction(
    findings: Iterable[Finding], settings: Mapping[str, Any], refuses: Collection[RefusedValues] = ()
) -> tuple[Finding, ...]:
    """Returns the findings in the order in which they are told, each flag prescribed in one direction only. refuses:
    of the server's own facts."""
    taken: dict[str, tuple[str, str]] = {}  # by setting: the direction, and whose
    agreed = []
    for finding in findings:
        kept: list[Flag] = []
        against: list[str] = []
        for flag in flags_of(finding.cure.flags):
            name, way = direction(flag, settings)
            first = taken.setdefault(name, (way, finding.name)) if way else None
            if first is not None and first[0] == way:
                kept.append(flag)
            elif first is not None:
                against.append(f"{_typed(flag)} would help here, and harm where {first[1]} does")
        changes = dict(map(changed_by, kept)) if finding.cure.program == OUR_PROGRAM else {}
        of_runner = (each.why for each in refuses if any(each.has(*change) for change in changes.items()))
        why = next(of_runner, None) or refusal(settings, changes)
        if why is not None:
            against, kept = [*against, f"{' '.join(map(_typed, kept))} would be refused: {why}"], []
        agreed.append(_with_flags(finding, kept, against))
    return tuple(agreed)


def _typed(flag: Flag) -> str:
    return " ".join(word for word in flag if word is not None)


def changed_by(flag: Flag) -> tuple[str, Any]:
    """Returns the setting that a flag changes, and its value."""
    name = flag[0].removeprefix("--").replace("-", "_")
    if flag[1] is None:
        return name.removeprefix("no_"), not name.startswith("no_")
    number = number_of(flag[1]) if flag[1][:1].isdigit() else None
    if number is None:
        return name, " ".join(shlex.split(flag[1]))  # as a shell would hand it over
    return name, int(number) if number == int(number) else number


def flags_of(typed: Iterable[str]) -> list[Flag]:
    found: list[Flag] = []
    for word in typed:
        if word.startswith("--"):
            found.append((word, None))
        elif found:
            found[-1] = (found[-1][0], word)
    return found


def direction(flag: Flag, settings: Mapping[str, Any]) -> tuple[str, str]:
    """The setting that a flag changes, and which way: up, down, or to which word; empty where it is set so already."""
    typed, value = flag
    name = typed.removeprefix("--").replace("-", "_")
    if name in OTHER_BOUND and not settings.get(name):
        name = OTHER_BOUND[name]
    if value is None:
        name, wanted = name.removeprefix("no_"), not name.startswith("no_")
        return name, "" if settings.get(name) is wanted else str(wanted)
    now, then = number_of(settings.get(name)), number_of(value)
    if then is None or now is None:
        return name, "" if str(settings.get(name)) == value else (value if then is None else _from_unset(name))
    return name, "" if then == now else ("up" if then > now else "down")


def _from_unset(name: str) -> str:
    """A number where none was set: what is not bounded becomes bounded."""
    return "down" if name.startswith("max_") else "up"


def number_of(value: Any) -> float | None:
    """Returns a typed number with its unit (`64MiB`) or a dtype's bytes; None for other words."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    if str(value) in BYTES_OF:
        return BYTES_OF[str(value)]
    found = re.fullmatch(r"([0-9.]+)\s*([a-zA-Z]*)", str(value))
    if found is None or found[2].lower() not in UNITS:
        return None
    return float(found[1]) * UNITS[found[2].lower()]


def _with_flags(finding: Finding, kept: list[Flag], against: list[str]) -> Finding:
    flags = tuple(word for flag in kept for word in flag if word is not None)
    if flags == finding.cure.flags:
        return finding
    told = f" ({'; '.join(against)}.)" if against else ""
    cure = msgspec.structs.replace(finding.cure, flags=flags, sentence=finding.cure.sentence + told)
    return msgspec.structs.replace(finding, cure=cure)
