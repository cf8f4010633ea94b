"""Embeddings a second, beside transformers in the same process, by turns.

    python -m benchmarks.scenarios.embeddings [--model FOLDER] [--dtype float32] [--threads 2] [--texts 256]
        [--shortest 8] [--longest 256] [--batch 32] [--repeats 5] [--small] [--json]

The same inputs go to both: token ids, with lengths drawn evenly on a logarithmic scale. Ours are given at once and
batched by tokens (`LLM.embed`). transformers' are sorted by length and padded in batches of `--batch`, as
sentence-transformers does it. Both pool as the model's files say, and both use as many threads. The first turn of each
does not count; in it the vectors are compared, and a run whose vectors differ by more than `--most-error` fails.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.report import file_result
from splittime import LLM
from splittime.assemble import model_source
from splittime.core.pooling import LEAST_LENGTH, Pooling

Inputs = Sequence[tuple[int, ...]]
Embed = Callable[[Inputs], np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most-error", type=float, default=1e-3)
    parser.add_argument("--small", action="store_true", help="to see that it works: the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.small:
        arguments.texts, arguments.longest, arguments.repeats = 6, 24, 1
    say: Callable[[str], None] = (lambda text: None) if arguments.json else print
    figures = compare(arguments, say)
    path = file_result("embeddings", figures, vars(arguments), arguments.json)
    say(f"written to {path}")


def compare(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    limits = {"max_model_len": arguments.longest, "num_threads": arguments.threads, "dtype": arguments.dtype}
    llm = LLM(arguments.model, **limits, speculative_config='{"method": "none"}', enable_prefix_caching=False)
    inputs = drawn(arguments.texts, arguments.shortest, arguments.longest, llm.resolved["vocab_size"])
    arms: dict[str, Embed] = {
        "splittime": lambda given: np.array(llm.embed(given), dtype=np.float32),
        "transformers": transformers_embed(arguments, Pooling(**llm.resolved["pooling"])),
    }
    error = float(np.abs(arms["splittime"](inputs) - arms["transformers"](inputs)).max())
    if error > arguments.most_error:
        raise SystemExit(f"the vectors differ by {error:.2g}, more than {arguments.most_error}")
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(arguments.repeats):
        for name in sorted(arms, reverse=number % 2 == 0):
            rates[name].append(_rate(arms[name], inputs))
    ratios = [ours / theirs for ours, theirs in zip(*rates.values(), strict=True)]
    found = {f"{name}_texts_per_s": statistics.median(one) for name, one in rates.items()}
    found |= {"ratio": statistics.median(ratios), "ratio_from": min(ratios), "ratio_to": max(ratios)}
    for name, one in rates.items():
        say(f"{name:12} {statistics.median(one):8.1f} texts/s ({min(one):.1f} to {max(one):.1f})")
    say(f"ratio {found['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), vectors within {error:.1g}")
    return found | {"tokens": sum(map(len, inputs)), "largest_difference": error}


def drawn(count: int, shortest: int, longest: int, vocab_size: int) -> list[tuple[int, ...]]:
    source = np.random.default_rng(0)
    lengths = np.exp(source.uniform(np.log(shortest), np.log(longest), count)).round().astype(int)
    return [tuple(source.integers(0, vocab_size, length).tolist()) for length in lengths]


def _rate(embed: Embed, inputs: Inputs) -> float:
    begin_s = time.monotonic()
    embed(inputs)
    return len(inputs) / (time.monotonic() - begin_s)


def transformers_embed(arguments: argparse.Namespace, pooling: Pooling) -> Embed:
    from transformers import AutoModel

    folder = model_source.locate(arguments.model)
    model = AutoModel.from_pretrained(folder, dtype=getattr(torch, arguments.dtype)).eval()
    torch.set_num_threads(arguments.threads)

    @torch.inference_mode()
    def embed(inputs: Inputs) -> np.ndarray:
        order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
        found: dict[int, np.ndarray] = {}
        for begin in range(0, len(order), arguments.batch):
            some = order[begin : begin + arguments.batch]
            found |= dict(zip(some, _batch(model, [inputs[index] for index in some], pooling), strict=True))
        return np.stack([found[index] for index in range(len(inputs))])

    return embed


def _batch(model: Any, inputs: Inputs, pooling: Pooling) -> np.ndarray:
    """Padded behind; what is computed there is not looked at."""
    lengths = torch.tensor([len(ids) for ids in inputs])
    tokens = torch.zeros(len(inputs), int(lengths.max()), dtype=torch.int64)
    for line, ids in zip(tokens, inputs, strict=True):
        line[: len(ids)] = torch.tensor(ids)
    is_there = torch.arange(tokens.shape[1]) < lengths[:, None]
    states = model(input_ids=tokens, attention_mask=is_there.long(), use_cache=False).last_hidden_state.float()
    if pooling.kind == "mean":
        vectors = (states * is_there[..., None]).sum(1) / lengths[:, None]
    else:
        vectors = states[:, 0] if pooling.kind == "cls" else states[torch.arange(len(inputs)), lengths - 1]
    if pooling.is_normalised:
        vectors = torch.nn.functional.normalize(vectors, eps=LEAST_LENGTH)
    return vectors.numpy()


if __name__ == "__main__":
    main()
