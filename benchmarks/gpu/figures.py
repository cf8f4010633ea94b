"""The figures that must be shown of a card, each with its goal, and where it is in what a part of `run.sh` told."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

CONTEXTS, BATCHES = ("1024", "8192", "32768"), ("1", "4", "16", "64", "256")
Result = dict[str, Any]
Measured = tuple[float, str]  # and what else is worth telling


@dataclass(frozen=True)
class Figure:
    """part: of run.sh. read: raises LookupError, or answers None, where the part did not get so far. told: format."""

    name: str
    part: str
    read: Callable[[Result], Measured | None]
    least: float | None = None
    most: float | None = None
    told: str = "{:.1%}"

    @property
    def goal(self) -> str:
        if self.least is not None:
            return f"at least {self.told.format(self.least)}"
        return "" if self.most is None else f"at most {self.told.format(self.most)}"


# ---- what is read of a part's result


def decode_share(count: int, name: str) -> Callable[[Result], Measured]:
    """Of the best arm."""

    def look(result: Result) -> Measured:
        shares = {arm: by[str(count)][name] for arm, by in result["arms"].items() if str(count) in by}
        best = max(shares, key=lambda arm: shares[arm])
        step = result["arms"][best][str(count)]
        return shares[best], f"{best}, {step['tokens_per_s']:.0f} tokens/s, step {step['step_ms']:.2f} ms"

    return look


def idle(count: int) -> Callable[[Result], Measured]:
    """Of the best arm, by the device's own marks."""

    def look(result: Result) -> Measured:
        shares = {arm: by[str(count)]["idle"] for arm, by in result["arms"].items() if str(count) in by}
        best = min(shares, key=lambda arm: shares[arm])
        profiled = result["arms"][best][str(count)].get("profiled", {}).get("idle")
        return shares[best], best + ("" if profiled is None else f"; the profiler saw {profiled:.1%}")

    return look


def plan_commit(count: int) -> Callable[[Result], Measured]:
    """Where they are in the step's record: without planning ahead."""

    def look(result: Result) -> Measured:
        ahead = result["arms"].get("ahead", {}).get(str(count), {}).get("host", {}).get("hidden_us", {}).get("p99")
        host = result["arms"]["captured"][str(count)]["host"]["plan_commit_us"]
        return host["p99"], f"p50 {host['p50']:.0f}" + (
            "" if ahead is None else f"; hidden when ahead, p99 {ahead:.0f}"
        )

    return look


def prompt_share(tokens: int) -> Callable[[Result], Measured]:
    def look(result: Result) -> Measured:
        found = result["prompts"][str(tokens)]
        return found["share_of_matrix_rate"], f"{found['tokens_per_s']:.0f} tokens/s"

    return look


def attention_decode(context: str) -> Callable[[Result], Measured | None]:
    """The lowest of all batches; None unless all were measured."""

    def look(result: Result) -> Measured | None:
        shares = {
            str(one["rows"]): one["share"]["chosen"]
            for one in result["results"]
            if one["kind"] == "decode" and str(one["context"]) == context and "chosen" in one["share"]
        }
        if set(BATCHES) - set(shares):
            return None
        return min(shares.values()), ", ".join(f"batch {rows} {share:.0%}" for rows, share in shares.items())

    return look


def attention_prefill(tokens: int) -> Callable[[Result], Measured | None]:
    def look(result: Result) -> Measured | None:
        for one in result["results"]:
            if one["kind"] == "prefill" and one["context"] == tokens and "chosen" in one["share"]:
                return one["share"]["chosen"], f"{one['us']['chosen']:.0f} us"
        return None

    return look


def beside_peers(result: Result) -> Measured | None:
    """Our time over the best peer's, the highest of all shapes."""
    found = []
    for one in result["results"]:
        others = {name: us for name, us in one["us"].items() if name != "chosen" and us}
        if others and one["us"].get("chosen"):
            best = min(others, key=lambda name: others[name])
            shape = f"{one['kind']} {one['context']} x {one['rows']}"
            found.append((one["us"]["chosen"] / others[best], f"highest: {shape}, {best}"))
    return max(found, default=None)


def worst_kl(result: Result) -> Measured | None:
    found = [
        (one["bfloat16"]["all"]["kl"], f"{name}; decoded {one['bfloat16']['decoded']['kl']:.1e}")
        for name, one in result["models"].items()
    ]
    return max(found, default=None)


def equal_tokens(result: Result) -> Measured | None:
    """1 if all are equal."""
    arms = [(name, arm, by) for name, one in result["models"].items() for arm, by in one["float32"]["arms"].items()]
    if not arms:
        return None
    wrong = [f"{name}, {arm}: {by['differences'][:1]}" for name, arm, by in arms if not by["equal"]]
    return 1 - len(wrong) / len(arms), "; ".join(wrong) or f"{len(result['models'])} models"


def crossover(result: Result) -> Measured | None:
    """The streams at which 16 bits are faster; none is told as 0."""
    found = result["reversals"]["weights"]
    first = (
        found["arms"]["int4"]["1"]["tokens_per_s"]["median"] / found["arms"]["16 bits"]["1"]["tokens_per_s"]["median"]
    )
    if found["crossover"] is None:
        return 0, f"no crossover; int4 / 16 bits at 1: {first:.2f}"
    return found["crossover"], f"int4 / 16 bits at 1: {first:.2f}"


