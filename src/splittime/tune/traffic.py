"""The load of a ledger file: its busiest stretch is sent again, with other tokens in the place of the recorded texts.

A ledger has no texts. It says when requests came, how long they were, and which prefixes they shared. Prompts of other
tokens are made from that, equal where the recorded ones were equal (`simulate.trace`). Each run has other tokens in
their places, so that no run finds another's in the prefix cache.
"""

import math
import secrets
from collections.abc import Callable, Container, Sequence
from typing import Any

from splittime.bench.book.records import Phase
from splittime.bench.schedule import Planned, Schedule
from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.simulate.recorded import Recorded, latest_run
from splittime.simulate.trace import TracedRequest
from splittime.simulate.what_if import requests_of
from splittime.tune.knobs import KNOBS
from splittime.wire.scrape import ServerLimits

MIN_REQUESTS = 20
WARM_UP_SHARE = 0.1
SECONDS = 30.0
USUAL_VOCAB_SIZE = 1_000
NEEDED = ("max_model_len", "block_size", "kv_cache_memory_bytes")


class RecordedLoad:
    """about: what tells it from other loads."""

    def __init__(self, recorded: Recorded, version: str, cores: int) -> None:
        """Raises ConfigError for a ledger that is too thin, simulated, from another version or of another machine."""
        _refuse_another(recorded, version, cores)
        recorded = latest_run(recorded)
        came = requests_of(recorded, recorded.facts.max_model_len)
        self._requests = busiest(came, round(SECONDS * 1e9))
        if len(self._requests) < MIN_REQUESTS:
            what = f"the ledger's busiest {SECONDS:g} s have {len(self._requests)} requests"
            hint = "Record more: splittime serve --ledger-file FILE."
            raise ConfigError(what, param="ledger", value=len(self._requests), limit=MIN_REQUESTS, hint=hint)
        first = self._requests[0]
        self.about = {"requests": len(self._requests), "first": first.request.request_id, "seconds": SECONDS}

    def __call__(self, limits: ServerLimits) -> Schedule:
        vocab_size = limits.vocab_size or USUAL_VOCAB_SIZE
        begin_ns = self._requests[0].arrived_ns
        end_ns = self._requests[-1].arrived_ns - begin_ns + 1
        from_ns, renaming = round(end_ns * WARM_UP_SHARE), _renaming(vocab_size)
        return Schedule(
            seed=0,
            measured_from_ns=from_ns,
            measured_until_ns=end_ns,
            settings=self.about,
            requests=tuple(
                _planned(index, one, one.arrived_ns - begin_ns, from_ns, renaming)
                for index, one in enumerate(self._requests)
            ),
        )


def recorded_settings(facts: ServerFacts, known: Container[str]) -> dict[str, Any]:
    """Returns the settings of a ledger's server that a tune turns, or that these depend on, by name. known: the names
    that a server can be started with."""
    names = (*(name for name in KNOBS if name in known), *NEEDED)
    return {name: value for name in names if (value := facts.settings.get(name)) is not None}


def busiest(requests: Sequence[TracedRequest], length_ns: int) -> list[TracedRequest]:
    """Returns the requests of the stretch of this length in which most came, by arrival."""
    ordered = sorted(requests, key=lambda one: one.arrived_ns)
    best, end = (0, 0), 0
    for begin, one in enumerate(ordered):
        while end < len(ordered) and ordered[end].arrived_ns < one.arrived_ns + length_ns:
            end += 1
        best = max(best, (begin, end), key=lambda both: both[1] - both[0])
    return ordered[best[0] : best[1]]


def _renaming(vocab_size: int) -> Callable[[int], int]:
    """Returns another token for each, a different one for each. A mere shift would not do: prompts made for a trace are
    sequences with one step, and a shifted one may begin as another."""
    factor, shift = vocab_size, secrets.randbelow(vocab_size)
    while math.gcd(factor, vocab_size) > 1:
        factor = 1 + secrets.randbelow(vocab_size)
    return lambda token: (factor * token + shift) % vocab_size


def _planned(index: int, one: TracedRequest, at_ns: int, from_ns: int, renaming: Callable[[int], int]) -> Planned:
    prompt = tuple(map(renaming, one.request.prompt_token_ids))
    return Planned(
        index=index,
        at_ns=at_ns,
        output_tokens=max(1, one.request.sampling.max_tokens or one.account.output_tokens),
        prompt=prompt,
        phase=Phase.MEASURED if at_ns >= from_ns else Phase.WARM_UP,
        expected_prompt_tokens=len(prompt),
    )


def _refuse_another(recorded: Recorded, version: str, cores: int) -> None:
    facts = recorded.facts
    if facts.simulated:
        raise ConfigError("the ledger is simulated", param="ledger", value=facts.simulated, hint="Give a real one.")
    there = facts.machine.cores if facts.machine is not None else None
    for what, found, wanted in (("version", facts.version, version), ("number of cores", there, cores)):
        if found is not None and found != wanted:
            hint = "Record it with this version, on this machine: splittime serve --ledger-file FILE."
            message = f"the ledger is of another {what}: {found} there, {wanted} here"
            raise ConfigError(message, param="ledger", value=found, limit=wanted, hint=hint)
