"""Is a replica that was read from a file one that can be? The first field that cannot is named."""

import math
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.facts import Machine, TokenCost
from splittime.ledger.steps import EXECUTIONS
from splittime.simulate.cost import MOST_NS, Law, are_times

if TYPE_CHECKING:
    from splittime.simulate.replica import Replica

MOST_SHOWN = 100  # characters of a value
MOST_START_UP_NS = 10**14  # a day
TIMES = f"times from 0 to {MOST_NS:g} ns"


class _About(msgspec.Struct):
    """What a model says of itself, as others read it; it may say more."""

    model: str = ""
    version: str = ""
    kv_formula: str = ""


class _AboutRuns(_About, kw_only=True):
    """What a model of runs that were seen from outside says of itself (`plan.own_runs`)."""

    off: dict[str, float]
    runs: int
    void: int


def require_sound_replica(replica: "Replica", path: Path) -> None:
    """Raises ConfigError for what is not as it must be. path: of the file."""
    for law in _laws(replica):
        if not law.holds:
            value = str(attrgetter(law.field)(replica))[:MOST_SHOWN]
            words = f"{path} has costs that cannot be: {law.field} is {value}; it must be {law.must_be}"
            hint = "Calibrate the server again."
            raise ConfigError(words, param=law.field, value=value, limit=law.must_be, hint=hint)


def _laws(replica: "Replica") -> Iterator[Law]:
    start_up_ns, limits = replica.start_up_ns or 0, msgspec.to_builtins(replica.limits).values()
    yield from (law._replace(field=f"costs.{law.field}") for law in replica.costs.laws())
    yield Law("costs.about", "what a calibration says of itself", _is_about(replica.costs.about))
    for name in ("decode", "prompts"):
        kind = getattr(replica.pace, name)
        yield Law(f"pace.{name}", "factors above 0, one for each of begins_ns, which rise", kind.is_sound)
    yield Law("approach", TIMES, are_times(replica.approach))
    yield Law("delivery", TIMES, are_times(replica.delivery))
    yield Law("limits", "0 or more", all(one >= 0 for one in limits))
    yield Law("execution", ", ".join(EXECUTIONS), replica.execution in EXECUTIONS)
    yield Law("start_up_ns", f"0 to {MOST_START_UP_NS:g} ns", 0 <= start_up_ns <= MOST_START_UP_NS)
    if replica.token_cost is not None:
        yield from _laws_of_cost(replica.token_cost)
    if replica.machine is not None:
        yield from _laws_of_machine(replica.machine)


def _laws_of_cost(cost: TokenCost) -> Iterator[Law]:
    for name, value in msgspec.structs.asdict(cost).items():
        yield Law(f"token_cost.{name}", "0 or more", value is None or _is_amount(value))
    yield Law("token_cost.windowed_share", "0 to 1", cost.windowed_share <= 1)
    chosen = f"at most num_experts ({cost.num_experts})"
    yield Law("token_cost.chosen_experts", chosen, cost.chosen_experts <= cost.num_experts)


def _laws_of_machine(machine: Machine) -> Iterator[Law]:
    for name, value in msgspec.structs.asdict(machine).items():
        if isinstance(value, (int, float)):
            yield Law(f"machine.{name}", "0 or more", _is_amount(value))
    are_rates = all(_is_amount(one) for pair in machine.read_rates for one in pair)
    yield Law("machine.read_rates", "sizes and rates of 0 or more", are_rates)


def _is_amount(value: float) -> bool:
    return 0 <= value < math.inf


def _is_about(about: dict[str, Any]) -> bool:
    try:
        msgspec.convert(about, _AboutRuns if "off" in about else _About)
    except msgspec.ValidationError:
        return False
    return True
