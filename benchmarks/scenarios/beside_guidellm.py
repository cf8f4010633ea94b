"""`guidellm` and `splittime bench` on the same server under the same load: do they tell the same?

    python -m benchmarks.scenarios.beside_guidellm --guidellm PROGRAM [--rounds 3] [--folder FOLDER] [--json]

Each round starts `splittime serve` (the packaged model), warms it, and sends the load from one tool and then from the
other, the order alternating: constant arrivals, prompts and answers of one length, on /v1/completions, streamed; token
ids from splittime, text of as many tokens from guidellm, which cannot send ids. The server's own account of each
request is the referee. The same functions make every figure of either (`beside_guidellm_told`), so that what differs is
the tools' clocks and not their words. What each publishes is filed beside:

    guidellm's TTFT     first token - headers begin to be written     our service TTFT, but for the write
    guidellm's ITL      (last token - first) / (n - 1)                our TPOT, but that ours ends with the stream
    guidellm's TPOT     (last token - start) / n                      TTFT is in it: not our TPOT
    guidellm's tokens/s over begin to end, ramp and tail included; each request's tokens evenly spaced
    our tokens/s        over the measured window, each chunk when it came

Server and tools get half of the cores each, unless --shared-cores: a tool that computes may slow what it measures.
`outside` is what a tool measured less what the server did, request by request: the network and the tool itself.
--folder keeps every round's files, and rounds found there are evaluated too: a long measurement in pieces.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import file_result
from benchmarks.scenarios.beside_guidellm_told import (
    FIGURES,
    Told,
    differences,
    figures_of,
    medians,
    read_guidellm,
    read_splittime,
)
from benchmarks.server_process import get_json, served

PACKAGED = Path(__file__).parents[2] / "src" / "splittime" / "packaged" / "code"
TOOLS = ("guidellm", "splittime")
TIMEOUT_S, WARM_UP_S = 120, 2
VOID = 3  # a client at fault: filed as such


def run_guidellm(program: Path, url: str, asked: argparse.Namespace, path: Path) -> None:
    """Its report goes to `path`, the server's accounts beside it."""
    spec = {
        "backend": {"kind": "openai_http", "target": url, "request_format": "/v1/completions", "extras": _PLAIN},
        "profile": {"kind": "constant", "rate": [asked.rate]},
        "constraints": [{"kind": "max_requests", "count": round(asked.rate * asked.seconds)}],
        "tokenizer": {"kind": "huggingface_auto", "model": str(PACKAGED)},
        "data": [_synthetic(asked)],
        "outputs": [{"kind": "json", "path": str(path)}],
        "seed": {"kind": "static", "value": int.from_bytes(os.urandom(3))},  # no round finds another's prompts cached
    }
    config = path.with_suffix(".config.json")
    config.write_text(json.dumps({"spec": spec}))
    command = [str(program), "run", "--config", str(config), "--disable-console"]
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    _carry_out(command, environment | {"GUIDELLM__MAX_WORKER_PROCESSES": str(asked.processes)})
    accounts = get_json(f"{url}/ledger/requests?limit=10000")
    path.with_suffix(".accounts.json").write_text(json.dumps(accounts))


# It asks for usage in every chunk, a field of vLLM's that `splittime serve` refuses; None takes it out of the body.
_PLAIN = {"body": {"stream_options": {"continuous_usage_stats": None}}}


def _synthetic(asked: argparse.Namespace) -> dict[str, Any]:
    return {"kind": "synthetic_text", "prompt_tokens": asked.input_tokens, "output_tokens": asked.output_tokens}


def run_splittime(url: str, asked: argparse.Namespace, seconds: int, path: Path) -> None:
    lengths = ["--input-tokens", str(asked.input_tokens), "--output-tokens", str(asked.output_tokens)]
    load = ["--rate", str(asked.rate), "--arrivals", "constant", "--duration", f"{seconds}s", *lengths]
    command = [sys.executable, "-m", "splittime.cli.main", "bench", "run", url, *load, "--out", str(path)]
    _carry_out(command, {}, allowed=(0, VOID))


