"""Measure the packaged models on the held-out files and write `training/results.json` and the model cards.

Owns every published figure of the models; the cards are made from the JSON, so the two cannot disagree.

*Bits per byte* is the whole cost of the held-out files: each file is scored from its first byte, with the end-of-text
token before it as the only context and the end-of-text token after it as part of the cost, summed over the files and
divided by their UTF-8 bytes. Files longer than the context are scored in windows that overlap by half, so that all but
a file's first tokens are scored with at least half a context before them.

`gzip -9` and `xz -9e` get the same bytes twice: *per file* (the sum of the sizes of the files compressed one by one,
which is what the model does too) and as one *concatenation* (which lets a compressor learn from one file for the next,
as the model may not).
"""

import argparse
import gzip
import json
import lzma
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import track
from tokenizers import Tokenizer
from torch import Tensor

from splittime.lab.distill.llama import Llama, parameter_count
from training.card import write_cards
from training.corpus import Document, load_corpus
from training.export import PACKAGED, REPOSITORY, load_folder, replace_text
from training.tokenizer import END_OF_TEXT_ID, as_json, load_tokenizer

RESULTS = REPOSITORY / "training" / "results.json"
PROMPT = "def read_json(path):\n"
SAMPLE_TOKENS = 96
POSITION_EDGES = (0, 64, 128, 256, 512, 1024, 2048)
POSITION_WINDOWS = 48


