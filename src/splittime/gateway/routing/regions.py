"""Which region a request goes to: the one of the upstream with the least round trip and expected wait.

`round_trips` measures the first and expects the second; what is not known yet counts as nothing, so
that it is soon known. Costs that differ by less than `EQUAL_NS` or a tenth are equal, as estimates are no closer than
that; among equals the gateway's own region comes first. Who of a region gets the request, affinity and load say.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from splittime.core.errors import ConfigError
from splittime.gateway.config import GatewayConfig

if TYPE_CHECKING:
    from splittime.gateway.upstreams import Upstream

EQUAL_NS, EQUAL_SHARE = 1_000_000, 0.1


class DistanceCost(NamedTuple):
    """What a request to an upstream is expected to take before its first byte, work aside; None where nobody knows."""

    rtt_ns: int | None
    wait_ns: int | None

    @property
    def total_ns(self) -> int:
        return (self.rtt_ns or 0) + (self.wait_ns or 0)


NOWHERE = DistanceCost(None, None)  # where there are no regions


class Regions:
    """home: the gateway's own region. is_on: whether upstreams have regions."""

    def __init__(self, home: str | None, is_on: bool) -> None:
        self._home, self.is_on = home, is_on

    def costs(self, free: Sequence["Upstream"], now_ns: int) -> dict[str, DistanceCost]:
        """Returns what each of these costs now, by name; {} where there are no regions."""
        if not self.is_on:
            return {}
        return {one.name: DistanceCost(one.round_trip.ns, one.waits.wait_ns(now_ns)) for one in free}

    def nearest(self, free: Sequence["Upstream"], costs: Mapping[str, DistanceCost]) -> list["Upstream"]:
        """Returns the upstreams that cost least, all of one region; all of them where there are no regions."""
        if not costs:
            return list(free)
        most_ns = equal_to_ns(min(costs[one.name].total_ns for one in free))
        equal = [one for one in free if costs[one.name].total_ns <= most_ns]
        first = min(equal, key=lambda one: (one.config.region != self._home, costs[one.name].total_ns))
        return [one for one in equal if one.config.region == first.config.region]


def equal_to_ns(cost_ns: int) -> int:
    """Returns up to which cost another is equal to this one."""
    return cost_ns + max(EQUAL_NS, int(cost_ns * EQUAL_SHARE))


def regions_of(config: GatewayConfig) -> Regions:
    return Regions(config.region, any(upstream.region is not None for upstream in config.upstream))


def check_regions(config: GatewayConfig) -> None:
    """Raises `ConfigError` where some upstreams have a region and others none, or the gateway's own is nobody's."""
    named = {upstream.region for upstream in config.upstream if upstream.region is not None}
    lacking = next((number for number, one in enumerate(config.upstream) if one.region is None), None)
    if named and lacking is not None:
        param = f"upstream[{lacking}].region"
        raise ConfigError(f"{param} is missing, and others have one", param=param, hint="give each one, or none")
    if config.region is not None and config.region not in named:
        hint = f"the upstreams are in {', '.join(sorted(named))}" if named else "give each [[upstream]] a region"
        message = f"region: no upstream is in {config.region!r}"
        raise ConfigError(message, param="region", value=config.region, hint=hint)
