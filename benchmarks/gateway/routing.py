"""What routing between a small and a large model by the small one's first tokens costs and is worth.

    python -m benchmarks.gateway.routing [--prompts N] [--json]
    python -m benchmarks.gateway.routing --small        a trial: few prompts, no figures to be quoted

No set of prompts with judged answers comes with this project, so they are made here, with the two models in the
package: `code-draft` is the small one and `code` the large one. A prompt is a piece of a module of Python's library
that neither was trained on, cut off within a line; an answer is right if its first 4 characters, greedy, are those of
the module. That is measured and not assumed; but it is a construction: both models are tiny, and a prompt is no
question.

A third of the prompts are the labels (modules that picked the models' checkpoints), the others are evaluated (modules
that nobody has read). The target is what the large model alone reaches on the labels at the least, less 2 points of a
hundred. As many answers are escalated as the bound says: `at_most` is 1.

* by_parameters: as `splittime gateway evaluate` finds it, where a token, of prompt and answer alike, costs as much as
  its model has parameters; by_price: where an answer of the large model costs 20 times as much as one of the small one
* routes: some of the evaluated prompts asked through a gateway, as streams one after the other: the large model alone,
  the small one, and `tokens` (verify, then escalate). right, cost, first_ms (to the first text), all_ms
* added_ms: of answers that were escalated, how much later their first text came than that of the large model alone;
  held_ms: of sure ones, how long their first tokens were held back

Worth and cost do not depend on the machine. All processes share its cores, so latencies do.
"""

import argparse
import http.client
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.report import file_result
from benchmarks.server_process import served
from splittime.gateway.config import DifficultyConfig, EscalateConfig
from splittime.gateway.routing.difficulty import LEAST, LabelledPrompt, cheapest, lower_end, worth_of
from splittime.gateway.routing.rehearse import Costs, evaluate
from splittime.ledger.derive import percentiles
from splittime.stats.paired import means
from training.corpus import Document, load_corpus

SMALL, LARGE = "code-draft", "code"
PROMPT_CHARS, ANSWER_CHARS, MAX_TOKENS, LOOKED_AT = 400, 4, 8, 2
LESS = 0.02  # than the large model alone
ROUTE = "tokens"


class Piece(NamedTuple):
    """Of a module: what is asked, and how it goes on."""

    prompt: str
    truth: str


class Answer(NamedTuple):
    """logprob: the mean of the first tokens'. first_ms: until the first text; its account has the rest."""

    text: str
    tokens: int
    logprob: float = 0.0
    first_ms: float = 0.0
    all_ms: float = 0.0
    model: str = ""
    request_id: str = ""


def pieces(documents: Sequence[Document], count: int) -> list[Piece]:
    """Returns pieces of these modules, none of which overlap, each cut off within a line between a word and none."""
    found = []
    for text in (document.text for document in documents):
        for begin in range(PROMPT_CHARS, len(text) - 2 * PROMPT_CHARS, 2 * PROMPT_CHARS):
            places = (at for at in range(begin, begin + PROMPT_CHARS) if _is_between(text, at))
            if (at := next(places, None)) is not None:
                found.append(Piece(text[at - PROMPT_CHARS : at], text[at : at + ANSWER_CHARS]))
    random.Random(0).shuffle(found)
    return found[:count]


def _is_between(text: str, at: int) -> bool:
    truth = text[at : at + ANSWER_CHARS]
    return "\n" not in truth and not truth.isspace() and text[at - 1].isalnum() != text[at].isalnum()


# ---- both models' answers