def overlapping_windows(length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first scored, end) of the windows that score targets 1..length-1 once, overlapping by half."""
    scored, stride = 1, context // 2
    while scored < length:
        begin = max(0, scored - 1 - stride) if scored > 1 else 0
        end = min(begin + context, length - 1)
        yield begin, scored, end
        scored = end + 1


@torch.no_grad()
def file_nats(model: Llama, tokenizer: Tokenizer, document: Document) -> tuple[float, int]:
    """Cost in nats of one file and its end, and the number of tokens scored."""
    ids = torch.tensor([END_OF_TEXT_ID, *tokenizer.encode(document.text).ids, END_OF_TEXT_ID])
    total = 0.0
    for begin, scored, end in overlapping_windows(len(ids), model.shape.max_position_embeddings):
        losses = model.loss(ids[None, begin:end], ids[None, begin + 1 : end + 1], reduction="none")
        total += float(losses[scored - 1 - begin :].double().sum())
    return total, len(ids) - 1


def bits_per_byte(model: Llama, tokenizer: Tokenizer, documents: list[Document], title: str) -> dict[str, float]:
    """Bits per byte over all documents, weighted by bytes, and the figures it is made of."""
    size = sum(len(document.text.encode()) for document in documents)
    longest_first = sorted(documents, key=lambda document: -len(document.text))
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as workers:
        running = workers.map(lambda document: file_nats(model, tokenizer, document), longest_first)
        costs = list(track(running, description=title, total=len(documents)))
    nats, tokens = sum(cost for cost, _ in costs), sum(count for _, count in costs)
    return {
        "bits_per_byte": round(nats / math.log(2) / size, 4),
        "nats_per_token": round(nats / tokens, 4),
        "tokens": tokens,
        "bytes_per_token": round(size / tokens, 3),
    }


@torch.no_grad()
def loss_by_position(model: Llama, tokenizer: Tokenizer, documents: list[Document]) -> dict[str, float]:
    """Mean nats per token by position in the window, over full windows spread evenly over the held-out stream."""
    stream = np.concatenate([[*tokenizer.encode(d.text).ids, END_OF_TEXT_ID] for d in documents])
    context = model.shape.max_position_embeddings
    sums = torch.zeros(context, dtype=torch.float64)
    for start in np.linspace(0, len(stream) - context - 1, POSITION_WINDOWS).astype(int):
        window = torch.from_numpy(stream[None, start : start + context + 1])
        sums += model.loss(window[:, :-1], window[:, 1:], reduction="none").double()
    mean = sums / POSITION_WINDOWS
    pairs = pairwise(POSITION_EDGES)
    return {f"{low}-{high - 1}": round(float(mean[low:high].mean()), 4) for low, high in pairs}


def compressors(documents: list[Document]) -> dict[str, dict[str, float]]:
    """Bits per byte of gzip and xz at their best settings, per file and on the concatenation."""
    contents = [document.text.encode() for document in documents]
    whole = b"".join(contents)
    packers = {
        "gzip -9": lambda data: gzip.compress(data, 9, mtime=0),
        "xz -9e": lambda data: lzma.compress(data, preset=9 | lzma.PRESET_EXTREME),
    }
    return {
        name: {
            "per_file": round(8 * sum(len(pack(content)) for content in contents) / len(whole), 4),
            "concatenated": round(8 * len(pack(whole)) / len(whole), 4),
        }
        for name, pack in packers.items()
    }


def choose(logits: Tensor, temperature: float, top_p: float = 0.95) -> int:
    """The next token: the likeliest at temperature 0, else drawn from the likeliest that hold `top_p` of the mass."""
    if temperature == 0:
        return int(logits.argmax())
    chances, order = F.softmax(logits / temperature, dim=-1).sort(descending=True)
    kept = chances * (chances.cumsum(0) - chances < top_p)
    return int(order[torch.multinomial(kept, 1)])


@torch.no_grad()
def complete(
    model: Llama, tokenizer: Tokenizer, prompt: str, temperature: float = 0.0, tokens: int = SAMPLE_TOKENS
) -> str:
    """The prompt and its continuation. Nothing is cached between tokens: the samples are short and the code is too."""
    torch.manual_seed(0)
    ids = tokenizer.encode(prompt).ids
    for _ in range(tokens):
        token = choose(model(torch.tensor([ids]))[0, -1], temperature)
        if token == END_OF_TEXT_ID:
            break
        ids.append(token)
    return tokenizer.decode(ids)


def run_summary(folder: Path) -> dict[str, object]:
    """Tokens, time, settings and the best validation loss of one run, from its log."""
    last = json.loads((folder / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return {
        "tokens": last["tokens"],
        "steps": last["step"],
        "wall_minutes": round(last["seconds"] / 60, 1),
        "best_validation_nats_per_token": last["best_loss"],
        "settings": json.loads((folder / "options.json").read_text(encoding="utf-8")),
    }


def training_summary(work: Path, name: str) -> list[dict[str, object]]:
    """The run that made a model and those that continued it at the longest context, in `work/long*`, in order."""
    folders = [work / name, *(folder / name for folder in sorted(work.glob("long*")))]
    return [run_summary(folder) for folder in folders if (folder / "log.jsonl").exists()]


def measure(name: str, work: Path, documents: list[Document]) -> dict[str, object]:
    """Everything that is published about one packaged model."""
    folder = PACKAGED / name
    model, tokenizer = load_folder(folder), load_tokenizer(folder)
    return {
        "parameters": parameter_count(model),
        "folder_bytes": sum(path.stat().st_size for path in folder.iterdir() if path.name != "MODEL_CARD.md"),
        "shape": {field: getattr(model.shape, field) for field in model.shape.__dataclass_fields__},
        "training": training_summary(work, name),
        "heldout": bits_per_byte(model, tokenizer, documents, name),
        "nats_per_token_by_position": loss_by_position(model, tokenizer, documents),
        "samples": {
            "greedy": complete(model, tokenizer, PROMPT),
            "sampled, temperature 0.8, top-p 0.95": complete(model, tokenizer, PROMPT, 0.8),
        },
    }


@torch.no_grad()
def transformers_difference(name: str) -> float:
    """Largest difference between our logits and transformers', both in float32, on a piece of code."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = PACKAGED / name
    prompt = PROMPT + "    with open(path) as f:\n        return json.load(f)\n"
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]])
    assert ids[0].tolist() == load_tokenizer(folder).encode(prompt).ids
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits
    return float((load_folder(folder)(ids) - theirs).abs().max())


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.evaluate",
        description="Measure the packaged models on the held-out files; writes training/results.json and the cards.",
    )
    parser.add_argument(
        "--work", type=Path, default=REPOSITORY / "out" / "training", help="where train.py left its log"
    )
    parser.add_argument("--check-transformers", action="store_true", help="only compare our logits with transformers'")
    parser.add_argument("--sample", metavar="PROMPT", help="only complete this prompt with each packaged model")
    return parser.parse_args()


def main() -> None:
    """Entry point."""
    options = parse()
    names = sorted(path.parent.name for path in PACKAGED.glob("*/config.json"))
    if options.check_transformers:
        print({name: transformers_difference(name) for name in names})
    elif options.sample:
        for name in names:
            folder = PACKAGED / name
            print(f"--- {name}\n{complete(load_folder(folder), load_tokenizer(folder), options.sample)}")
    else:
        began, corpus = time.monotonic(), load_corpus()
        results = {
            "corpus": corpus.summary() | {"skipped": corpus.skipped},
            "compressors_bits_per_byte": compressors(corpus.heldout),
            "models": {name: measure(name, options.work, corpus.heldout) for name in names},
        }
        replace_text(RESULTS, as_json(results))
        write_cards(results)
        print(f"measured in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