def _carry_out(command: list[str], environment: dict[str, str], allowed: tuple[int, ...] = (0,)) -> None:
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode not in allowed:
        sys.exit(f"{Path(command[0]).name} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def table(found: dict[str, Any]) -> Table:
    """The median of the rounds and their range."""
    shown = Table(title="ms; median of the rounds, and their range")
    for column in ("", *(f"{tool} {book}" for tool in TOOLS for book in ("client", "server", "outside"))):
        shown.add_column(column)
    for figure in FIGURES:
        for statistic in ("mean", "p50", "p99"):
            cells = [found[tool][book][figure][statistic] for tool in TOOLS for book in ("client", "server", "outside")]
            shown.add_row(f"{figure} {statistic}", *(f"{m:.2f} ({low:.2f}..{high:.2f})" for low, m, high in cells))
    return shown


def sentence(apart: tuple[str, dict[str, Any]]) -> str:
    figure, of = apart
    verdict = "the tools agree" if of["tools_agree"] else "the tools differ"
    return (
        f"{figure} mean: guidellm {of['difference_ms']:+.2f} ms ({of['relative']:+.1%}), of which the server itself "
        f"{of['of_server_ms']:+.2f}, the tools {of['of_tools_ms']:+.2f}; rounds' range {of['range_ms']:.2f}: {verdict}"
    )


def measure(program: Path, asked: argparse.Namespace, folder: Path) -> None:
    servers, tools = halves(sorted(os.sched_getaffinity(0)), asked.shared_cores)
    begun = len(list(folder.glob("*_splittime.json")))
    for number in range(begun, begun + asked.rounds):
        os.sched_setaffinity(0, servers)  # its processes inherit it
        with served("--num-threads", str(asked.threads)) as url:
            os.sched_setaffinity(0, tools)
            run_splittime(url, asked, WARM_UP_S, folder / "warm_up.json")
            for tool in TOOLS if number % 2 == 0 else reversed(TOOLS):
                path = folder / f"{number}_{tool}.json"
                if tool == "guidellm":
                    run_guidellm(program, url, asked, path)
                else:
                    run_splittime(url, asked, asked.seconds, path)
                print(f"round {number}: {tool} done", file=sys.stderr)


def _version(program: Path) -> str:
    done = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip()


def halves(cores: list[int], is_shared: bool) -> tuple[list[int], list[int]]:
    """The cores of the server and those of the tool: apart, unless asked or there is but one."""
    half = len(cores) // 2
    return (cores, cores) if is_shared or not half else (cores[:half], cores[half:])


def rounds_in(folder: Path) -> Iterator[tuple[Told, Told]]:
    for path in sorted(folder.glob("*_splittime.json")):
        yield read_guidellm(path.with_name(path.name.replace("splittime", "guidellm"))), read_splittime(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guidellm", type=Path, required=True, help="its program, or the Python beside it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=8.0)
    parser.add_argument("--seconds", type=int, default=25)
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1, help="of the engine")
    parser.add_argument("--processes", type=int, default=10, help="of guidellm's workers, at most; 10 is its default")
    parser.add_argument("--shared-cores", action="store_true", help="let the tool take the server's cores")
    parser.add_argument("--folder", type=Path, help="keep every round's files here, and evaluate those found here")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    program = asked.guidellm.with_name("guidellm")
    if not program.exists():
        sys.exit(f"skipped: no guidellm at {asked.guidellm.name}; install it in an environment of its own")
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measure(program.absolute(), asked, folder)
        rounds = [[figures_of(told) for told in pair] for pair in rounds_in(folder)]
    found = {tool: medians([pair[i] for pair in rounds]) for i, tool in enumerate(TOOLS)}
    apart = differences(*(found[tool] for tool in TOOLS))
    settings = {name: value for name, value in vars(asked).items() if name not in ("rounds", "folder")}
    settings["version"] = _version(program)
    figures = {"num_rounds": len(rounds), **found, "differences": apart, "rounds": rounds}
    name = "beside_guidellm_shared_cores" if asked.shared_cores else "beside_guidellm"
    path = file_result(name, figures, settings, asked.json)
    Console(width=170, stderr=asked.json).print(table(found), *map(sentence, apart.items()), sep="\n")
    print(f"written to {path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
