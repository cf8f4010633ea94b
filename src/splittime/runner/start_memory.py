"""What starts have measured of a model on this machine, remembered, so that a restart decides as the start before did.

One entry for each thing that is measured, in a JSON file beside the packed weights. Its key is the processor and the
cores, the build of the kernels, and of the model all that its speed depends on: shapes, schemes, types. Whoever changes
one of these measures again; `--remeasure` does too, and so does deleting the file. A damaged file is told and ignored.

A measurement beside somebody else's work is worth less: it is used, but not kept, and the next start tries again.

What a token of a prompt takes decides how much of a prompt one step computes. The shortest of some runs counts, if a
second one confirms it. Of the native kernels it is the processors' time, shared among the threads, where that is less
than the time that went by: what a neighbour takes from the cores is not in it. Where a short prompt waits for weights
rather than for products, as it does with AMX, one of its tokens takes several times what a longer prompt's token takes;
so the prompt is doubled until twice the tokens take nearly twice the time.

A small model's step is shorter than it takes to wake a second thread; a large one's is bound by memory that two cores
read faster than one. Where the border lies depends on the machine, so steps as they will be served (one request, a
batch, a prompt) are timed with one thread, two, four, up to one for each core. The results are the same to the last
bit. Above `LARGE_BYTES` of weights nothing is measured: all cores pay there.

The numbers of threads take turns, round after round, and are compared within a round; what counts is the median of the
rounds. Measuring goes on until nearly all rounds agree, or the time is up; more threads are taken only where they do.
"""

import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from splittime.core import files, this_process
from splittime.runner import machine
from splittime.runner.config import Resolved
from splittime.runner.torch_runner import TorchRunner
from splittime.runner.warm_up import PROBE_TOKENS, Probe, longest_probe

LARGE_BYTES = 256 << 20
MIN_ROUNDS = 5
ROUNDS_BUDGET_S = 0.4  # a start may take so much longer by it, beyond the least number of rounds
WORTH = 0.9  # more threads must bring the typical step below this share of its time, since others may want the cores
AGREE = 0.8  # of the rounds

Step = Callable[[], object]


class ThreadCount(msgspec.Struct, frozen=True):
    """reason: the evidence, in words."""

    threads: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    reason: str


@dataclass(frozen=True)
class Round:
    """One turn of each number of threads: what each step took, in ns."""

    taken_ns: dict[int, list[int]]

    def ratio(self, more: int, fewer: int) -> float:
        """Returns the ratio of the times of all steps with these numbers of threads: the geometric mean."""
        pairs = zip(self.taken_ns[more], self.taken_ns[fewer], strict=True)
        return math.prod(one / other for one, other in pairs) ** (1 / len(self.taken_ns[more]))


def quickest_count(steps: Mapping[str, Step], set_threads: Callable[[int], None], cores: int) -> ThreadCount:
    """The number of threads to keep; it is set. steps: by what they are."""
    counts, rounds = _counts(cores), list[Round]()
    begin_ns = time.monotonic_ns()
    while len(rounds) < MIN_ROUNDS or not _is_sure(rounds, counts):
        if len(rounds) >= MIN_ROUNDS and time.monotonic_ns() - begin_ns > ROUNDS_BUDGET_S * 1e9:
            break
        rounds.append(_round(list(steps.values()), set_threads, counts))
    best = _best(rounds, counts)
    set_threads(best)
    return ThreadCount(best, _reason(list(steps), rounds, counts))


def _counts(cores: int) -> list[int]:
    """1, 2, 4, .. and `cores`."""
    return [*(1 << bits for bits in range(cores.bit_length()) if 1 << bits < cores), cores]


def _round(steps: Sequence[Step], set_threads: Callable[[int], None], counts: Sequence[int]) -> Round:
    taken_ns: dict[int, list[int]] = {}
    for count in counts:
        set_threads(count)
        taken_ns[count] = [shortest_ns(step, 2) for step in steps]  # the first call wakes the threads
    return Round(taken_ns)


def shortest_ns(step: Step, repeats: int) -> int:
    taken = []
    for _ in range(repeats):
        begin_ns = time.monotonic_ns()
        step()
        taken.append(time.monotonic_ns() - begin_ns)
    return max(1, min(taken))


def _best(rounds: Sequence[Round], counts: Sequence[int]) -> int:
    best = counts[0]
    for count in counts[1:]:
        if _share_that_pays(rounds, count, best) >= AGREE:
            best = count
    return best


def _is_sure(rounds: Sequence[Round], counts: Sequence[int]) -> bool:
    """Nearly all rounds say the same of each number against the best of those before it."""
    shares = [_share_that_pays(rounds, count, _best(rounds, counts[:at])) for at, count in enumerate(counts) if at]
    return all(share >= AGREE or share <= 1 - AGREE for share in shares)


