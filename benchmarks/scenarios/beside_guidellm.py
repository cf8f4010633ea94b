"""`guidellm` and `splittime bench` on the same server under the same load: do they tell the same?

    python -m benchmarks.scenarios.beside_guidellm --guidellm PROGRAM [--repeats 3] [--folder FOLDER] [--json]

Each round starts `splittime serve` (the packaged model), warms it, and sends the load from one tool and then from the
other, the order alternating: constant arrivals, prompts and answers of one length, on /v1/completions, streamed; texts
of as many tokens from both (`texts`; guidellm cannot send ids), so that the server tokenises alike for either. The
CPU seconds of tool and server are taken in each round. The server's own account of each request is the referee. The
same functions make every figure of either (`beside_guidellm_told`), so that what differs is the tools' clocks and not
their words. What each publishes is filed beside:

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
import random
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cpu_seconds import cpu_seconds_of_children
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
from splittime.text.tokenizer import Tokenizer

PACKAGED = Path(__file__).parents[2] / "src" / "splittime" / "packaged" / "code"
TOOLS = ("guidellm", "splittime")
TIMEOUT_S, WARM_UP_S = 120, 2
VOID = 3  # a client at fault: filed as such
WORDS = ("def", "self", "return", "value", "index", "for", "list", "import", "name", "if", "print", "data")


def run_guidellm(program: Path, url: str, asked: argparse.Namespace, path: Path) -> None:
    """Its report goes to `path`, the server's accounts beside it."""
    spec = {
        "backend": {"kind": "openai_http", "target": url, "request_format": "/v1/completions"},
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


def _synthetic(asked: argparse.Namespace) -> dict[str, Any]:
    return {"kind": "synthetic_text", "prompt_tokens": asked.input_tokens, "output_tokens": asked.output_tokens}


def texts(count: int, tokens: int, seed: int) -> Iterator[str]:
    """Different texts of exactly so many tokens of the packaged model: words by chance, cut, and counted again."""
    tokenizer, rng = Tokenizer.load(PACKAGED), random.Random(seed)
    while count:
        words = "".join(f" {rng.choice(WORDS)}{rng.randrange(100)}" for _ in range(tokens))
        text = tokenizer.decode(tokenizer.encode(words)[:tokens], skip_special_tokens=True)
        if len(tokenizer.encode(text)) == tokens:
            count -= 1
            yield text


def run_splittime(url: str, asked: argparse.Namespace, seconds: int, path: Path) -> None:
    prompts, seed = path.with_suffix(".prompts.jsonl"), int.from_bytes(os.urandom(3))
    count = round(4 * asked.rate * (seconds + 2))
    lines = (json.dumps({"prompt": text}) + "\n" for text in texts(count, asked.input_tokens, seed))
    prompts.write_text("".join(lines))
    content = ["--workload", "jsonl", "--dataset", str(prompts), "--prompt-form", "text", "--reuse-prompts"]
    lengths = ["--output-tokens", str(asked.output_tokens), "--exact-output"]
    load = ["--rate", str(asked.rate), "--arrivals", "constant", "--duration", f"{seconds}s", *lengths, *content]
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
    """A figure's verdict, and the numbers it is made from."""
    figure, of = apart
    return (
        f"{figure} mean: {of['verdict']}. guidellm {of['difference_ms']:+.2f} ms ({of['relative']:+.1%}), of which by "
        f"the server's book {of['of_server_ms']:+.2f}, of the tools {of['of_tools_ms']:+.2f}; rounds' range "
        f"{of['range_ms']:.2f}"
    )


def cpu_sentence(found: dict[str, Any]) -> str:
    """Seconds a request, since the tools do not send equally many: of the tool, and of the server meanwhile."""
    each = (
        f"{tool} {_span(found[tool]['tool_cpu_ms'])}, its server {_span(found[tool]['server_cpu_ms'])}"
        for tool in TOOLS
    )
    return f"CPU ms a request, user and system: {'; '.join(each)}"


def _span(told: list[float]) -> str:
    low, middle, high = told
    return f"{middle:.2f} ({low:.2f}..{high:.2f})"


def measure(program: Path, asked: argparse.Namespace, folder: Path) -> None:
    servers, tools = halves(sorted(os.sched_getaffinity(0)), asked.shared_cores)
    begun = len(list(folder.glob("*_splittime.json")))
    for number in range(begun, begun + asked.repeats):
        os.sched_setaffinity(0, servers)  # its processes inherit it
        with served("--num-threads", str(asked.threads)) as url:
            os.sched_setaffinity(0, tools)
            run_splittime(url, asked, WARM_UP_S, folder / "warm_up.json")
            for tool in TOOLS if number % 2 == 0 else reversed(TOOLS):
                _one_turn(tool, program, url, asked, folder / f"{number}_{tool}.json")
                print(f"round {number}: {tool} done", file=sys.stderr)


def _one_turn(tool: str, program: Path, url: str, asked: argparse.Namespace, path: Path) -> None:
    """One tool's part of a round, with the CPU seconds that it and the server took beside it."""
    tool_s, server_s = _children_s(), cpu_seconds_of_children()
    if tool == "guidellm":
        run_guidellm(program, url, asked, path)
    else:
        run_splittime(url, asked, asked.seconds, path)
    taken = {"tool_cpu_s": _children_s() - tool_s, "server_cpu_s": cpu_seconds_of_children() - server_s}
    path.with_suffix(".cpu.json").write_text(json.dumps(taken))


def _children_s() -> float:
    """User and system time of the processes that have ended: the tools; a server lives on."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def why_not(program: Path) -> str | None:
    """Why guidellm cannot be run here, in words; None if it can."""
    hint = "install it in an environment of its own (python -m venv FOLDER; FOLDER/bin/pip install guidellm)"
    if not program.is_file() or not os.access(program, os.X_OK):
        return (
            f"there is no guidellm to run in the folder {program.parent.name!r}; {hint}, and say where with --guidellm"
        )
    return None if _version(program) else f"guidellm does not say its version: it does not run; {hint}"


def _version(program: Path) -> str:
    """Empty if it does not run."""
    try:
        done = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


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
    parser.add_argument("--repeats", type=int, default=3, help="rounds; in each both tools have a turn")
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
    if (why := why_not(program)) is not None:
        print(f"skipped: {why}", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        measure(program.absolute(), asked, folder)
        rounds = [[figures_of(told) for told in pair] for pair in rounds_in(folder)]
    found = {tool: medians([pair[i] for pair in rounds]) for i, tool in enumerate(TOOLS)}
    apart = differences(*(found[tool] for tool in TOOLS))
    settings = {name: value for name, value in vars(asked).items() if name not in ("repeats", "folder", "guidellm")}
    settings["version"] = _version(program)
    figures = {"num_rounds": len(rounds), **found, "differences": apart, "rounds": rounds}
    name = "beside_guidellm_shared_cores" if asked.shared_cores else "beside_guidellm"
    path = file_result(name, figures, settings, asked.json)
    Console(width=170, stderr=asked.json).print(
        table(found), *map(sentence, apart.items()), cpu_sentence(found), sep="\n"
    )
    print(f"written to {path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
