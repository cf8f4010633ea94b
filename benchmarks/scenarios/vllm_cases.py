"""The servers of `vllm_doctor`: sick ones, of which the cause is known as it was made, and healthy ones.

Each is vLLM with one setting changed (`BASE` is a healthy server for these loads), and a load that shows the illness.
A load is lines, each of requests that are sent one after the other from an instant on; how much is sent follows from
what this machine takes for a step (`Pace`). `names`: the findings of which one must come first; `word`: what its cure
must name; none where nothing may be found.
"""

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

BASE: dict[str, str | None] = {
    "max-model-len": "1024",
    "max-num-seqs": "16",
    "max-num-batched-tokens": "1024",
    "enforce-eager": None,  # compiling would take longer than a load
}
FEW_BLOCKS: dict[str, str | None] = {
    "block-size": "32",
    "num-gpu-blocks-override": "17",  # one of them is vLLM's own
    "max-model-len": "512",
}
VOCAB = (1_000, 4_000)  # ids of any words of the packaged model: below are the tokens that mean something


@dataclass(frozen=True)
class Pace:
    """What this machine takes, in s: for a step with one row, and for a token of a prompt."""

    step_s: float
    token_s: float

    def alone_s(self, prompt: int, output: int) -> float:
        """How long such a request takes that is alone."""
        return prompt * self.token_s + output * self.step_s


@dataclass(frozen=True)
class Ask:
    """leaves_s: the client hangs up then."""

    prompt: list[int]
    output: int
    priority: int = 0
    leaves_s: float | None = None


@dataclass(frozen=True)
class Line:
    """Requests that are sent one after the other, the first at an instant."""

    at_s: float
    asks: tuple[Ask, ...]


class MadeServer:
    """A vLLM with settings, on top of those of a healthy one; None is a flag without a value. names: what is found."""

    base: Mapping[str, str | None]
    settings: Mapping[str, str | None]
    names: tuple[str, ...]

    @property
    def is_healthy(self) -> bool:
        return not self.names

    @property
    def flags(self) -> list[str]:
        merged = {**self.base, **self.settings}
        return [part for name, value in merged.items() for part in (f"--{name}", value) if part is not None]


@dataclass(frozen=True)
class Case(MadeServer):
    """One of `vllm_doctor`."""

    name: str
    truth: str
    load: Callable[[Pace], list[Line]]
    settings: dict[str, str | None] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    word: str = ""

    base = BASE


def ids(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(*VOCAB) for _ in range(length)]


def users(number: int, each: int, prompt: int, output: int, seed: int = 1) -> list[Line]:
    """So many at once, each of whom asks so many times."""
    return [
        Line(0.05 * user, tuple(Ask(ids(prompt, seed + 1000 * user + i), output) for i in range(each)))
        for user in range(number)
    ]


def arrivals(rate: float, asks: Iterable[Ask], seed: int = 1) -> list[Line]:
    """At Poisson instants, so many a second."""
    draw, at_s, lines = random.Random(seed), 0.0, []
    for ask in asks:
        at_s += draw.expovariate(rate)
        lines.append(Line(at_s, (ask,)))
    return lines


def plain(count: int, prompt: int, output: int, seed: int = 1, **more: object) -> list[Ask]:
    return [Ask(ids(prompt, 100_000 * seed + i), output, **more) for i in range(count)]  # type: ignore[arg-type]


