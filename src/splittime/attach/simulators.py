"""Whose scheduler decides when a ledger is run again: the one of the engine that wrote it.

    simulator = simulator_of(recorded.facts)
    simulator.replay(recorded)
    predict(recorded, change, to_replica=simulator.to_replica)

Of vLLM's own scheduler there is none outside its environment; the ledger is then refused, with what to do.

A vLLM server as a replica: its own scheduler decides, a model of the recorded steps says what each takes.

    replica = replica_of(recorded)                                        from the ledger of an attached vLLM
    replica.run_each(requests, Change({"max_num_seqs": 32}), seed, on_account, on_step)

The value needs no vLLM; a run does (`vllm_engine`). Around the engine is the server of `simulate.run`, as around ours.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import msgspec

from splittime.attach import versions
from splittime.attach.settings import VllmSettings, changed, settings_of
from splittime.core.clock import VirtualClock
from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.scheduler.admission import QueueLimits
from splittime.simulate.change import Change
from splittime.simulate.costed import Answers
from splittime.simulate.recorded import Recorded, plans_ahead
from splittime.simulate.replay import Divergence
from splittime.simulate.replica import UNBOUNDED, AnyReplica, ModelCosts, measured
from splittime.simulate.run import OnAccount, OnStep, SimulatedServer
from splittime.simulate.trace import TracedRequest, at_speed, unforeseen
from splittime.simulate.what_if import ReplicaOf


class Simulator(NamedTuple):
    """to_replica: of a ledger, to simulate changes. replay: of a ledger, its first decision that differs."""

    to_replica: ReplicaOf
    replay: Callable[[Recorded], Divergence | None]


def simulator_of(facts: ServerFacts) -> Simulator:
    """Raises ConfigError for an engine that is neither ours nor vLLM's, and where its vLLM is not installed."""
    if not facts.engine:
        from splittime.simulate.replay import replay
        from splittime.simulate.replica import replica_of

        return Simulator(replica_of, replay)
    _require_here(facts.engine)
    from splittime.attach.simulators import replica_of as to_vllm_replica

    return Simulator(to_vllm_replica, _replay_vllm)


def _replay_vllm(recorded: Recorded) -> Divergence | None:
    keep_vllm_quiet()
    from splittime.attach.vllm_engine import replay  # vLLM: seconds

    return replay(recorded)


def _require_here(engine: str) -> None:
    name, _, wanted = engine.removesuffix(" (untested)").partition(" ")
    if name != "vllm":
        raise ConfigError(f"no scheduler of {engine} is known", param="ledger", value=engine)
    found = versions.vllm_version()
    hint = "Run this command in that vLLM's environment: PATH-OF-IT/bin/splittime simulate ..."
    if found is None:
        words = f"the ledger is of {engine}, whose own scheduler is needed and is not in this environment"
        raise ConfigError(words, param="ledger", value=engine, hint=hint)
    if found.partition("+")[0] != wanted.partition("+")[0]:
        words = f"the ledger is of {engine}; vLLM here is {found}, and another release may decide otherwise"
        raise ConfigError(words, param="ledger", value=engine, hint=hint)
    versions.require_known()


class VllmReplica(AnyReplica, frozen=True, kw_only=True):
    """A server whose engine is vLLM's."""

    config: VllmSettings

    def with_settings(self, settings: dict[str, Any]) -> Self:
        return msgspec.structs.replace(self, config=changed(self.config, Change(settings)))

    def require(self, change: Change) -> None:
        changed(self.config, change)

    def run_each(
        self, requests: Sequence[TracedRequest], change: Change, seed: int, on_account: OnAccount, on_step: OnStep
    ) -> None:
        settings = changed(self.config, change)
        keep_vllm_quiet()
        from splittime.attach.vllm_engine import VllmEngine, by_plan  # vLLM: seconds

        costs = ModelCosts(self.costs, self.pace, seed, change.speed)
        requests = at_speed(requests, change.speed)
        if settings.async_scheduling:
            requests = list(map(unforeseen, requests))
        clock, answers = VirtualClock(), Answers()
        engine = VllmEngine(settings, clock, by_plan(costs), answers, requests)
        limits = QueueLimits(UNBOUNDED, UNBOUNDED)
        around = limits, self.delivery, engine.after_step_ns, answers, on_account, on_step
        SimulatedServer(clock, *around).run(engine.run, requests)


def replica_of(recorded: Recorded) -> VllmReplica:
    """Returns the vLLM server that wrote this ledger. Raises ConfigError for a ledger that says too little, and for a
    server that cannot be simulated."""
    config = settings_of(recorded.facts)
    plans_ahead(recorded)  # or raises
    return VllmReplica(config=config, **measured(recorded))


def keep_vllm_quiet() -> None:
    """Call it before vLLM is imported, or it writes what it finds on stdout, which is for the answer."""
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    logging.getLogger("vllm").setLevel(logging.ERROR)