def ask(url: str, model: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, **more}
    asked = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    asked.add_header("content-type", "application/json")
    with urllib.request.urlopen(asked, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def answer_of(url: str, model: str, prompt: str) -> Answer:
    told = ask(url, model, prompt, logprobs=1)
    (choice,) = told["choices"]
    first = choice["logprobs"]["token_logprobs"][:LOOKED_AT]
    return Answer(choice["text"], told["usage"]["total_tokens"], sum(first) / len(first) if first else 0.0)


def is_right(piece: Piece, answer: Answer) -> bool:
    return answer.text.startswith(piece.truth)


def labelled(piece: Piece, small: Answer, large: Answer, weights: dict[str, int]) -> LabelledPrompt:
    return LabelledPrompt(
        small_right=is_right(piece, small),
        large_right=is_right(piece, large),
        small_cost=small.tokens * weights[SMALL] / 1e6,
        large_cost=large.tokens * weights[LARGE] / 1e6,
        small_logprob=small.logprob,
    )


# ---- through a gateway


def config(urls: dict[str, str], below: float) -> str:
    told = "port = 0\n"
    for name, url in urls.items():
        told += f'[[upstream]]\nname = "{name}"\nurl = "{url}"\nmodels = ["{name}"]\nkind = "splittime"\n'
    told += f'[[difficulty]]\nmodel = "{ROUTE}"\nsmall = "{SMALL}"\nlarge = "{LARGE}"\n'
    return told + f"escalate = {{ below = {below}, tokens = {LOOKED_AT}, at_most = 1.0 }}\n"


@contextmanager
def gateway(text: str, folder: Path) -> Iterator[str]:
    """Yields its address."""
    path = folder / "gateway.toml"
    path.write_text(text)
    command = [sys.executable, "-m", "splittime.cli.main", "gateway", "--config", str(path), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["gateway"]
    finally:
        process.terminate()
        process.wait(60)


def listen(address: str, model: str, prompt: str) -> Answer:
    """Returns a stream's answer, with when its first text came."""
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    connection, begin_ns = http.client.HTTPConnection(address, timeout=120), time.monotonic_ns()
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream_options": {"include_usage": True}}))
    response, texts, first_ns, tokens = connection.getresponse(), list[str](), 0, 0
    for line in response:
        data = line.removeprefix(b"data: ").strip()
        if not data.startswith(b"{"):
            continue
        chunk = json.loads(data)
        tokens = (chunk.get("usage") or {}).get("total_tokens", tokens)
        texts += [choice["text"] for choice in chunk["choices"]]
        first_ns = first_ns or (time.monotonic_ns() if any(texts) else 0)
    end_ns = time.monotonic_ns()
    connection.close()
    first_ms, all_ms = ((at_ns - begin_ns) / 1e6 for at_ns in (first_ns or end_ns, end_ns))
    wrote = response.headers["x-splittime-model"] or model
    return Answer("".join(texts), tokens, 0.0, first_ms, all_ms, wrote, response.headers["x-request-id"])


def asked_by_all(address: str, prompts: Sequence[Piece]) -> dict[str, list[Answer]]:
    """Each prompt by each route, in an order of chance: a cache of prefixes favours whoever comes second."""
    draw, found = random.Random(1), {name: list[Answer]() for name in (LARGE, SMALL, ROUTE)}
    for piece in prompts:
        for name in draw.sample(list(found), len(found)):
            found[name].append(listen(address, name, piece.prompt))
    return found


def first_tokens(address: str, request_id: str) -> dict[str, Any] | None:
    """Returns what the account says of the first attempt; None where it was not looked at."""
    with urllib.request.urlopen(f"http://{address}/ledger/requests/{request_id}", timeout=60) as answer:
        found: dict[str, Any] | None = json.load(answer)["attempts"][0]["first_tokens"]
    return found


# ---- figures


def route_figures(
    address: str, prompts: Sequence[Piece], by_route: dict[str, list[Answer]], weights: dict[str, int]
) -> dict[str, Any]:
    figures = {}
    for name, answers in by_route.items():
        looked = [first_tokens(address, answer.request_id) for answer in answers]
        added = [one.first_ms - large.first_ms for one, large, _ in _anew(answers, by_route[LARGE], looked)]
        held = [found["held_ns"] / 1e6 for found in looked if found is not None and found["verdict"] == "sure"]
        costs = [_cost(answer, found, weights) for answer, found in zip(answers, looked, strict=True)]
        figures[name] = {
            "right": statistics.mean(is_right(*pair) for pair in zip(prompts, answers, strict=True)),
            "share_small": statistics.mean(answer.model == SMALL for answer in answers),
            "cost": statistics.mean(costs),
            "first_ms": percentiles([answer.first_ms for answer in answers], (50, 99)),
            "all_ms": percentiles([answer.all_ms for answer in answers], (50, 99)),
            "escalated": len(added),
            "added_ms": percentiles(added, (50, 90)) if added else None,
            "held_ms": percentiles(held, (50, 90)) if held else None,
        }
    return figures


def _anew(
    answers: Sequence[Answer], large: Sequence[Answer], looked: Sequence[dict[str, Any] | None]
) -> Iterator[tuple[Answer, Answer, dict[str, Any]]]:
    for one, other, found in zip(answers, large, looked, strict=True):
        if found is not None and found["verdict"] == "unsure":
            yield one, other, found


def _cost(answer: Answer, found: dict[str, Any] | None, weights: dict[str, int]) -> float:
    """An escalated answer costs the small model's prompt and first tokens too."""
    own = answer.tokens * weights[answer.model]
    cut_off = found is not None and found["verdict"] == "unsure"
    return (own + (cut_off and (answer.tokens - MAX_TOKENS + LOOKED_AT) * weights[SMALL])) / 1e6


def bound_of(labels: Sequence[LabelledPrompt], target: float) -> float:
    """Returns the log-probability below which the large model is asked, by the labels."""
    logprobs = np.array([one.small_logprob or 0.0 for one in labels])
    return cheapest(logprobs, worth_of(labels), target, [LEAST, *np.unique(logprobs).tolist(), 0.0]).threshold


def weights_of(*models: str) -> dict[str, int]:
    """Returns each model's parameters, from its weights' size in two-byte numbers."""
    from splittime.assemble.model_source import locate

    return {model: (locate(model) / "model.safetensors").stat().st_size // 2 for model in models}


def measured(count: int, streamed: int, folder: Path) -> dict[str, Any]:
    corpus, weights = load_corpus(), weights_of(SMALL, LARGE)
    prompts = [*pieces(corpus.validation, count // 3), *pieces(corpus.heldout, count - count // 3)]
    with served(SMALL, "--served-model-name", SMALL) as small, served(LARGE, "--served-model-name", LARGE) as large:
        urls = {SMALL: small, LARGE: large}
        answers = [[answer_of(urls[name], name, piece.prompt) for name in urls] for piece in prompts]
        told = [labelled(piece, pair[0], pair[1], weights) for piece, pair in zip(prompts, answers, strict=True)]
        labels, judged = told[: count // 3], told[count // 3 :]
        mean = statistics.mean(float(one.large_right or 0) for one in labels)
        target = max(0.0, lower_end(mean, len(labels)) - LESS)
        below = bound_of(labels, target)
        with gateway(config(urls, below), folder) as url:
            address, some = url.removeprefix("http://"), prompts[count // 3 :][:streamed]
            routes = route_figures(address, some, asked_by_all(address, some), weights)
    priced = [msgspec.structs.replace(one, small_cost=1.0, large_cost=20.0) for one in judged]
    found = {"by_parameters": evaluated(judged, below), "by_price": evaluated(priced, below)}
    return {"target": target, "below": below, "routes": routes, **found}


def evaluated(judged: Sequence[LabelledPrompt], below: float) -> dict[str, Any]:
    route = DifficultyConfig(model=ROUTE, small=SMALL, large=LARGE, escalate=EscalateConfig(below=below))
    found: dict[str, Any] = msgspec.to_builtins(evaluate(route, judged, Costs(1, 1), means))
    return found


def show(found: dict[str, Any]) -> None:
    print(f"target {found['target']:.3f}, unsure below {found['below']:.3f}")
    print(f"{'route':<12}{'right':>7}{'small':>7}{'cost':>8}{'first ms p50':>14}{'escalated':>11}{'added ms p50':>14}")
    for name, one in found["routes"].items():
        added = "-" if one["added_ms"] is None else f"{one['added_ms']['p50']:.1f}"
        cells = f"{one['right']:>7.3f}{one['share_small']:>7.0%}{one['cost']:>8.1f}{one['first_ms']['p50']:>14.1f}"
        print(f"{name:<12}{cells}{one['escalated']:>11}{added:>14}")
    for name in ("by_parameters", "by_price"):
        for point in ("always_small", "always_large", "best", "chosen"):
            print(f"{name:<14} {point:<13}{_words(found[name][point])}")


def _words(point: dict[str, Any]) -> str:
    worth, gain = point["worth"], point["gain"]
    chance = f"gain over chance {gain['value']:.3f} ({gain['low']:.3f} to {gain['high']:.3f})"
    interval = f"({worth['low']:.3f} to {worth['high']:.3f})"
    return f"worth {worth['value']:.3f} {interval}, cost {point['cost']['value']:.1f}, {chance}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prompts", type=int, default=3000, help="labels and evaluated ones together")
    parser.add_argument("--streams", type=int, default=200, help="evaluated ones that go through a gateway too")
    parser.add_argument("--small", action="store_true", help="a trial with few prompts")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    asked = parser.parse_args()
    count, streams = (150, 10) if asked.small else (asked.prompts, asked.streams)
    with tempfile.TemporaryDirectory() as folder:
        figures = measured(count, streams, Path(folder))
    if not asked.json:
        show(figures)
    file_result("gateway_routing", figures, {"prompts": count, "streams": streams}, asked.json)


if __name__ == "__main__":
    main()
