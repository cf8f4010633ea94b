"""Whose scheduler decides when a ledger is run again: the one of the engine that wrote it.

    simulator = simulator_of(recorded.facts)
    simulator.replay(recorded)
    predict(recorded, change, to_replica=simulator.to_replica)

Of vLLM's own scheduler there is none outside its environment; the ledger is then refused, with what to do.
"""

from collections.abc import Callable
from typing import NamedTuple

from splittime.attach import versions
from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.simulate.recorded import Recorded
from splittime.simulate.replay import Divergence
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
    from splittime.attach.vllm_replica import replica_of as to_vllm_replica

    return Simulator(to_vllm_replica, _replay_vllm)


def _replay_vllm(recorded: Recorded) -> Divergence | None:
    from splittime.attach.vllm_replica import keep_vllm_quiet

    keep_vllm_quiet()
    from splittime.attach.vllm_replay import replay  # vLLM: seconds

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
