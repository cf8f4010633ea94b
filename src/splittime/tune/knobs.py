"""What can be turned, and which values are tried.

Predicted knobs decide what a step holds and who is admitted: the simulator says what they do. Measured knobs change how
long a step takes or what the model answers, which no simulation can tell: threads, weights, the KV cache's type. A knob
that changes the model's numbers has to pass the quality gate too.

The values to try are multiples and fractions of the present one: a knob that is wrong is seldom wrong by a tenth.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from splittime.core.this_process import num_cores
from splittime.simulate.change import SIMULATED_KNOBS

Values = Callable[[Mapping[str, Any]], list[Any]]
RATIOS = (1 / 256, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 2, 4, 16)
LEAST_BUDGET = 16
MOST_SLOTS = 1024
MOST_BUDGET = 16_384
DRAWS = 7  # simulations of each change, each with other draws of what a server does not know


class Knob(NamedTuple):
    """values: to be tried, from all settings that a server has now, by their flags' names. is_predicted: by the
    simulator. changes_numbers: of what the model answers."""

    name: str
    values: Values
    is_predicted: bool = True
    changes_numbers: bool = False

    @property
    def is_live(self) -> bool:
        """Returns whether a running server takes it."""
        return self.name in SIMULATED_KNOBS and self.name != "num_blocks"


def around(value: int, least: int, most: int, ratios: tuple[float, ...] = RATIOS) -> list[int]:
    """Returns whole numbers at these ratios to a value, within the bounds, without the value."""
    found = {max(least, min(most, round(value * ratio))) for ratio in ratios}
    return sorted(found - {value})


def _slots(now: Mapping[str, Any]) -> list[int]:
    return around(now["max_num_seqs"], 1, MOST_SLOTS)


def _budget(now: Mapping[str, Any]) -> list[int]:
    return around(now["max_num_batched_tokens"], max(LEAST_BUDGET, now["max_num_seqs"]), MOST_BUDGET)


def _prefill(now: Mapping[str, Any]) -> list[int]:
    if "max_prefill_tokens" not in now:  # vLLM has another knob for it
        return []
    budget = now["max_num_batched_tokens"]
    return around(min(now["max_prefill_tokens"] or budget, budget), LEAST_BUDGET, budget)


def _long_prefill(now: Mapping[str, Any]) -> list[int]:
    """vLLM's: of each prompt at most so many tokens go into a step beside other requests; 0: no bound."""
    threshold, budget = now.get("long_prefill_token_threshold"), now["max_num_batched_tokens"]
    return [] if threshold is None else around(threshold or budget, LEAST_BUDGET, budget)


def _policies(now: Mapping[str, Any]) -> list[str]:
    """Returns the other policies that tell requests without priorities and deadlines apart: vLLM has none."""
    if "long_prefill_token_threshold" in now:
        return []
    return [name for name in ("fcfs", "shortest_prefill") if name != now["policy"]]


def _blocks(now: Mapping[str, Any]) -> list[int]:
    """More only, and at most what every slot's longest context needs: fewer blocks gain memory, not time."""
    need = now["max_num_seqs"] * -(-now["max_model_len"] // now["block_size"])
    return around(now["num_blocks"], now["num_blocks"], max(need, now["num_blocks"]), (2, 4, 16))


def _switched(name: str) -> Values:
    return lambda now: [not now[name]]


def _threads(now: Mapping[str, Any]) -> list[int]:
    cores = num_cores()
    powers = {2**power for power in range(cores.bit_length()) if 2**power <= cores}
    return sorted((powers | {cores}) - {now.get("num_threads")})


def _weights(now: Mapping[str, Any]) -> list[str]:
    return ["int8", "int4"] if now.get("quantization") is None else []


def _cache_types(now: Mapping[str, Any]) -> list[str]:
    return ["int8"] if now.get("kv_cache_dtype") in ("auto", "float32", "bfloat16") else []


KNOBS = {
    knob.name: knob
    for knob in (
        Knob("max_num_seqs", _slots),
        Knob("max_num_batched_tokens", _budget),
        Knob("max_prefill_tokens", _prefill),
        Knob("long_prefill_token_threshold", _long_prefill),
        Knob("policy", _policies),
        Knob("enable_chunked_prefill", _switched("enable_chunked_prefill")),
        Knob("enable_prefix_caching", _switched("enable_prefix_caching")),
        Knob("num_blocks", _blocks),
        Knob("num_threads", _threads, is_predicted=False),
        Knob("quantization", _weights, is_predicted=False, changes_numbers=True),
        Knob("kv_cache_dtype", _cache_types, is_predicted=False, changes_numbers=True),
    )
}


WIDE_SLOTS, WIDE_BUDGET = 64, 512


def wide(now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a change after which steps are larger than narrow settings let them be; {} where they are not narrow. A
    cost model answers only for steps like those that it was fitted on."""
    least = {"max_num_seqs": WIDE_SLOTS, "max_num_batched_tokens": WIDE_BUDGET}
    change = {name: value for name, value in least.items() if now[name] < value}
    budget = max(now["max_num_batched_tokens"], WIDE_BUDGET)
    if (now.get("max_prefill_tokens") or budget) < min(WIDE_BUDGET, budget):
        change["max_prefill_tokens"] = budget
    blocks = WIDE_SLOTS // 4 * -(-now["max_model_len"] // now["block_size"])
    return change if now["num_blocks"] >= blocks else {**change, "num_blocks": blocks}


def with_its_needs(name: str, value: Any, now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a change of one knob, with what has to follow: a token budget has room for every slot's next token."""
    change = {name: value}
    if name == "max_num_seqs" and value > now["max_num_batched_tokens"]:
        change["max_num_batched_tokens"] = value
    return change


def changes_numbers(change: Mapping[str, Any]) -> bool:
    """Returns whether the model may answer something else with this change."""
    return any(KNOBS[name].changes_numbers for name in change if name in KNOBS)


def words(change: Mapping[str, Any]) -> str:
    """Returns a change for people."""
    return ", ".join(f"{name} {value}" for name, value in change.items()) or "the settings as they were"