def cache_gain(pressed: bool) -> Callable[[Result], Measured]:
    """Tokens/s of the smaller cache over the other's, with and without pressure on the memory."""

    def look(result: Result) -> Measured:
        arms = result["reversals"]["cache"]["arms"]
        wide, small = [one for name, one in arms.items() if ("memory for all" in name) != pressed]
        ran = f"{wide['running_mean']['median']:.0f} and {small['running_mean']['median']:.0f} ran together"
        return small["tokens_per_s"]["median"] / wide["tokens_per_s"]["median"], ran

    return look


def ratio(name: str, metric: str, also: str) -> Callable[[Result], Measured]:
    """Last arm over first."""

    def look(result: Result) -> Measured:
        ratios = result["reversals"][name]["ratio"]
        other = ratios[also]
        return ratios[metric], f"{also} x {other:.2f}" if other is not None else ""

    return look


def held(arm: str) -> Callable[[Result], Measured]:
    def look(result: Result) -> Measured:
        found = result["reversals"]["reservation"][arm]
        return found["held_share"]["median"], f"{found['running_mean']['median']:.0f} run together"

    return look


def beside_transformers(count: int) -> Callable[[Result], Measured | None]:
    def look(result: Result) -> Measured | None:
        rates = {n: one["tokens_per_s"] for n, one in result["concurrent"][str(count)].items() if "tokens_per_s" in one}
        ours = rates.pop("splittime")
        told = ", ".join(f"{name} {rate:.0f}" for name, rate in {"ours": ours, **rates}.items())
        return (ours / max(rates.values()), told) if rates else None

    return look


# ---- what must be shown


def figures() -> Iterator[Figure]:
    yield Figure("greedy tokens as the CPU's, float32", "parity", equal_tokens, least=1.0)
    yield Figure("KL a token, bfloat16", "parity", worst_kl, most=1e-3, told="{:.1e}")
    bandwidth = "share_of_bandwidth"
    yield Figure("decode 1, 8B bfloat16, of the bandwidth", "engine_8b", decode_share(1, bandwidth), least=0.85)
    yield Figure("decode 1, 8B in 4 bits, of the bandwidth", "engine_8b_int4", decode_share(1, bandwidth), least=0.70)
    for count in (64, 256):
        look = decode_share(count, "share_of_floor")
        yield Figure(f"decode {count}, 8B, 1k of context, of the floor", "engine_8b", look, least=0.80)
    for tokens in (2048, 8192):
        yield Figure(f"prefill {tokens}, 8B, of the matrix rate", "engine_8b", prompt_share(tokens), least=0.65)
    yield Figure("device idle, 8B, 64 streams", "engine_8b", idle(64), most=0.03)
    yield Figure("device idle, 0.6B, 1 stream", "engine_0.6b", idle(1), most=0.10)
    yield Figure("plan + commit p99, 64 streams, us", "engine_8b", plan_commit(64), told="{:.0f}")
    for context in CONTEXTS:
        look_there = attention_decode(context)
        yield Figure(f"attention, decode at {context}, of the bandwidth", "attention", look_there, least=0.85)
    for tokens in (2048, 8192):
        name = f"attention, prefill {tokens}, of the matrix rate"
        yield Figure(name, "attention", attention_prefill(tokens), least=0.60)
    yield Figure("attention's time over its best peer's", "attention_peers", beside_peers, told="{:.2f}")
    yield from _reversals()
    for count in (1, 16, 64, 256):
        name = f"tokens/s over transformers' best, {count} at once"
        yield Figure(name, "generate", beside_transformers(count), told="{:.2f}")
    for part in ("engine_30b_a3b", "engine_70b_int4"):
        yield Figure(f"decode 1, {part.removeprefix('engine_')}", part, decode_share(1, "share_of_floor"))


def _reversals() -> Iterator[Figure]:
    times = "x {:.2f}"
    rest = "reversals_mechanisms"
    yield Figure("4 bits lose from so many streams on", "reversals_weights", crossover, told="{:.0f}")
    yield Figure("fp8 cache, memory for all: tokens/s", "reversals_cache", cache_gain(False), told=times)
    yield Figure("fp8 cache, memory for a quarter: tokens/s", "reversals_cache", cache_gain(True), told=times)
    chunked = ratio("chunking", "max_stall_ms", "computed_tokens_per_s")
    yield Figure("chunked prefill: longest stall", rest, chunked, told=times)
    for share in ("0%", "50%", "90%"):
        look = ratio(f"prefix_cache_{share}", "ttft_p50_ms", "prefill_tokens")
        yield Figure(f"prefix cache, {share} shared: TTFT p50", rest, look, told=times)
    batching = ratio("batching", "tokens_per_s", "steps")
    yield Figure("continuous batching over static: tokens/s", rest, batching, least=2.0, told=times)
    yield Figure("memory that holds tokens, reserved in one piece", rest, held("in one piece"))
    yield Figure("memory that holds tokens, in blocks", rest, held("in blocks"), least=0.90)
