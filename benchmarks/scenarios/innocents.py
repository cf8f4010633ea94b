"""What an innocent key gets while another does its worst: on a quiet server and gateway, then beside each attack.

    python -m benchmarks.scenarios.innocents [--seconds 10] [--on server gateway] [--only NAME ...] [--json]
    python -m benchmarks.scenarios.innocents --small        a trial: short turns, no figures to be quoted

For each attack (`attacks`) a new `serve` with the packaged model and a keys file, and a new `gateway` before it, are
started; an attack is aimed at either. One process asks as the innocent (`innocent_client`) when all is quiet, and again
beside a second process that attacks. With `black-hole-KIND` the gateway has a second upstream that never answers
(`black_hole`).

It asks for each of TTFT, the gaps of a stream and a short request, p50 and p99: is it at most twice the quiet one's
plus one step? A step is the p99 of the steps of a server with all slots full of ordinary streams, measured first.
holds: yes; no, with the first figure that is beyond it; VOID if the measuring process itself was late by so much that
the excess may be its own. Failed requests of the innocent are a no. An attack by forms also asks that no form of the
innocent took longer than a second. grown_mb: the resident memory of all processes, after less before.

All processes share the machine's cores; the attackers have what the others leave of them (a niceness of 19).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.overload_client import spread
from benchmarks.report import file_result
from benchmarks.scenarios.attacks import ATTACKS
from benchmarks.scenarios.black_hole import KINDS
from benchmarks.scenarios.guarded import INNOCENT, MODEL, Command, Stack, stack, used
from benchmarks.scenarios.innocent_client import WARM_UP_S

SERVER, GATEWAY = "server", "gateway"
SLOTS = 64
FORM_MS = 1000.0
ASKED = [(name, point) for name in ("ttft", "gap", "short") for point in ("p50", "p99")]
MEASURED = ("ttft", "gap", "short", "form")
BLACK_HOLE = "black-hole-"
START_S = 1.5  # of an attacking process


class Scene(NamedTuple):
    """on: where the innocent asks, and the attack is aimed."""

    attack: str
    on: str

    @property
    def black_hole(self) -> str | None:
        return self.attack.removeprefix(BLACK_HOLE) if self.attack.startswith(BLACK_HOLE) else None


def scenes(on: list[str], only: list[str] | None) -> list[Scene]:
    every = [Scene(name, where) for where in on for name in ATTACKS]
    every += [Scene(BLACK_HOLE + kind, GATEWAY) for kind in KINDS if GATEWAY in on]
    return [scene for scene in every if not only or scene.attack in only]


def start(module: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", f"benchmarks.scenarios.{module}", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def told_by(process: subprocess.Popen[str], within_s: float) -> dict[str, Any]:
    try:
        told, _ = process.communicate(timeout=within_s)
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"{process.args} ended with status {process.returncode}")
    return json.loads(told)


def innocent(command: Command, seconds: float) -> dict[str, Any]:
    return told_by(start("innocent_client", command.port, "--seconds", seconds), seconds + 60)


def ask_first(command: Command) -> None:
    """Ask for one form, which is the first: what compiles them is started by it."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 3, "guided_choice": ["yes", "no"]}
    headers = {"Authorization": f"Bearer {INNOCENT}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{command.url}/v1/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=120).close()


def full_step_ms(server: Command, seconds: float) -> float:
    """Return the p99 of a step with all slots full of ordinary streams."""
    body = {"model": MODEL, "prompt": "def read(path):\n", "ignore_eos": True}
    kinds = json.dumps([{"name": "any", "key": INNOCENT, "body": body, "least": 100, "most": 200}])
    command = [sys.executable, "-m", "benchmarks.overload_client", str(server.port), "--kinds", kinds]
    command += ["--in-flight", str(SLOTS), "--seconds", str(seconds)]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, timeout=seconds + 60)
    steps = server.answer("/ledger/steps?limit=2000")["steps"]
    full = [step for step in steps if step["decode_tokens"] >= SLOTS / 2]
    return spread([(step["end_ns"] - step["begin_ns"]) / 1e6 for step in full])["p99"]


@contextmanager
def black_hole(kind: str | None) -> Iterator[dict[str, str]]:
    """Yield it as an upstream, by its name; none for no kind."""
    if kind is None:
        yield {}
        return
    process = start("black_hole", kind)
    assert process.stdout is not None
    try:
        yield {BLACK_HOLE + kind: f"http://127.0.0.1:{int(process.stdout.readline())}"}
    finally:
        process.kill()
        process.wait()


def rss_mb(running: Stack) -> float:
    return (
        sum(one.rss_bytes for command in (*running.servers, running.gateway) for one in used(command).values()) / 2**20
    )


