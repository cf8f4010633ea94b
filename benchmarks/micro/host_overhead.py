"""What a decode step costs beyond the forward pass: planning, preparing, choosing tokens, committing, the gap after it.

    python -m benchmarks.micro.host_overhead                     the packaged model
    python -m benchmarks.micro.host_overhead --model FOLDER --quantization int8
    python -m benchmarks.micro.host_overhead --json

The engine's own step records are read: the overhead of a step is its length and the host gap before it, less
`device_ns` (forward pass and logits). Greedy requests, and such as draw with temperature and top_p. Medians over the
steps in which every request decodes.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import file_result
from benchmarks.scenarios.engine_driver import build_crank
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.drive.crank import Crank, InlineDriver
from splittime.ledger.steps import StepRecord, verify_steps
from splittime.scheduler.config import SchedulerConfig

PACKAGED = Path(__file__).resolve().parents[2] / "src" / "splittime" / "packaged" / "code"
BATCHES = (1, 8, 32)
PROMPT_TOKENS, NEW_TOKENS = 16, 40
SAMPLING = {"greedy": {"temperature": 0.0}, "top_p": {"temperature": 0.8, "top_p": 0.95}}


def submit(crank: Crank, batch: int, kind: str) -> None:
    now_ns = time.monotonic_ns()
    for number in range(batch):
        prompt = tuple((13 * number + 7 * place) % 500 + 1 for place in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, seed=number, **SAMPLING[kind])
        request = Request(
            request_id=f"{kind}-{batch}-{number}-{now_ns}",
            prompt_token_ids=prompt,
            sampling=sampling,
            submitted_ns=now_ns,
        )
        crank.submit(request, now_ns)


def decode_steps(crank: Crank, batch: int, kind: str) -> list[StepRecord]:
    submit(crank, batch, kind)
    records = [output.record for output in InlineDriver(crank).outputs() if output.record is not None]
    verify_steps(records)
    return [record for record in records if record.decode_tokens == batch and not record.prefill_tokens][2:]


def summary(records: list[StepRecord]) -> dict[str, float]:
    """Milliseconds."""
    shares, parts = [], {"plan": "plan_ns", "prepare": "launch_ns", "choose": "sample_ns", "commit": "commit_ns"}
    for record in records:
        whole = record.end_ns - record.begin_ns + record.host_gap_ns
        shares.append((whole - record.device_ns) / whole)
    found = {
        name: statistics.median(getattr(record, field) for record in records) / 1e6 for name, field in parts.items()
    }
    found["gap"] = statistics.median(record.host_gap_ns for record in records) / 1e6
    found["forward"] = statistics.median(record.device_ns for record in records) / 1e6
    return {**found, "host_share": statistics.median(shares), "steps": len(records)}


def measure(crank: Crank, batches: Sequence[int] = BATCHES) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for kind in SAMPLING:
        for batch in batches:
            decode_steps(crank, batch, kind)  # the first time warms the shapes
            found[f"{kind}, batch {batch}"] = summary(decode_steps(crank, batch, kind))
    return found


def show(figures: dict[str, dict[str, float]]) -> None:
    names = ("plan", "prepare", "forward", "choose", "commit", "gap")
    table = Table("decode", *(f"{name}, ms" for name in names), "beyond the forward pass")
    for name, one in figures.items():
        table.add_row(name, *(f"{one[part]:.3f}" for part in names), f"{one['host_share']:.1%}")
    Console(stderr=True).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=PACKAGED)
    parser.add_argument("--quantization", choices=("int8", "int4"))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--threads", type=int, help="of the model; default: as the runner chooses")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    scheduler = SchedulerConfig(max_num_seqs=64, enable_prefix_caching=False)
    settings: dict[str, Any] = {"quantization": arguments.quantization, "kv_cache_memory_bytes": 1 << 30}
    crank = build_crank(str(arguments.model), scheduler, max_model_len=2048, num_threads=arguments.threads, **settings)
    figures = measure(crank, arguments.batches)
    name = f"host_overhead_{arguments.model.resolve().name}_{arguments.quantization or 'unquantised'}"
    file_result(name, figures, vars(arguments), arguments.json)
    if not arguments.json:
        show(figures)


if __name__ == "__main__":
    main()
