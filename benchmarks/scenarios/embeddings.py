"""Embeddings a second, beside transformers, each in a process of its own, by turns.

    python -m benchmarks.scenarios.embeddings [--model FOLDER | --shape minilm] [--dtype float32] [--threads 2]
        [--texts 256] [--shortest 8] [--longest 256] [--batch 32] [--repeats 5] [--small] [--json]

The same inputs go to both: token ids, with lengths drawn evenly on a logarithmic scale. Ours are given at once and
batched by tokens (`LLM.embed`). transformers' are sorted by length and padded in batches of `--batch`, as
sentence-transformers does it. All pool as the model's files say, and all use as many threads. In one process they would
not: torch has one number of threads, which each would set for the others, and threads of one that still spin take the
cores from the next. The first turn of each does not count; in it the vectors are compared, and a run whose vectors
differ by more than `--most-error` fails.

`--shape` makes a random encoder of that shape. Its inputs are texts, which ours and sentence-transformers' own `encode`
tokenize; that is asked too where it is installed (`pip install sentence-transformers`). transformers gets token ids.
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from benchmarks.report import file_result
from benchmarks.scenarios.encoder_shapes import SHAPES, SPECIAL, write_encoder
from splittime import LLM
from splittime.assemble import model_source
from splittime.core.facts import LEAST_LENGTH, Pooling

Inputs = Sequence[tuple[int, ...]]
Embed = Callable[[Any], np.ndarray]  # texts, or token ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--shape", choices=SHAPES)
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
    if arguments.model and arguments.shape:
        parser.error("--shape makes a model: leave --model out")
    say: Callable[[str], None] = (lambda text: None) if arguments.json else print
    given = dict(vars(arguments))
    with ExitStack() as held:
        if arguments.shape:
            arguments.model = held.enter_context(tempfile.TemporaryDirectory())
            write_encoder(Path(arguments.model), SHAPES[arguments.shape])
        figures = compare(arguments, say)
    path = file_result(_name(arguments.shape), figures, given, arguments.json)
    say(f"written to {path}")


def _name(shape: str | None) -> str:
    return "embeddings" if shape is None else f"embeddings_{shape}"


class Arm:
    """A process of its own, which embeds when it is asked to. make: in that process, of what is given here; what it
    tells beside is `told`."""

    def __init__(self, make: Callable[..., tuple[Embed, Any]], *given: Any) -> None:
        self._connection, theirs = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=_serve, args=(theirs, make, *given), daemon=True)
        self._process.start()
        theirs.close()
        self.told = self._connection.recv()

    def embed(self, inputs: Any) -> tuple[np.ndarray, float]:
        """Returns vectors, and the seconds that they took."""
        self._connection.send(inputs)
        vectors, took_s = self._connection.recv()
        return vectors, took_s

    def __enter__(self) -> "Arm":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()
        self._process.join()


def _serve(connection: Connection, make: Callable[..., tuple[Embed, Any]], *given: Any) -> None:
    """Embeds what comes, until the other end is closed."""
    embed, told = make(*given)
    connection.send(told)
    while True:
        try:
            inputs = connection.recv()
        except EOFError:
            return
        begin_s = time.monotonic()
        vectors = embed(inputs)
        connection.send((vectors, time.monotonic() - begin_s))


def compare(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    is_shape = arguments.shape is not None
    with ExitStack() as held:
        ours = held.enter_context(Arm(splittime_arm, arguments))
        pooling, vocab_size = ours.told
        arms = {"splittime": ours, "transformers": held.enter_context(Arm(transformers_arm, arguments, pooling))}
        if is_shape and importlib.util.find_spec("sentence_transformers") is not None:
            arms["sentence_transformers"] = held.enter_context(Arm(sentence_transformers_arm, arguments))
        inputs = drawn(arguments.texts, arguments.shortest, arguments.longest, vocab_size, is_shape)
        texts = [" ".join(f"w{token}" for token in ids[1:-1]) for ids in inputs] if is_shape else inputs
        given = {name: inputs if name == "transformers" else texts for name in arms}
        error = _largest_difference([arms[name].embed(given[name])[0] for name in arms])
        if error > arguments.most_error:
            raise SystemExit(f"the vectors differ by {error:.2g}, more than {arguments.most_error}")
        rates: dict[str, list[float]] = {name: [] for name in arms}
        for number in range(arguments.repeats):
            for name in sorted(arms, reverse=number % 2 == 0):
                rates[name].append(len(inputs) / arms[name].embed(given[name])[1])
    for name, one in rates.items():
        say(f"{name:22} {statistics.median(one):8.1f} texts/s ({min(one):.1f} to {max(one):.1f})")
    say(f"vectors within {error:.1g}")
    found = {f"{name}_texts_per_s": statistics.median(one) for name, one in rates.items()}
    found |= {f"{name}_texts_per_s_best": max(one) for name, one in rates.items()}
    return found | _ratios(rates, say) | {"tokens": sum(map(len, inputs)), "largest_difference": error}


def _largest_difference(made: Sequence[np.ndarray]) -> float:
    ours, *others = made
    return max(float(np.abs(ours - theirs).max()) for theirs in others)


def _ratios(rates: dict[str, list[float]], say: Callable[[str], None]) -> dict[str, float]:
    """Returns ours over each other's, round by round: the median, the least and the largest."""
    found = {}
    for name in [name for name in rates if name != "splittime"]:
        ratios = [ours / theirs for ours, theirs in zip(rates["splittime"], rates[name], strict=True)]
        key = "ratio" if name == "transformers" else f"ratio_to_{name}"
        found |= {key: statistics.median(ratios), f"{key}_from": min(ratios), f"{key}_to": max(ratios)}
        say(f"ratio to {name} {found[key]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return found


def drawn(count: int, shortest: int, longest: int, vocab_size: int, with_marks: bool = False) -> list[tuple[int, ...]]:
    """with_marks: each between the marks that a made encoder's tokenizer puts around a text, and none in it."""
    source = np.random.default_rng(0)
    lengths = np.exp(source.uniform(np.log(shortest), np.log(longest), count)).round().astype(int)
    if not with_marks:
        return [tuple(source.integers(0, vocab_size, length).tolist()) for length in lengths]
    least, (begin, end) = len(SPECIAL), map(SPECIAL.index, ("[CLS]", "[SEP]"))
    return [(begin, *source.integers(least, vocab_size, max(1, length - 2)).tolist(), end) for length in lengths]


def splittime_arm(arguments: argparse.Namespace) -> tuple[Embed, tuple[Pooling, int]]:
    limits = {"max_model_len": arguments.longest, "num_threads": arguments.threads, "dtype": arguments.dtype}
    llm = LLM(arguments.model, **limits, speculative_config='{"method": "none"}', enable_prefix_caching=False)
    told = Pooling(**llm.resolved["pooling"]), llm.resolved["vocab_size"]
    return lambda given: np.array(llm.embed(given), dtype=np.float32), told


def sentence_transformers_arm(arguments: argparse.Namespace) -> tuple[Embed, None]:
    from sentence_transformers import SentenceTransformer

    kind = {"dtype": getattr(torch, arguments.dtype)}
    model = SentenceTransformer(arguments.model, device="cpu", model_kwargs=kind, local_files_only=True)
    torch.set_num_threads(arguments.threads)
    how = {"batch_size": arguments.batch, "show_progress_bar": False}
    return lambda texts: np.asarray(model.encode(texts, **how)), None


def transformers_arm(arguments: argparse.Namespace, pooling: Pooling) -> tuple[Embed, None]:
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

    return embed, None


def _batch(model: Any, inputs: Inputs, pooling: Pooling) -> np.ndarray:
    """Padded behind; what is computed there is not looked at."""
    lengths = torch.tensor([len(ids) for ids in inputs])
    tokens = torch.zeros(len(inputs), int(lengths.max()), dtype=torch.int64)
    for line, ids in zip(tokens, inputs, strict=True):
        line[: len(ids)] = torch.tensor(ids)
    is_there = torch.arange(tokens.shape[1]) < lengths[:, None]
    more = {} if pooling.is_all else {"use_cache": False}
    states = model(input_ids=tokens, attention_mask=is_there.long(), **more).last_hidden_state.float()
    if pooling.kind == "mean":
        vectors = (states * is_there[..., None]).sum(1) / lengths[:, None]
    else:
        vectors = states[:, 0] if pooling.kind == "cls" else states[torch.arange(len(inputs)), lengths - 1]
    if pooling.is_normalised:
        vectors = torch.nn.functional.normalize(vectors, eps=LEAST_LENGTH)
    return vectors.numpy()


if __name__ == "__main__":
    main()