def measure(scene: Scene, seconds: float, step_ms: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, black_hole(scene.black_hole) as holes:
        # a quiet gateway is one without a hole
        with stack(Path(folder)) as running:
            target = running.gateway if scene.on == GATEWAY else running.servers[0]
            ask_first(target)
            quiet = innocent(target, seconds)
            if not holes:
                return told(scene, quiet, attacked(scene, running, target, seconds), step_ms)
        with stack(Path(folder), others=holes) as running:
            ask_first(running.servers[0])
            return told(scene, quiet, attacked(scene, running, running.gateway, seconds), step_ms)


def attacked(scene: Scene, running: Stack, target: Command, seconds: float) -> dict[str, Any]:
    before_mb, attackers = rss_mb(running), list[subprocess.Popen[str]]()
    if scene.attack in ATTACKS:
        attack_s = START_S + WARM_UP_S + seconds + 1
        attackers.append(start("attacks", scene.attack, target.port, "--seconds", attack_s))
        time.sleep(START_S)
    beside = innocent(target, seconds)
    beside["attack"] = [told_by(process, 60) for process in attackers]
    beside["grown_mb"] = rss_mb(running) - before_mb
    beside["settled"] = running.settle(10)
    return beside


def told(scene: Scene, quiet: dict[str, Any], beside: dict[str, Any], step_ms: float) -> dict[str, Any]:
    return {
        "attack": scene.attack,
        "on": scene.on,
        "holds": holds(quiet, beside, step_ms),
        "quiet": quiet,
        "beside": beside,
    }


def holds(quiet: dict[str, Any], beside: dict[str, Any], step_ms: float) -> str:
    """Return yes, VOID or no, with the figure that is beyond its limit."""
    if beside["failed"]:
        return f"no: failed {beside['failed']}"
    if absent := [name for name in MEASURED if name not in beside]:
        return f"no: nothing came of {', '.join(absent)}"
    if absent := [name for name in MEASURED if name not in quiet]:
        return f"VOID: nothing came of {', '.join(absent)} when all was quiet"
    if beside["form"]["max"] > FORM_MS:
        return f"no: a form took {beside['form']['max']:.0f} ms"
    verdict = "yes"
    for name, point in ASKED:
        limit_ms, found_ms = 2 * quiet[name][point] + step_ms, beside[name][point]
        if found_ms - beside["late"][point] > limit_ms:
            return f"no: {name} {point} {found_ms:.1f} of {limit_ms:.1f} ms"
        if found_ms > limit_ms:
            verdict = (
                f"VOID: {name} {point} {found_ms:.1f} of {limit_ms:.1f} ms, the client {beside['late'][point]:.1f} late"
            )
    return verdict


def row(found: dict[str, Any]) -> str:
    cells = [f"{found['on']:8}{found['attack']:22}"]
    for name in [name for name in MEASURED if name in found["quiet"] and name in found["beside"]]:
        quiet, beside = found["quiet"][name], found["beside"][name]
        points = "/".join(f"{beside[point]:.0f}" for point in ("p50", "p99", "max"))
        cells.append(f"{name} {points} (x{beside['p50'] / quiet['p50']:.1f}, x{beside['p99'] / quiet['p99']:.1f})")
    cells.append(f"{found['beside']['grown_mb']:+.0f} MB")
    return "  ".join([*cells, found["holds"]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each turn")
    parser.add_argument("--on", nargs="+", choices=(SERVER, GATEWAY), default=[SERVER, GATEWAY])
    parser.add_argument("--only", nargs="+", help="these attacks alone", metavar="NAME")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    seconds = 1.0 if args.small else args.seconds
    chosen = scenes(args.on, args.only)
    if not chosen:
        parser.error(f"no such attack; there are {', '.join(ATTACKS)} and {BLACK_HOLE}KIND")
    with tempfile.TemporaryDirectory() as folder, stack(Path(folder)) as running:
        step_ms = full_step_ms(running.servers[0], max(2.0, seconds / 2))
    print(f"one step: {step_ms:.1f} ms; each figure p50/p99/max ms (p50 and p99 over the quiet ones)", file=sys.stderr)
    rows = []
    for scene in chosen:
        rows.append(measure(scene, seconds, step_ms))
        print(row(rows[-1]), file=sys.stderr, flush=True)
    held = sum(found["holds"] == "yes" for found in rows)
    print(f"{held} of {len(rows)} hold", file=sys.stderr)
    file_result("innocents", {"step_ms": step_ms, "rows": rows}, {**vars(args), "seconds": seconds}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
