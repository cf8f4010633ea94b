"""What every contender obeys: one JSON line in, one out. A contender loads once and then sleeps until it is asked.

    first line out      {"ready": true, "load_s": 3.1, "about": {...}}
    in                  {"cell": "decode", "batch": 8, "prompt_tokens": 16, "new_tokens": 16, "seed": 1}
                        {"cell": "prefill", "tokens": 512, "seed": 1}
    out                 {"seconds": 1.9, "tokens_per_s": 63.2}      or {"error": "..."}

decode: B requests of random ids at once; tokens of all streams per second of the time in which all of them decode, from
the step that gave the last stream its first token to the step that gave some stream its last. prefill: one request,
prompt tokens per second of the time until its first token. Greedy, no end-of-sequence, nothing cached between cells.

`serve` is the contender's side for engines that step in this process; it imports nothing but the standard library,
because it runs in each peer's own environment.
"""

import json
import os
import random
import sys
import time
from typing import Any, Protocol


class SteppingEngine(Protocol):
    """What a Python contender wraps. `about` is written into the result: versions and what the engine resolved."""

    about: dict[str, Any]

    def submit(self, stream: int, prompt: list[int], new_tokens: int) -> None: ...

    def step(self) -> list[int]:
        """One step; the stream of each token that it brought, empty if it brought none."""
        ...


def measure(engine: SteppingEngine, cell: dict[str, Any]) -> dict[str, float]:
    rng = random.Random(cell.get("seed", 0))
    if cell["cell"] == "prefill":
        tokens, seconds = cell["tokens"], _first_token_s(engine, _prompt(rng, cell["tokens"]))
    else:
        prompts = [_prompt(rng, cell["prompt_tokens"]) for _ in range(cell["batch"])]
        tokens, seconds = _steady(engine, prompts, cell["new_tokens"])
    return {"seconds": seconds, "tokens_per_s": tokens / seconds}


def _prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(5, 30_000) for _ in range(tokens)]


def _first_token_s(engine: SteppingEngine, prompt: list[int]) -> float:
    begin = time.perf_counter()
    engine.submit(0, prompt, 1)
    while not engine.step():
        pass
    return time.perf_counter() - begin


def _steady(engine: SteppingEngine, prompts: list[list[int]], new_tokens: int) -> tuple[int, float]:
    """Tokens and seconds of the time in which all streams decode."""
    counts = [0] * len(prompts)
    for stream, prompt in enumerate(prompts):
        engine.submit(stream, prompt, new_tokens)
    begin, at_begin, steady = 0.0, 0, (0, 0.0)
    while min(counts) < new_tokens:
        for stream in engine.step():
            counts[stream] += 1
        now = time.perf_counter()
        if begin == 0.0 and min(counts) > 0:
            begin, at_begin = now, sum(counts)
        elif begin and not steady[0] and max(counts) == new_tokens:
            steady = (sum(counts) - at_begin, now - begin)
    if not steady[0]:
        raise ValueError("some stream ended before the last one began: ask for more new tokens")
    return steady


def serve(load: Any) -> None:
    """Load with `load() -> SteppingEngine`, then answer until standard input ends. What libraries print is moved to
    standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begin = time.perf_counter()
    engine = load()
    measure(engine, {"cell": "decode", "batch": 2, "prompt_tokens": 16, "new_tokens": 4})
    ready = {"ready": True, "load_s": time.perf_counter() - begin, "about": engine.about}
    print(json.dumps(ready, default=str), file=answers)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = measure(engine, json.loads(line))
        except Exception as error:  # told to the harness, which goes on with the other contenders
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