def shared(count: int, prompt: int, output: int) -> list[Ask]:
    """Nine tenths of each prompt are the same."""
    begin = ids(prompt * 9 // 10, 77)
    return [Ask(begin + ids(prompt - len(begin), i), output) for i in range(count)]


def dated(count: int, prompt: int, output: int) -> list[Ask]:
    """As `shared`, behind something that is never the same."""
    rest = ids(prompt - 16, 77)
    return [Ask(ids(16, i) + rest, output) for i in range(count)]


def chats_and_prompts(pace: Pace) -> list[Line]:
    """Four streams, and long prompts one soon after another."""
    apart_s = 1.4 * pace.alone_s(900, 2)
    prompts = [Line(1 + apart_s * i, (Ask(ids(900, 5000 + i), 2),)) for i in range(40)]
    answers = max(3, int(40 * apart_s / (100 * pace.step_s * 2)))
    return users(4, answers, 32, 100) + prompts


def short_behind_long(pace: Pace) -> list[Line]:
    """Long prompts for two thirds of the time, and short ones that meet them."""
    apart_s = 1.5 * pace.alone_s(900, 1)
    long = [Line(apart_s * i, (Ask(ids(900, 5000 + i), 1),)) for i in range(15)]
    return long + arrivals(60 / (15 * apart_s), plain(60, 16, 1))


def preferred_and_others(pace: Pace) -> list[Line]:
    """Eight who go first have all of each step's tokens for twelve seconds; ten others wait until these have done."""
    each = max(3, int(12 / (8 * pace.alone_s(400, 1))))
    often = [Line(0.01 * user, tuple(plain(each, 400, 1, seed=50 + user))) for user in range(8)]
    others = [Line(0.5 + 0.2 * i, (Ask(ids(32, 900 + i), 4, priority=9),)) for i in range(10)]
    return often + others


def bursts(pace: Pace) -> list[Line]:
    """Forty at one moment, four times: once is an event that another run need not have."""
    steady = arrivals(0.15 / pace.alone_s(32, 12), plain(80, 32, 12))
    together = [
        Line(steady[15 + 18 * number].at_s + 0.002 * i, (ask,))
        for number in range(4)
        for i, ask in enumerate(plain(40, 32, 12, seed=3 + number))
    ]
    return steady + together


CASES = (
    Case(
        "slots_1",
        "one slot for four users",
        lambda pace: users(4, 8, 32, 12),
        {"max-num-seqs": "1"},
        ("slot_bound",),
        "--max-num-seqs",
    ),
    Case(
        "slots_2",
        "two slots for eight users",
        lambda pace: users(8, 6, 32, 12),
        {"max-num-seqs": "2"},
        ("slot_bound",),
        "--max-num-seqs",
    ),
    Case(
        "kv_preempted",
        "sixteen blocks of 32: answers outgrow the cache together",
        lambda pace: users(8, 4, 56, 90),
        FEW_BLOCKS,
        ("preemption_thrash", "kv_bound"),
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    Case(
        "kv_admits_one",
        "sixteen blocks of 32: one prompt of 300 tokens fits at a time",
        lambda pace: users(5, 7, 300, 12),
        FEW_BLOCKS,
        ("kv_bound",),
        "VLLM_CPU_KVCACHE_SPACE",
    ),
    Case(
        "cache_off",
        "nine tenths of each prompt are shared, and the prefix cache is off",
        lambda pace: arrivals(0.5 / pace.alone_s(800, 6), shared(36, 800, 6)),
        {"no-enable-prefix-caching": None},
        ("uncached_reuse",),
        "--enable-prefix-caching",
    ),
    Case(
        "date_in_front",
        "what is shared stands behind what never is",
        lambda pace: arrivals(0.5 / pace.alone_s(800, 6), dated(36, 800, 6)),
        {},
        ("prefix_broken",),
        "behind",
    ),
    Case(
        "small_budget",
        "32 tokens a step: a prompt takes as many steps as it has 32s",
        lambda pace: users(2, 14, 500, 6),
        {"max-num-batched-tokens": "32"},
        ("token_budget_bound",),
        "--max-num-batched-tokens",
    ),
    Case(
        "interference",
        "prompts of 900 tokens are computed in one step while four streams wait for their next token",
        chats_and_prompts,
        {},
        ("prefill_interference",),
        "--long-prefill-token-threshold",
    ),
    Case(
        "head_of_line",
        "256 tokens a step, which long prompts take while short ones wait",
        short_behind_long,
        {"max-num-batched-tokens": "256"},
        ("head_of_line", "token_budget_bound"),  # the latter first where a step of 256 tokens is mostly overhead
        "token",
    ),
    Case(
        "overload",
        "sixteen slots, and many more arrivals than the machine serves",
        lambda pace: arrivals(24 / pace.alone_s(32, 16), plain(400, 32, 16)),
        {},
        ("overload", "slot_bound"),
        "--max-num",
    ),
    Case(
        "queue_bound",
        "three may be in flight: others are refused, at a rate that could be served",
        lambda pace: arrivals(1.5 / pace.alone_s(32, 12), plain(80, 32, 12)),
        {"max-num-queued-reqs": "3"},
        ("queue_bound",),
        "--max-num-queued-reqs",
    ),
    Case(
        "priority_starves",
        "those with a lower number always go first",
        preferred_and_others,
        {"scheduling-policy": "priority", "max-num-batched-tokens": "512"},
        ("starvation",),
        "--scheduling-policy",
    ),
    Case("bursts", "forty at one moment, four times, beside a steady few", bursts, {}, ("burst",), "spread"),
    Case(
        "healthy_short",
        "room for all",
        lambda pace: arrivals(0.4 / pace.alone_s(48, 20), plain(40, 48, 20)),
    ),
    Case(
        "healthy_shared",
        "nine tenths of each prompt are shared, and found",
        lambda pace: arrivals(0.3 / pace.alone_s(120, 6), shared(40, 800, 6)),
    ),
    Case("healthy_long", "four users with long answers", lambda pace: users(4, 6, 64, 60)),
    Case(
        "healthy_hang_up",
        "every third client hangs up in the middle of its answer",
        lambda pace: arrivals(
            0.4 / pace.alone_s(48, 24),
            [Ask(ids(48, i), 24, leaves_s=None if i % 3 else pace.alone_s(48, 10)) for i in range(45)],
        ),
    ),
)
