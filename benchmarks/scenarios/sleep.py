"""What a sleeping server on a CPU gives back, and how soon it answers again: `splittime serve` over HTTP.

    python -m benchmarks.scenarios.sleep                                      the model in the package
    python -m benchmarks.scenarios.sleep --model FOLDER --quantization int8
    python -m benchmarks.scenarios.sleep --repeats 3 --json

Each repeat, for either level: prompts fill the KV cache, the server is put to sleep and woken, and answers one request
of one token; the same request was timed before. Memory is the engine process's, resident, by the server's own answers.
Beside it stands the time of a start, of which waking is to be a small part, with the bytecode that a first start has
written, whatever PYTHONDONTWRITEBYTECODE says. Packed weights are kept in a folder of the run's own, as they are by
default in the user's. A figure is the median of the repeats, with their extremes.
"""

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import file_result
from benchmarks.server_process import served

MIB = 1 << 20
MOST_AT_ONCE = 8
Figures = dict[str, list[float]]


def post(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")
    with urllib.request.urlopen(request, timeout=300) as response:
        return json.load(response)


class Server:
    def __init__(self, url: str) -> None:
        self._url = url
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
            self._model = json.load(response)["data"][0]["id"]

    def answer_ms(self, first: int = 5, tokens: int = 8) -> float:
        """Of a prompt that begins with this token."""
        begin = time.monotonic()
        prompt = [first, *((7 * place + first) % 500 + 5 for place in range(tokens - 1))]
        post(f"{self._url}/v1/completions", {"model": self._model, "prompt": prompt, "max_tokens": 1})
        return (time.monotonic() - begin) * 1e3

    def fill(self, prompts: int, tokens: int) -> None:
        with ThreadPoolExecutor(MOST_AT_ONCE) as threads:
            list(threads.map(lambda number: self.answer_ms(number + 10, tokens), range(prompts)))

    def slept(self, level: int) -> dict[str, float]:
        """Figures of one sleep."""
        self.answer_ms()
        usual_ms = self.answer_ms()
        asleep, awake = post(f"{self._url}/sleep?level={level}"), post(f"{self._url}/wake")
        first_ms = self.answer_ms()
        return {
            "before_mib": asleep["memory_before_bytes"] / MIB,
            "asleep_mib": asleep["memory_after_bytes"] / MIB,
            "woken_mib": awake["memory_after_bytes"] / MIB,
            "kv_mib": asleep["kv_bytes"] / MIB,
            "weights_mib": asleep["weights_bytes"] / MIB,
            "sleep_ms": asleep["total_ms"],
            "wake_ms": awake["total_ms"],
            "wake_weights_ms": awake["parts_ms"]["weights"],
            "usual_answer_ms": usual_ms,
            "first_answer_ms": first_ms,
        }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*([options.model] if options.model else []), "--packed-cache", folder]
        arguments += ["--max-model-len", str(options.max_model_len)]
        arguments += ["--quantization", options.quantization] if options.quantization else []
        with served(*arguments, timeout_s=300):
            pass  # what a first start packs, later ones read
        begin = time.monotonic()
        with served(*arguments, timeout_s=300) as url:
            found: dict[str, Any] = {"start_ms": (time.monotonic() - begin) * 1e3}
            server = Server(url)
            for level in (1, 2):
                rounds = []
                for _ in range(options.repeats):
                    server.fill(options.prompts, options.prompt_tokens)
                    rounds.append(server.slept(level))
                found[f"level {level}"] = {name: [one[name] for one in rounds] for name in rounds[0]}
    return found


def table(found: dict[str, Any]) -> Table:
    shown = Table("", "level 1", "level 2", title=f"start to ready: {found['start_ms']:.0f} ms")
    for name in found["level 1"]:
        shown.add_row(name.replace("_", " "), *(_told(found[f"level {level}"][name]) for level in (1, 2)))
    return shown


def _told(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; default: the model in the package")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--name", default="sleep", help="of the file of results")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options)
    path = file_result(options.name, found, vars(options), options.json)
    if not options.json:
        Console().print(table(found))
        Console().print(f"written to {path}")


if __name__ == "__main__":
    main()
