"""What a step of the model costs: decode at batch 1, 8 and 32, prefill, and the linear layers by themselves.

    python -m benchmarks.micro.model_step                  the packaged model, and a random Llama-3.2-1B shape
    python -m benchmarks.micro.model_step --layers 2       the 1B shape cut to 2 layers (less memory, sooner done)
    python -m benchmarks.micro.model_step --model FOLDER   another model instead of the packaged one
    python -m benchmarks.micro.model_step --json           the same as one JSON line

Beside the steps stand the machine's own limits, measured in the same run: the rate at which it reads memory and that
of a large matrix product. Contenders (`F.linear`, the layout that the runner packs) are interleaved. A figure is the
median; `p25` is the lower quartile, which other load on the machine disturbs less.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from benchmarks.report import conditions, file_result
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.kernels.cpu import ops
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner

PACKAGED = Path(__file__).resolve().parents[2] / "src" / "splittime" / "packaged" / "code"
BATCHES = (1, 8, 32)
CONTEXT_TOKENS = 128
PREFILL_TOKENS = 512
LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
}


def write_random_llama(folder: Path, config: dict[str, Any]) -> None:
    """A checkpoint of normal weights (std 0.02), in bfloat16, one file a layer."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    layer = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    files = {"top": {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}}
    for number in range(config["num_hidden_layers"]):
        names = {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
        files[f"layer-{number}"] = names
    index = {}
    for name, shapes in files.items():
        save_file(
            {key: torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02) for key, shape in shapes.items()},
            folder / f"{name}.safetensors",
        )
        index |= dict.fromkeys(shapes, f"{name}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))


def spread(samples_s: list[float]) -> dict[str, float]:
    """Milliseconds."""
    quarter = sorted(samples_s)[len(samples_s) // 4]
    return {"median_ms": statistics.median(samples_s) * 1e3, "p25_ms": quarter * 1e3, "repeats": len(samples_s)}


def timed(call: Callable[[], Any]) -> float:
    begin_ns = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin_ns) / 1e9


def machine_limits() -> dict[str, float]:
    """Best of a few passes: reading 1 GiB, and a 1024^3 product in float32."""
    block = torch.ones(1 << 28)
    read_s = min(timed(lambda: block.sum()) for _ in range(5))
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    product_s = min(timed(lambda: a @ b) for _ in range(8))
    return {"read_gb_per_s": block.nbytes / read_s / 1e9, "float32_gflop_per_s": 2 * 1024**3 / product_s / 1e9}


class Steps:
    """Drives a runner: `prefill` admits requests, `decode` runs one step over all of them."""

    def __init__(self, runner: TorchRunner, num_requests: int, context_tokens: int, num_steps: int) -> None:
        self.runner = runner
        self.names = [f"request-{number}" for number in range(num_requests)]
        block_size, vocab = runner.resolved.block_size, runner.resolved.vocab_size
        self.blocks = -(-(context_tokens + num_steps + 1) // block_size)
        self.prompt = tuple((7 * position + 3) % vocab for position in range(context_tokens))
        self.position = context_tokens
        self.tokens: list[int] = []

    def prefill(self) -> None:
        sampling = SamplingParams(temperature=0.0, seed=0)
        admitted = tuple(Admitted(name, self.prompt, 0, sampling, ()) for name in self.names)
        tables = [tuple(range(n * self.blocks, (n + 1) * self.blocks)) for n in range(len(self.names))]
        rows = tuple(Row(name, 0, self.prompt, table, 1) for name, table in zip(self.names, tables, strict=True))
        self._run(StepPlan(0, rows, admitted))

    def decode(self) -> None:
        pairs = zip(self.names, self.tokens, strict=True)
        self._run(StepPlan(0, tuple(Row(name, self.position, (token,), (), 1) for name, token in pairs)))
        self.position += 1

    def release(self) -> None:
        self.runner.run(StepPlan(0, (), released=tuple(self.names)))

    def _run(self, plan: StepPlan) -> None:
        self.tokens = [row.token_ids[0] for row in self.runner.run(plan).rows]


def measure_model(folder: Path, num_steps: int, num_threads: int | None, dtype: str) -> dict[str, Any]:
    memory_bytes = 1 << 30
    config = RunnerConfig(
        model_path=str(folder), num_threads=num_threads, dtype=dtype, kv_cache_memory_bytes=memory_bytes
    )
    runner = load_torch_runner(config)
    runner.warm_up()
    resolved = runner.resolved
    figures: dict[str, Any] = {
        "dtype": resolved.dtype,
        "num_threads": resolved.num_threads,
        "weights_mb": resolved.weights_bytes / 1e6,
        "linear_backend": resolved.linear_backend,
    }
    for batch in BATCHES:
        steps = Steps(runner, batch, CONTEXT_TOKENS, num_steps)
        steps.prefill()
        samples = [timed(steps.decode) for _ in range(num_steps)]
        steps.release()
        one = spread(samples)
        one["tokens_per_s"] = batch / one["median_ms"] * 1e3
        one["weights_gb_per_s"] = resolved.weights_bytes / one["median_ms"] / 1e6
        figures[f"decode_batch_{batch}"] = one
    samples = []
    for _ in range(3):
        steps = Steps(runner, 1, PREFILL_TOKENS, 1)
        samples.append(timed(steps.prefill))
        steps.release()
    figures["prefill_tokens_per_s"] = PREFILL_TOKENS / statistics.median(samples)
    return figures


def measure_linear(outs: int, ins: int, num_threads: int, repeats: int = 15) -> dict[str, Any]:
    """`F.linear` against the packed layout; enough weights in turn that none stays in the cache."""
    torch.set_num_threads(num_threads)
    count = max(2, (64 << 20) // (outs * ins * 4))
    dense = [torch.randn(outs, ins) for _ in range(count)]
    packed = [ops.lay_out(weight, None) for weight in dense]
    figures: dict[str, Any] = {}
    for rows in BATCHES:
        x = torch.randn(rows, ins)
        plain_s, packed_s = [], []
        for _ in range(repeats):
            plain_s.append(timed(lambda x=x: [F.linear(x, weight) for weight in dense]) / count)
            packed_s.append(timed(lambda x=x: [ops.product(x, weight) for weight in packed]) / count)
        ratios = [plain / fast for plain, fast in zip(plain_s, packed_s, strict=True)]
        figures[f"rows_{rows}"] = {
            "f_linear_us": statistics.median(plain_s) * 1e6,
            "packed_us": statistics.median(packed_s) * 1e6,
            "packed_gb_per_s": outs * ins * 4 / statistics.median(packed_s) / 1e9,
            "ratio": statistics.median(ratios),
        }
    return figures


@torch.inference_mode()
def measure(model: Path, num_layers: int, num_steps: int, num_threads: int | None, dtype: str) -> dict[str, Any]:
    result: dict[str, Any] = {"conditions": conditions(), "limits": machine_limits()}
    result["packaged"] = measure_model(model, num_steps, num_threads, dtype)
    if num_layers:
        with tempfile.TemporaryDirectory() as name:
            write_random_llama(Path(name), {**LLAMA_1B, "num_hidden_layers": num_layers})
            one_b = measure_model(Path(name), max(4, num_steps // 5), num_threads, dtype)
        result[f"llama_1b_shape_{num_layers}_layers"] = one_b
    threads = num_threads or torch.get_num_threads()
    shapes = {"packaged gate_up": (1408, 256)}
    if num_layers:
        shapes |= {"1B qkv": (3072, 2048), "1B gate_up": (16384, 2048)}
    result["linear"] = {name: measure_linear(*shape, threads) for name, shape in shapes.items()}
    result["limits_after"] = machine_limits()
    return result


def show(value: Any, name: str = "", depth: int = 0) -> None:
    if isinstance(value, dict):
        print("  " * depth + name)
        for key, inner in value.items():
            show(inner, key, depth + 1)
        return
    print("  " * depth + f"{name}: {f'{value:.2f}' if isinstance(value, float) else value}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=Path, default=PACKAGED)
    parser.add_argument("--layers", type=int, default=16, help="layers of the 1B shape; 0 leaves it out")
    parser.add_argument("--steps", type=int, default=50, help="decode steps for each batch")
    parser.add_argument("--threads", type=int, help="torch threads; default: as the runner chooses")
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.layers, arguments.steps, arguments.threads, arguments.dtype)
    file_result("model_step", result, vars(arguments), arguments.json)
    if not arguments.json:
        show(result, "model_step")


if __name__ == "__main__":
    main()
