"""The model that a scenario serves, and how fast it is on this machine: loads ask what it can do.

    patient_of(None)            the packaged model
    patient_of("FILE.gguf")     another one, by what `splittime serve` takes

Loads are written down for the packaged model on the machine of `WRITTEN_FOR`. A slower model gets shorter prompts and
answers (`scale`), and so many requests that they ask as large a part of its time (`loads.Size`). Its pace is that of a
request alone: the quickest of several, since whatever else runs here can only make one slower.
"""

import json
import random
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.server_process import get_json, served

TRIES = 12
SHORT, LONG, ANSWER = 16, 272, 33  # tokens
LEAST_SCALE = 0.5  # shorter prompts have no parts to tell them by, shorter answers no gaps
LIKE_WRITTEN = 1.5  # a model that takes up to so many times as long gets the loads as they are written


class Pace(NamedTuple):
    """What a token of an answer and a token of a prompt take, of a request alone."""

    step_s: float
    token_s: float

    def work_s(self, prompt: float, output: float) -> float:
        """Returns what a request alone takes."""
        return prompt * self.token_s + output * self.step_s


WRITTEN_FOR = Pace(step_s=0.0010, token_s=0.00006)


class Patient(msgspec.Struct, frozen=True):
    """name: of the results. arguments: of `splittime serve`, before its settings. served: its name in the API.
    block_bytes: of the KV cache."""

    name: str
    arguments: tuple[str, ...] = ()
    served: str = "splittime-code"
    block_bytes: int = 32768
    pace: Pace = WRITTEN_FOR

    @property
    def is_packaged(self) -> bool:
        return not self.arguments

    @property
    def scale(self) -> float:
        """The lengths of prompts and answers, over those that are written down."""
        slower = self.pace.work_s(200, 40) / WRITTEN_FOR.work_s(200, 40)
        return 1.0 if slower < LIKE_WRITTEN else max(LEAST_SCALE, slower**-0.5)

    def tokens(self, number: float) -> int:
        """Returns how many tokens of this model stand for so many that are written down."""
        return max(1, round(number * self.scale))

    def cache(self, blocks: int, longest: int) -> tuple[str, ...]:
        """Returns the flags of a KV cache that holds as much as so many blocks do of what is written down, and of the
        longest request."""
        size = max(2, -(-blocks * self.tokens(600) // 600)) * self.block_bytes
        return ("--max-model-len", str(self.tokens(longest)), "--kv-cache-memory-bytes", str(size))


WRITTEN = Patient("as written")


def patient_of(model: str | None, pace: Pace | None = None) -> Patient:
    """Returns the model with its pace on this machine, by a server of its own. pace: is known already."""
    arguments = () if model is None else (model,)
    with served(*arguments) as url:
        name = get_json(f"{url}/v1/models")["data"][0]["id"]
        settings = get_json(f"{url}/ledger/facts")["settings"]
        pace = pace or _pace(url, name)
    short = "packaged" if model is None else Path(model).stem.lower()
    return Patient(short, arguments, name, settings["kv_bytes_per_block"], pace)


def _pace(url: str, name: str) -> Pace:
    rng = random.Random(0)
    base_s, answer_s, prompt_s = (
        min(_takes_s(url, name, rng, prompt, output) for _ in range(TRIES))
        for prompt, output in ((SHORT, 1), (SHORT, ANSWER), (LONG, 1))
    )
    return Pace(max(1e-3, answer_s - base_s) / (ANSWER - 1), max(1e-3, prompt_s - base_s) / (LONG - SHORT))


def _takes_s(url: str, model: str, rng: random.Random, prompt: int, output: int) -> float:
    tokens = [rng.randrange(10, 4000) for _ in range(prompt)]
    body = {"model": model, "prompt": tokens, "max_tokens": output, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    begin_s = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
    return time.monotonic() - begin_s
