"""The servers of `foreign_servers`: nine sick ones, of which the cause is known as it was made, and three healthy ones.

Each is vLLM with one setting changed (`BASE` is a healthy server for these loads), and a load that shows the illness.
`names`: the findings of which one must come first; `flag`: what its cure must name; none where nothing may be found.
"""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.scenarios.vllm_cases import MadeServer

BASE = {"max-model-len": "4096", "max-num-seqs": "16", "max-num-batched-tokens": "1024"}
FEW_BLOCKS = {"num-gpu-blocks-override": "20", "max-model-len": "2048"}  # of 128 tokens, as its wheel for CPUs has them
SHORT = {"input_tokens": "uniform:64:192", "output_tokens": "uniform:32:64"}


@dataclass(frozen=True)
class Case(MadeServer):
    """load: of `LoadSpec`. needs_load: it is this load that makes it ill, so a probe of the idle server shows
    nothing."""

    name: str
    truth: str
    load: dict[str, Any]
    settings: dict[str, str | None] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    flag: str = ""
    needs_load: bool = False

    base = BASE


CASES = (
    Case(
        "slots_1",
        "one slot, and more arrivals than it serves",
        {"rate": 4.0, "num_requests": 40, **SHORT},
        {"max-num-seqs": "1"},
        ("reported_slots",),
        "--max-num-seqs",
    ),
    Case(
        "slots_2",
        "two slots for six users",
        {"concurrency": 6, "num_requests": 40, **SHORT},
        {"max-num-seqs": "2"},
        ("reported_slots",),
        "--max-num-seqs",
    ),
    Case(
        "kv_preempted",
        "twenty blocks: answers outgrow the cache together",
        {"concurrency": 8, "num_requests": 40, "input_tokens": "256", "output_tokens": "250"},
        FEW_BLOCKS,
        ("reported_preemptions", "reported_kv"),
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    Case(
        "kv_admits_one",
        "twenty blocks: one prompt of 1,800 tokens fits at a time",
        {"concurrency": 4, "num_requests": 40, "input_tokens": "1800", "output_tokens": "64"},
        FEW_BLOCKS,
        ("reported_kv",),
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    Case(
        "cache_off",
        "nine tenths of each prompt are shared, and the prefix cache is off",
        {"rate": 2.5, "num_requests": 36, "input_tokens": "1024", "output_tokens": "32", "prefix_share": 0.9},
        {"no-enable-prefix-caching": None},
        ("reported_prefix_misses",),
        "--enable-prefix-caching",
    ),
    Case(
        "small_budget",
        "32 tokens a step: a prompt takes as many steps as it has 32s",
        {"rate": 2.0, "num_requests": 30, "input_tokens": "1024", "output_tokens": "48"},
        {"max-num-batched-tokens": "32"},
        ("reported_budget",),
        "--max-num-batched-tokens",
    ),
    Case(
        "interference",
        "prompts of 3,500 tokens are computed in one step while others wait for their next token",
        {"rate": 0.6, "num_requests": 24, "input_tokens": "3500", "output_tokens": "128"},
        {"max-num-batched-tokens": "4096"},
        ("reported_interference",),
        "--max-num-batched-tokens",
        needs_load=True,
    ),
    Case(
        "overload",
        "sixteen slots, and many more arrivals than the machine serves",
        {"rate": 30.0, "num_requests": 240, **SHORT},
        {},
        ("overload", "reported_slots"),
        "--max-num",
        needs_load=True,
    ),
    Case(
        "queue_bound",
        "a queue of one: whoever comes with one waiting is refused, at a rate that could be served",
        {"rate": 6.0, "num_requests": 80, **SHORT},
        {"max-num-seqs": "4", "max-num-queued-reqs": "1"},
        ("reported_refusals", "reported_slots"),
        "--max-num",
    ),
    Case("healthy_short", "room for all", {"rate": 2.0, "num_requests": 40, **SHORT}),
    Case(
        "healthy_shared",
        "nine tenths of each prompt are shared, and found",
        {"rate": 2.0, "num_requests": 40, "input_tokens": "1024", "output_tokens": "32", "prefix_share": 0.9},
    ),
    Case(
        "healthy_long",
        "four users with long answers",
        {"concurrency": 4, "num_requests": 24, "input_tokens": "64", "output_tokens": "160"},
    ),
)
