"""Findings that agree with each other: over all of a diagnosis, a flag is prescribed in one direction only.

The finding that is told first keeps its flag. A later one that asks for the opposite loses it, and says so; and a flag
that asks for what is set already is no prescription. Nor are flags with which the server would not start: its
scheduler's own checks say so (`simulate.change`), beside what is set, and what its runner would refuse is in its facts.
"""

import re
import shlex
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from splittime.core.facts import RefusedValues
from splittime.diagnose.finding import OUR_PROGRAM, Finding
from splittime.simulate.change import refusal

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
