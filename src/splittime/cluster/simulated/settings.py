"""What a simulated fleet is: its regions, how it is routed and scaled, what fails, and what is asked of it."""

from typing import Literal

import msgspec

from splittime.cluster.scaling import ScaleSettings
from splittime.core.errors import ConfigError

MAX_REPLICAS = 10_000
Routing = Literal["gateway", "round_robin"]
Scaling = Literal["tokens", "waiting", "none"]


class FailureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """per_replica_hour: how often each fails, in the mean; at random instants. node_share: of these, the nodes that
    fall silent, where others have a process that ends and says so."""

    per_replica_hour: float = 0.0
    node_share: float = 0.3


class StartTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds until a replica serves that is started, and one that is woken; each takes up to `spread` of it more or
    less."""

    cold_s: float = 60.0
    wake_s: float = 2.0
    spread: float = 0.2


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """replicas: ready at the begin, in all regions together. routing: "gateway" is the gateway's own choice, with
    affinity where that is on; "round_robin" takes one after the other. scaling: "tokens" is the controller of
    `splittime up`, "waiting" a scaler that sees how many wait at servers and nothing else, "none" keeps what there is.
    scale: of all regions together. capacity_tokens: of a replica; None: by its cost model and `tpot_s`.
    rtt_ms: between two regions, there and back; local_rtt_ms: within one. ttft_s, tpot_s: what a good answer keeps."""

    replicas: int = 10
    regions: tuple[str, ...] = ("here",)
    routing: Routing = "gateway"
    affinity: bool = True
    scaling: Scaling = "tokens"
    scale: ScaleSettings = ScaleSettings(max_replicas=MAX_REPLICAS)
    capacity_tokens: int | None = None
    max_wait_s: float = 30.0
    assumed_max_tokens: int = 256
    rtt_ms: float = 60.0
    local_rtt_ms: float = 0.5
    starts: StartTimes = StartTimes()
    failures: FailureSettings = FailureSettings()
    ttft_s: float = 2.0
    tpot_s: float = 0.1

    def validate(self) -> "FleetSettings":
        """Returns itself. Raises ConfigError for a fleet that cannot be."""
        num_regions = len(self.regions)
        _require(1 <= self.replicas <= MAX_REPLICAS, "replicas", self.replicas, f"from 1 to {MAX_REPLICAS:,}")
        _require(0 < num_regions <= self.replicas, "regions", num_regions, "at least one, and a replica in each")
        _require(len(set(self.regions)) == num_regions, "regions", self.regions, "of different names")
        _require(self.scale.max_replicas >= num_regions, "max_replicas", self.scale.max_replicas, "one a region")
        _require(self.rtt_ms >= 0 and self.local_rtt_ms >= 0, "rtt", self.rtt_ms, "0 or more")
        _require(0 <= self.starts.spread <= 1, "spread", self.starts.spread, "from 0 to 1")
        _require(self.failures.per_replica_hour >= 0, "failures", self.failures.per_replica_hour, "0 or more")
        _require(0 <= self.failures.node_share <= 1, "node_share", self.failures.node_share, "from 0 to 1")
        _require(self.ttft_s > 0 and self.tpot_s > 0, "slo", min(self.ttft_s, self.tpot_s), "above 0")
        return self

    def scale_of(self, number: int) -> ScaleSettings:
        """Returns the part of the region with this number: bounds are shared out evenly."""
        return msgspec.structs.replace(
            self.scale,
            min_replicas=share_of(self.scale.min_replicas, number, len(self.regions)),
            max_replicas=max(1, share_of(self.scale.max_replicas, number, len(self.regions))),
            warm_pool=share_of(self.scale.warm_pool, number, len(self.regions)),
        )


def share_of(total: int, number: int, count: int) -> int:
    """Returns the part with this number of a total that is shared evenly among so many, the first ones more."""
    return total // count + (number < total % count)


def _require(holds: bool, name: str, value: object, limit: str) -> None:
    if not holds:
        raise ConfigError(f"{name} is {value}; it must be {limit}", param=name, value=str(value), limit=limit)