def _share_that_pays(rounds: Sequence[Round], more: int, fewer: int) -> float:
    """Returns the share of the rounds in which the larger number is worth it."""
    return statistics.fmean(one.ratio(more, fewer) < WORTH for one in rounds)


def _reason(names: Sequence[str], rounds: Sequence[Round], counts: Sequence[int]) -> str:
    told = []
    for count in counts:
        typical = (statistics.median(taken) / 1e6 for taken in zip(*(r.taken_ns[count] for r in rounds), strict=True))
        against = statistics.median(one.ratio(count, 1) for one in rounds)
        worth = f" ({against:.2f} of the time with 1)" if count > 1 else ""
        told.append(f"{count}: {' and '.join(f'{ms:.2f}' for ms in typical)} ms{worth}")
    return f"measured in {len(rounds)} rounds, {', '.join(names)} by threads: {', '.join(told)}"


T = TypeVar("T", bound=msgspec.Struct)
NAME = "start.json"
MIN_RUNS, MAX_RUNS = 3, 12  # of a prompt
DECODE_RUNS = 5
BUDGET_S = 0.5  # beyond the least number of runs
CONFIRMED = 0.03  # the next shortest is within this share
LONGEST_TOKENS = 256  # of a prompt that is timed
NEARLY_TWICE, DOUBLING_S = 1.6, 2.0  # as long, by twice the tokens; doubling goes on for no longer
DISTURBED_CORES = 0.25  # that others kept busy while it was measured


