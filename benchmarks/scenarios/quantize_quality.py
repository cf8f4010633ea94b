"""Do AWQ, GPTQ and the others beat rounding to nearest at the same bits? Perplexity on text they have not seen.

    python -m benchmarks.scenarios.quantize_quality --model code --group-size 64 [--json]
    python -m benchmarks.scenarios.quantize_quality --model ../shared/data/models/babyllama105 --group-size 32

Each scheme makes a checkpoint, whose tensors are read back and turned into float32 weights here; the model's own layers
then score the held-out documents, one window of each. The difference to rounding to nearest is per document, so that
its interval (95 %, bootstrap over documents, both arms drawn together) does not contain how hard a document is.

Text. The packaged model: the Python standard library, calibrated on files it was trained on, scored on the held-out
ones. Other models: stories that the model itself wrote, one seed for calibration and one for scoring (what a model
writes is the text of which it knows the distribution), and `--text FILE` beside them: other text, one document for each
`--document-marker` line or each window.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from benchmarks.report import RESULTS, file_result
from splittime import LLM, SamplingParams
from splittime.assemble.model_source import locate
from splittime.lab.quantize import layer_map, treat
from splittime.lab.quantize.calibration import Calibration
from splittime.lab.quantize.forward import Sequences, begin_states
from splittime.lab.quantize.job import quantize
from splittime.lab.quantize.rounding import LAYOUTS, SUFFIXES, unpack
from splittime.lab.quantize.settings import QuantizeSettings
from splittime.text.tokenizer import Tokenizer

NAME = "quantize_quality"
SYMMETRIC, WITH_ZEROS = "4 bits rtn, symmetric", "4 bits rtn, with zero points"
REPLICATES = 10_000
Windows = torch.Tensor  # int64 [documents, length]


def arms(group: int) -> dict[str, tuple[QuantizeSettings, tuple[str, ...]]]:
    """Name -> how it is made, and the arms it must beat."""
    return {
        "int8 rtn": (QuantizeSettings(scheme="int8"), ()),
        "w8a8 smooth 0.5": (QuantizeSettings(scheme="w8a8"), ()),
        SYMMETRIC: (QuantizeSettings(scheme="w4a16", group_size=group), ()),
        "gptq": (QuantizeSettings(scheme="gptq", group_size=group), (SYMMETRIC,)),
        "gptq act-order": (QuantizeSettings(scheme="gptq", group_size=group, act_order=True), (SYMMETRIC,)),
        WITH_ZEROS: (QuantizeSettings(scheme="awq", group_size=group), ()),
        "awq": (QuantizeSettings(scheme="awq", group_size=group), (WITH_ZEROS, SYMMETRIC)),
        "2:4 magnitude": (QuantizeSettings(prune="2:4"), ()),
        "2:4 wanda": (QuantizeSettings(prune="2:4", metric="wanda"), ("2:4 magnitude",)),
        "50 % magnitude": (QuantizeSettings(prune="unstructured", sparsity=0.5), ()),
        "50 % wanda": (QuantizeSettings(prune="unstructured", sparsity=0.5, metric="wanda"), ("50 % magnitude",)),
    }


class Scorer:
    """Nats of each document of some windows under weights that are given layer by layer."""

    def __init__(self, base: layer_map.QuantizeSource, windows: Windows) -> None:
        self.base, self.windows = base, windows
        self.sequences = Sequences(base.config, windows.shape[1] - 1)

    @torch.inference_mode()
    def nats(self, weights: list[dict[str, torch.Tensor]]) -> np.ndarray:
        """float64 [documents], the mean over each one's tokens."""
        embedding, norm, *head = (entry.read().float() for entry in self.base.outer_entries())
        factor = self.base.config.embedding_factor
        states = begin_states(self.windows[:, :-1], embedding, factor, Path("unused"), 1 << 62)
        for index, layer in enumerate(weights):
            self.sequences.run(index, layer, states, states)
        packed = self.sequences.ops.pack_norm(norm, self.base.config.norm.eps)
        table = head[0] if head else embedding
        found = []
        for state, ids in zip(states, self.windows, strict=True):
            logits = self.sequences.ops.rms_norm(state, packed) @ table.t()
            found.append(float(F.cross_entropy(logits, ids[1:])))
        return np.array(found)


def checkpoint_weights(
    folder: Path, base: layer_map.QuantizeSource, settings: QuantizeSettings
) -> list[dict[str, torch.Tensor]]:
    """What the tensors of a checkpoint stand for, float32, by layer and name."""
    stored = load_file(folder / "model.safetensors")
    settings = settings.resolved()
    layers = []
    for index in range(base.config.num_layers):
        prefix = layer_map.layer_prefix(index)
        layer = {name[len(prefix) :]: tensor.float() for name, tensor in stored.items() if name.startswith(prefix)}
        if settings.scheme is not None:
            grid = treat.grid_of(settings, getattr(torch, base.config.checkpoint_dtype))
            layout = LAYOUTS[settings.scheme]
            for name in layer_map.linear_shapes(base.config, index):
                parts = {suffix: stored[f"{prefix}{name}.{suffix}"] for suffix in SUFFIXES[layout]}
                layer[f"{name}.weight"] = unpack(layout, parts, grid).values()
        layers.append(layer)
    return layers


def python_files(tokenizer: Tokenizer, length: int, documents: int) -> tuple[Windows, Windows]:
    """Windows of files that were trained on (not in the order of names), and the first window of held-out ones."""
    from training.corpus import load_corpus

    corpus = load_corpus()
    train = [corpus.train[place].text for place in np.random.default_rng(0).permutation(len(corpus.train))]
    return _first_windows(train, tokenizer, length, 64), _first_windows(
        [document.text for document in corpus.heldout], tokenizer, length + 1, documents
    )


