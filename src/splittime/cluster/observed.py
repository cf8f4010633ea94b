"""From what replicas' processes and gauges say to what the controller is told of them. It is
asked over HTTP, bounded in time and bytes, and None where nobody says it.

A replica is as full as the fuller of its two bounds: tokens of its KV cache that running requests hold and waiting
prompts will, and requests beside `max_num_seqs`.

`status.json` tells of a running cluster: written at each look, read by `splittime up --status`.
"""

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import aiohttp
import msgspec
import orjson

from splittime.cluster.config import ReplicaLaunch
from splittime.cluster.controller import FleetReplica, FleetState
from splittime.cluster.replica_process import ReplicaSeen
from splittime.cluster.state import LOST_S, ManagedReplica, ReplicaPhase
from splittime.core.engine import AWAKE, EngineStats

if TYPE_CHECKING:
    pass

NAP_S = 120.0  # to fall asleep
COMING = (ReplicaPhase.STARTING, ReplicaPhase.WARMING, ReplicaPhase.WAKING)
FLEET_STATES = {
    ReplicaPhase.STARTING: FleetState.STARTING,
    ReplicaPhase.WAKING: FleetState.STARTING,
    ReplicaPhase.WARMING: FleetState.WARMING,
    ReplicaPhase.SERVING: FleetState.READY,
    ReplicaPhase.DRAINING: FleetState.DRAINING,
    ReplicaPhase.SLEEPING: FleetState.ASLEEP,
}
TIMEOUT_S = 2.0
MAX_BYTES = 64 * 2**20  # of accounts; the gauges have some hundred


class ReplicaGauges(NamedTuple):
    """tokens: that run and wait there; capacity_tokens: that it has room for. is_ready: its engine can be asked."""

    tokens: int
    capacity_tokens: int
    is_awake: bool
    is_ready: bool = True


class GatewayGauges(NamedTuple):
    """held_tokens: of requests that wait there for a replica. digest: of the config that it has."""

    held_tokens: int
    digest: str


async def replica_gauges(
    session: aiohttp.ClientSession, url: str, launch: ReplicaLaunch, key: str | None
) -> ReplicaGauges | None:
    told = await ask(session, "GET", f"{url}/stats", key)
    try:
        if not told:
            return None
        gauges = gauges_of(msgspec.convert(told["engine"], EngineStats), launch)
        return gauges._replace(is_ready=bool(told["server"]["is_engine_ready"]))
    except (KeyError, TypeError, msgspec.ValidationError):
        return None


def gauges_of(stats: EngineStats, launch: ReplicaLaunch) -> ReplicaGauges:
    """Returns the load of a replica, in tokens of its capacity."""
    room = stats.blocks_total * launch.block_size
    capacity = launch.replica.capacity_tokens or room
    held = stats.blocks_used * launch.block_size + stats.waiting_prompt_tokens
    requests = stats.num_running + stats.num_waiting
    filled = max(held / room if room else 0.0, requests / launch.max_num_seqs)
    tokens = held if launch.replica.capacity_tokens else round(filled * capacity)
    return ReplicaGauges(max(tokens, requests), capacity, stats.rest.state == AWAKE)


async def gateway_gauges(
    session: aiohttp.ClientSession, url: str, key: str | None, trust: ssl.SSLContext
) -> GatewayGauges | None:
    told = await ask(session, "GET", f"{url}/stats", key, trust=trust)
    try:
        queue = told["queue"] if told else {}
        held = max(int(queue["tokens"]), int(queue["requests"]))
        return GatewayGauges(held, str(told["config"]).partition(":")[2]) if told else None
    except (KeyError, TypeError, ValueError):
        return None