class StartMemory:
    """path: None for a start that remembers nothing. facts: what the measurements depend on."""

    def __init__(self, path: Path | None, facts: Sequence[Any], remeasure: bool = False) -> None:
        self._path, self._facts, self._remeasure = path, list(facts), remeasure

    def get(self, what: str, depends_on: Sequence[Any], kind: type[T], measure: Callable[[], T]) -> tuple[T, str]:
        """Returns what is remembered of `what`, or measured now, and where it comes from in words. depends_on: facts
        besides those of this memory."""
        key = self._key(what, depends_on)
        entry = None if self._remeasure else _entry(files.read(self._path).get(key), kind)
        if entry is not None:
            return entry[0], f"remembered from {entry[1]}, --remeasure measures again"
        watch = machine.Others()
        found = measure()
        others = watch.busy_cores()
        if others > DISTURBED_CORES:
            return (
                found,
                f"measured beside {others:.1f} busy cores of others: maybe off, and not kept for the next start",
            )
        if self._path is None:
            return found, "not kept for the next start: there is no cache folder"
        new = {"at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "found": msgspec.to_builtins(found)}
        files.write(self._path, files.read(self._path) | {key: new})
        return found, "remembered for the next start"

    def _key(self, what: str, depends_on: Sequence[Any]) -> str:
        facts = json.dumps([*self._facts, *depends_on], default=str)
        return f"{what} {hashlib.sha256(facts.encode()).hexdigest()[:32]}"


def _entry(kept: Any, kind: type[T]) -> tuple[T, str] | None:
    """Returns what was found, and when; None for what is not there or makes no sense."""
    try:
        return msgspec.convert(kept["found"], kind), str(kept["at"])
    except (TypeError, KeyError, msgspec.ValidationError):
        return None


def memory_of(runner: TorchRunner) -> StartMemory:
    """Returns what is remembered of this model as it is computed here. Ranks remember nothing."""
    config, resolved, decoder = runner.config, runner.resolved, runner.decoder
    folder = machine.packed_cache_folder(config.packed_cache)
    if folder is None or resolved.tensor_parallel_size > 1:
        return StartMemory(None, ())
    computed = (resolved.weights, resolved.weights_bytes, resolved.kv_cache_dtype, resolved.linear_backend)
    facts = (
        machine.cpu_name(),
        this_process.num_cores(),
        machine.kernels_build(decoder.ops),
        repr(decoder.config),
        computed,
    )
    return StartMemory(folder / NAME, (*facts, resolved.max_model_len, resolved.max_num_seqs), config.remeasure)


# ---- what is measured


def wants_threads(runner: TorchRunner) -> bool:
    """Nobody has said how many, and it is not clear beforehand."""
    is_small = runner.resolved.weights_bytes <= LARGE_BYTES
    return runner.config.num_threads is None and runner.decoder.ops.name == "native" and is_small


def choose_threads(runner: TorchRunner, cores: int) -> None:
    """Keep the number of threads that this model wants, remembered or measured, and note it in `resolved`."""
    set_threads = runner.decoder.ops.set_threads

    def measure() -> ThreadCount:
        with Probe(runner.run, runner.resolved) as probe:
            return quickest_count(probe.steps(), set_threads, cores)

    found, told = memory_of(runner).get("threads", (cores,), ThreadCount, measure)
    set_threads(found.threads)
    reason = f"{found.reason}; {told}"
    runner.resolved = msgspec.structs.replace(runner.resolved, num_threads=found.threads, num_threads_reason=reason)


def prefill_tokens_within(runner: TorchRunner, seconds: float) -> int:
    """Returns how many prompt tokens a step computes in this time, at least 1: remembered, or measured by running some.
    Notes in `resolved` what one takes."""
    is_alone = runner.decoder.ops.name == "native" and runner.lead is None
    num_threads = runner.resolved.num_threads

    def measure() -> PrefillRate:
        return measure_prefill(runner, num_threads if is_alone else None)

    facts = (num_threads, _longest(runner.resolved), NEARLY_TWICE)
    found, told = memory_of(runner).get("prefill", facts, PrefillRate, measure)
    ns, reason = round(found.ns_per_token), f"measured, {found.evidence}; {told}"
    runner.resolved = msgspec.structs.replace(runner.resolved, prefill_ns_per_token=ns, prefill_reason=reason)
    return max(1, int(seconds * 1e9 / found.ns_per_token))


class DecodeTime(msgspec.Struct, frozen=True):
    """ms: of a decode step of one request, the shortest of some."""

    ms: Annotated[float, msgspec.Meta(gt=0)]


def decode_step_ms(runner: TorchRunner) -> tuple[float, str]:
    """Returns what a decode step of one request takes by native kernels, and where that comes from in words."""
    num_threads = runner.resolved.num_threads

    def measure() -> DecodeTime:
        with Probe(runner.run, runner.resolved, num_rows=1) as probe:
            return DecodeTime(min(_time_ns(probe.decode, num_threads) for _ in range(DECODE_RUNS)) / 1e6)

    found, told = memory_of(runner).get("decode", (num_threads,), DecodeTime, measure)
    return found.ms, told


class PrefillRate(msgspec.Struct, frozen=True):
    """evidence: in words."""

    ns_per_token: Annotated[float, msgspec.Meta(gt=0)]
    evidence: str


def measure_prefill(runner: TorchRunner, threads: int | None) -> PrefillRate:
    """threads: that do all the work of this process; None where others do some, and only the clock can tell."""
    longest = _longest(runner.resolved)
    num_tokens = min(PROBE_TOKENS, longest)
    taken_ns, until_ns = _once_ns(runner, num_tokens, threads), time.monotonic_ns() + int(DOUBLING_S * 1e9)
    while 2 * num_tokens <= longest and time.monotonic_ns() < until_ns:
        doubled_ns = _once_ns(runner, 2 * num_tokens, threads)
        if doubled_ns >= NEARLY_TWICE * taken_ns:
            break
        num_tokens, taken_ns = 2 * num_tokens, doubled_ns
    with Probe(runner.run, runner.resolved, num_tokens, 1) as probe:
        return _rate_of(probe, threads)


def _longest(resolved: Resolved) -> int:
    return min(LONGEST_TOKENS, longest_probe(resolved))


def _once_ns(runner: TorchRunner, num_tokens: int, threads: int | None) -> float:
    with Probe(runner.run, runner.resolved, num_tokens, 1) as probe:
        return _time_ns(probe.prefill, threads)


def _rate_of(probe: Probe, threads: int | None) -> PrefillRate:
    taken_ns: list[float] = []
    begin_ns = time.monotonic_ns()
    while len(taken_ns) < MIN_RUNS or not _is_confirmed(taken_ns):
        is_out_of_time = time.monotonic_ns() - begin_ns > BUDGET_S * 1e9
        if len(taken_ns) >= MIN_RUNS and (is_out_of_time or len(taken_ns) == MAX_RUNS):
            break
        taken_ns.append(_time_ns(probe.prefill, threads))
    shortest, following = sorted(taken_ns)[:2]
    evidence = (
        f"a prompt of {probe.max_tokens} tokens took {shortest / 1e6:.2f} ms, the shortest of {len(taken_ns)} runs"
    )
    evidence += f", the next {following / shortest - 1:.0%} more"
    return PrefillRate(shortest / probe.max_tokens, evidence)


def _is_confirmed(taken_ns: list[float]) -> bool:
    shortest, following = sorted(taken_ns)[:2]
    return following <= (1 + CONFIRMED) * shortest


def _time_ns(step: Callable[[], object], threads: int | None) -> float:
    wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
    step()
    wall_ns, cpu_ns = time.monotonic_ns() - wall_ns, time.process_time_ns() - cpu_ns
    return max(1, wall_ns if threads is None else min(wall_ns, cpu_ns / threads))
