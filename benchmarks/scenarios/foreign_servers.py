"""What other people's servers tell of themselves on /metrics, beside what the client measured from outside.

    python -m benchmarks.scenarios.foreign_servers --folder FOLDER [--only NAME] [--record FOLDER] [--json]

FOLDER is laid out as `benchmarks/peers/setup_peers.sh` makes it. llama.cpp's `llama-server` runs on the smallest GGUF
there, vLLM (its wheel for CPUs, float32) on the packaged model; four slots each, prefix caches as they come. Each gets
50 requests, arriving faster than four slots serve them. What is absent is skipped, and said to be. `--record` keeps
each server's /metrics as it was before, during and after: that is where the tests' fixtures are from.
"""

import argparse
import asyncio
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks.peers.servers import ServerEntry, serving
from benchmarks.report import file_result
from splittime.ledger.client_book import Ending, Run
from splittime.loadgen.dialects.view import ServerView, render_server_view, server_view
from splittime.loadgen.draw import LoadSpec, draw
from splittime.loadgen.event_loop import run_loop
from splittime.loadgen.run import run_schedule
from splittime.loadgen.target import RunOptions, Target

PACKAGED = Path(__file__).parents[2] / "src" / "splittime" / "packaged" / "code"
THREADS, SLOTS, CONTEXT_TOKENS, VOCAB_SIZE = 2, 4, 512, 4096
DURING_S = 1.5


def entries(folder: Path) -> list[ServerEntry]:
    return [_llama(folder), _vllm(folder)]


def _llama(folder: Path) -> ServerEntry:
    program = folder / "build" / "llama" / "bin" / "llama-server"
    files = sorted((folder / "gguf").glob("*.gguf"), key=lambda file: file.stat().st_size)
    file = files[0] if files else folder / "gguf" / "any.gguf"
    slots = ["-np", str(SLOTS), "-c", str(SLOTS * CONTEXT_TOKENS), "-t", str(THREADS), "-tb", str(THREADS)]
    command = [str(program), "-m", str(file), "--alias", file.stem, "--metrics", *slots, "--host", "127.0.0.1"]
    entry = ServerEntry("llama.cpp", command, [program, file], {})
    entry.command += ["--port", str(entry.port)]
    return entry


def _vllm(folder: Path) -> ServerEntry:
    python = folder / "venv" / "vllm" / "bin" / "python"
    limits = ["--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(SLOTS), "--dtype", "float32"]
    model = ["--model", str(PACKAGED), "--served-model-name", "splittime-code", "--enforce-eager"]
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", *model, *limits, "--host", "127.0.0.1"]
    entry = ServerEntry("vllm", command, [python], {})
    entry.command += ["--port", str(entry.port)]
    return entry


def measure(entry: ServerEntry, requests: int, rate: float, record: Path | None) -> Run:
    """One run; the server is warm from a few requests before it."""
    _carry_out(entry.url, LoadSpec(concurrency=SLOTS, num_requests=2 * SLOTS, seed=1, **_LENGTHS))
    spec = LoadSpec(rate=rate, num_requests=requests, seed=2, **_LENGTHS)
    if record is None:
        return _carry_out(entry.url, spec)
    return run_loop(_recorded(entry, spec, record))


_LENGTHS = {"input_tokens": "uniform:16:200", "output_tokens": "uniform:16:64"}


def _carry_out(url: str, spec: LoadSpec) -> Run:
    return run_loop(run_schedule(_schedule(spec), [Target(url=url)], RunOptions(workers=1, sample_interval_s=0.25)))


def _schedule(spec: LoadSpec) -> Any:
    return draw(spec, vocab_size=VOCAB_SIZE, max_model_len=CONTEXT_TOKENS, salt="foreign_servers")


async def _recorded(entry: ServerEntry, spec: LoadSpec, record: Path) -> Run:
    keep = record / entry.name.replace(".", "_")
    await asyncio.to_thread(_keep, entry, Path(f"{keep}_before.txt"))
    options = RunOptions(workers=1, sample_interval_s=0.25)
    running = asyncio.create_task(run_schedule(_schedule(spec), [Target(url=entry.url)], options))
    await asyncio.sleep(DURING_S)
    await asyncio.to_thread(_keep, entry, Path(f"{keep}_during.txt"))
    run = await running
    await asyncio.to_thread(_keep, entry, Path(f"{keep}_after.txt"))
    return run


def _keep(entry: ServerEntry, path: Path) -> None:
    with urllib.request.urlopen(entry.url + "/metrics", timeout=30) as response:
        path.write_bytes(response.read())


def figures_of(run: Run, view: ServerView) -> dict[str, Any]:
    endings = [outcome.ending for outcome in run.outcomes]
    return {
        "model": run.arms[0].model,
        "max_model_len": run.arms[0].max_model_len,
        "endings": {ending.value: endings.count(ending) for ending in Ending if ending in endings},
        "void": run.is_void,
        **msgspec.to_builtins(view),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", help="one server's name")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--record", type=Path, help="keep the servers' /metrics in this folder")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    console, figures = Console(width=120, stderr=arguments.json), {}
    for entry in entries(arguments.folder.resolve()):
        missing = [needed.name for needed in entry.needs if not needed.exists()]
        if missing or (arguments.only and arguments.only != entry.name):
            print(f"{entry.name}: skipped, {', '.join(missing) or 'not asked for'}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder, serving(entry, THREADS, Path(folder) / "log") as start_s:
            run = measure(entry, arguments.requests, arguments.rate, arguments.record)
        figures[entry.name] = {"start_s": start_s, **figures_of(run, server_view(run))}
        console.print(render_server_view(run))
    if not figures:
        sys.exit("no server of those is there")
    path = file_result("foreign_servers", figures, vars(arguments), arguments.json)
    print(f"written to {path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