async def ask(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    key: str | None,
    timeout_s: float = TIMEOUT_S,
    trust: ssl.SSLContext | bool = True,
) -> dict[str, Any] | None:
    """Returns the answer's JSON object; None for any other answer than 200, and where none comes in time. trust: whose
    certificates are taken; True: those of this machine's authorities."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        async with asyncio.timeout(timeout_s):
            async with session.request(method, url, headers=headers, allow_redirects=False, ssl=trust) as response:
                body = await _body(response) if response.status == 200 else b"null"
                told = orjson.loads(body)
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
        return None
    return told if isinstance(told, dict) else None


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > MAX_BYTES:
            response.close()
            return b"null"
    return bytes(body)


class Nap(NamedTuple):
    """What a replica is to be asked so that it is as its phase says."""

    path: str


SLEEP, WAKE = Nap("/sleep"), Nap("/wake")


class ReplicaWatch:
    """One replica, watched: `note` takes what is seen of it. gauges: the latest that it told. words: its last ones."""

    def __init__(self, replica: ManagedReplica, start_s: float, at_s: float) -> None:
        self._replica, self._start_s, self._heard_s = replica, start_s, at_s
        self.gauges: ReplicaGauges | None = None
        self._is_gone, self.words = False, ""

    def note(self, seen: ReplicaSeen | None, gauges: ReplicaGauges | None, at_s: float) -> None:
        """seen: None for a process that nobody knows. at_s: on a clock that only goes forward."""
        self._is_gone, self.words = seen is None or not seen.is_alive, "" if seen is None else seen.words
        replica = self._replica
        replica.url = replica.url if seen is None else seen.url
        if gauges is not None or replica.url is None:
            self._heard_s = at_s
        self.gauges = gauges or self.gauges
        if gauges is not None:
            self._advance(gauges)

    def _advance(self, gauges: ReplicaGauges) -> None:
        """What it was to become, it is; and one that serves no more, by its own word, is to become that again."""
        phase = self._replica.phase
        if phase in (ReplicaPhase.STARTING, ReplicaPhase.WAKING) and gauges.is_awake and gauges.is_ready:
            enter(self._replica, ReplicaPhase.SERVING)
        elif phase is ReplicaPhase.SERVING and not (gauges.is_awake and gauges.is_ready):
            enter(self._replica, ReplicaPhase.STARTING if gauges.is_awake else ReplicaPhase.WAKING)
        elif phase is ReplicaPhase.WARMING:
            enter(self._replica, ReplicaPhase.SLEEPING)

    @property
    def nap(self) -> Nap | None:
        """Returns what it is to be asked now, if it is not asked already."""
        if self.gauges is None:
            return None
        if self._replica.phase is ReplicaPhase.SLEEPING and self.gauges.is_awake and self.lasted_s <= NAP_S:
            return SLEEP
        return WAKE if self._replica.phase is ReplicaPhase.WAKING and not self.gauges.is_awake else None

    @property
    def lasted_s(self) -> float:
        return time.time() - self._replica.since_unix_s

    def is_lost(self, at_s: float) -> bool:
        phase = self._replica.phase
        is_slow = phase in COMING and self.lasted_s > self._start_s
        return self._is_gone or is_slow or at_s - self._heard_s > LOST_S

    def as_fleet(self, name: str, at_s: float, is_listed: bool) -> FleetReplica:
        """is_listed: a gateway may still send requests to it, though it drains."""
        replica = self._replica
        state = FleetState.LOST if self.is_lost(at_s) else FLEET_STATES[replica.phase]
        tokens, capacity = (self.gauges.tokens, self.gauges.capacity_tokens) if self.gauges else (0, 0)
        if state is FleetState.DRAINING and is_listed:
            tokens = max(1, tokens)
        return FleetReplica(name, state, replica.revision, tokens, capacity)


def enter(replica: ManagedReplica, phase: ReplicaPhase) -> None:
    replica.phase, replica.since_unix_s = phase, time.time()


def names_by(replicas: Mapping[str, ManagedReplica], phase: ReplicaPhase) -> list[str]:
    return [name for name, one in replicas.items() if one.phase is phase]


class FleetEvent(msgspec.Struct, frozen=True):
    """What was done, or decided. what: an action, failed, promoted, rolled_back or refused. words: the last lines of a
    replica that has ended by itself."""

    at_unix_s: float
    what: str
    name: str
    revision: str
    why: str
    words: str = ""