def _first_windows(texts: list[str], tokenizer: Tokenizer, length: int, most: int) -> Windows:
    encoded = (tokenizer.encode(text[: 16 * length]) for text in texts)
    return torch.tensor([ids[:length] for ids in encoded if len(ids) >= length][:most])


def own_stories(folder: Path, length: int, documents: int) -> tuple[Windows, Windows]:
    llm = LLM(folder, max_num_seqs=32, kernels="torch")
    bos = json.loads((folder / "config.json").read_text())["bos_token_id"]
    sides = []
    for first, count, tokens in ((0, 64, length), (10_000, documents, length + 1)):
        wanted = [SamplingParams(max_tokens=tokens - 1, seed=first + n, ignore_eos=True) for n in range(count)]
        outputs = llm.generate([[bos]] * count, wanted)
        sides.append(torch.tensor([[bos, *output.token_ids] for output in outputs]))
    return sides[0], sides[1]


def other_text(path: Path, tokenizer: Tokenizer, length: int, documents: int) -> Windows:
    import gzip

    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    ids = tokenizer.encode(raw.decode()[: 8 * length * documents])
    count = min(documents, len(ids) // (length + 1))
    return torch.tensor(ids[: count * (length + 1)]).view(count, length + 1)


def interval(differences: np.ndarray) -> tuple[float, float]:
    draws = np.random.default_rng(0).integers(0, len(differences), (REPLICATES, len(differences)))
    low, high = np.percentile(differences[draws].mean(1), [2.5, 97.5])
    return float(low), float(high)


def measure(
    model: str, group: int, scorers: dict[str, Scorer], calibration: Calibration, chosen: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """chosen: the arms to make, in the order of `arms`; none for all."""
    folder = locate(None if model == "code" else model)
    base = next(iter(scorers.values())).base
    original = [base.layer(index) for index in range(base.config.num_layers)]
    nats = {name: {"float": scorer.nats(original)} for name, scorer in scorers.items()}
    for arm, (settings, rivals) in arms(group).items():
        if chosen and arm not in chosen:
            continue
        with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
            if arm == WITH_ZEROS:  # AWQ with nothing searched for
                stack.enter_context(patch("splittime.lab.quantize.treat.STEPS", 0))
                stack.enter_context(patch("splittime.lab.quantize.treat.CLIP_STEPS", 0))
            begin = time.monotonic()
            quantize(folder, Path(place) / "out", settings, calibration)
            taken_s = time.monotonic() - begin
            weights = checkpoint_weights(Path(place) / "out", base, settings)
        for text, scorer in scorers.items():
            found = nats[text][arm] = scorer.nats(weights)
            yield _row(model, group, text, arm, rivals, nats[text], found, taken_s)


def _row(
    model: str, group: int, text: str, arm: str, rivals: tuple[str, ...], nats: dict, found: np.ndarray, taken_s: float
) -> dict[str, Any]:
    return {
        "model": Path(model).name,
        "group_size": group,
        "text": text,
        "documents": len(found),
        "arm": arm,
        "perplexity": float(np.exp(found.mean())),
        "float_perplexity": float(np.exp(nats["float"].mean())),
        "worse_than_float_nats": float((found - nats["float"]).mean()),
        "worse_than_float_interval": interval(found - nats["float"]),
        "seconds": round(taken_s, 1),
        "beside": [_beside(rival, found - nats[rival]) for rival in rivals],
    }


def _beside(rival: str, differences: np.ndarray) -> dict[str, Any]:
    low, high = interval(differences)
    verdict = "better" if high < 0 else "worse" if low > 0 else "inconclusive"
    return {"rival": rival, "less_nats": float(differences.mean()), "interval": (low, high), "verdict": verdict}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="code", help="code: the packaged one; else a folder")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--documents", type=int, default=80)
    parser.add_argument("--length", type=int, default=255)
    parser.add_argument("--text", type=Path, help="score this text too")
    parser.add_argument("--arm", action="append", help="only these; rivals must be among them")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)  # others work on this machine; as `quantize` does for small layers
    folder = locate(None if options.model == "code" else options.model)
    base, tokenizer = layer_map.QuantizeSource(folder), Tokenizer.load(folder)
    if options.model == "code":
        text, name = python_files(tokenizer, options.length, options.documents), "held-out Python files"
    else:
        text, name = own_stories(folder, options.length, options.documents), "own stories"
    torch.set_num_threads(1)
    windows = {name: text[1]}
    if options.text is not None:
        windows[options.text.name] = other_text(options.text, tokenizer, options.length, options.documents)
    scorers = {name: Scorer(base, found) for name, found in windows.items()}
    rows = []
    for row in measure(options.model, options.group_size, scorers, Calibration(text[0]), options.arm):
        rows.append(row)
        print(_told(row), flush=True)
        _file(rows, vars(options))


def _told(row: dict[str, Any]) -> str:
    line = f"{row['text']:24} {row['arm']:30} {row['perplexity']:9.4f} (float {row['float_perplexity']:.4f})"
    for found in row["beside"]:
        low, high = found["interval"]
        line += f" {found['less_nats']:+.4f} [{low:+.4f}, {high:+.4f}] {found['verdict']} beside {found['rival']}"
    return line


def _file(rows: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Beside the rows of other models and groups that were filed before."""
    path = RESULTS / f"{NAME}.json"
    kept = json.loads(path.read_text())["figures"]["rows"] if path.exists() else []
    mine = {(row["model"], row["group_size"]) for row in rows}
    kept = [row for row in kept if (row["model"], row["group_size"]) not in mine]
    file_result(NAME, {"rows": kept + rows}, options, options["json"])


if __name__ == "__main__":
    main()
