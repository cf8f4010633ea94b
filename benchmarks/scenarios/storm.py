"""Everything at once for hours: two servers, a gateway, ordinary streams, attacks at random, a kill. Is all in order?

    python -m benchmarks.scenarios.storm [--minutes 120] [--seed 1] [--json]
    python -m benchmarks.scenarios.storm --small        a trial of some 40 s, no figures to be quoted

The gateway has a third upstream that never answers (`black_hole`). Two innocents ask without end, one at the gateway
and one at the first server. Beside them, drawn by the seed, up to `AT_ONCE` of the attacks (`attacks`) strike for 5 to
30 s at that server or at the gateway. The gateway reads its config anew every twentieth of the time. A sixth into it
the second server is killed (`kill -9`) and started again 5 s later, early: it has filled anew when it is judged.
Every `--sample` seconds: resident memory, open files and threads of each kind of process, blocks in use, and how many
records each process keeps in memory, as its ledger file tells (`Kept`).

In the end nobody asks any more, and it must be so, or the command ends with 1:

* flat: no kind of process grew over the second half: the interval of its slope (Theil-Sen, 95 %) reaches down to zero,
  or its upper end is below `FLAT_SHARE` of its memory an hour. One that keeps records is filling, and does not grow, if
  its books were not full at half of the time, and the records that came since explain the slope: `bound_mb` says of
  each what they come to
* blocks: none is in use, and nothing runs or waits
* answers: a greedy answer of each server, and through the gateway, is the one of the beginning
* accounts: each one in every ledger file sums exactly (`verify`), and the servers counted no invalid one
* innocents: their failures, which are told; those of the seconds around the kill are expected
"""

import argparse
import http.client
import inspect
import json
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.report import file_result
from benchmarks.scenarios.attacks import ATTACKS
from benchmarks.scenarios.black_hole import KINDS
from benchmarks.scenarios.guarded import MODEL, OPERATOR, Command, Stack, ledger_files, stack, used
from benchmarks.scenarios.innocents import black_hole, start, told_by
from splittime.ledger.account import ClosedAccount
from splittime.ledger.ring import weight_bytes
from splittime.ledger.sqlite_read import ACCOUNT_TABLES
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger

AT_ONCE = 3
ATTACK_S = (5.0, 30.0)
RELOADS = 20
INNOCENT_S = 60.0  # of one turn of it; the next follows at once
KILLED_AT = 1 / 6  # of the time
DOWN_S = 5.0
SETTLE_S = 120.0
FLAT_SHARE = 0.02
GREEDY = {"model": MODEL, "prompt": "class Stack:\n", "max_tokens": 64, "temperature": 0, "ignore_eos": True}
FLAT, FILLING, GROWS = "flat", "filling", "grows"
Process = subprocess.Popen[str]
MOST_KEPT = {
    table: inspect.signature(Ledger).parameters[name].default
    for table, name in (("accounts", "max_accounts"), ("refused", "max_accounts"), ("steps", "max_steps"))
}


class Kept(NamedTuple):
    """Records that a process has in memory, each at most `MOST_KEPT` of its kind."""

    at_s: float
    rows: dict[str, int]


class Storm:
    """draw: decides all that is done by chance. innocents, attacks: what each process told that ended."""

    def __init__(self, running: Stack, folder: Path, seconds: float, seed: int) -> None:
        self._running, self._folder, self._seconds, self._draw = running, folder, seconds, random.Random(seed)
        self._begin_s = time.monotonic()
        self._attacks: list[tuple[str, Process]] = []
        self._innocents: dict[str, Process] = {}
        self._due: list[tuple[float, Callable[[], None]]] = [
            *((seconds * part / RELOADS, self._reload) for part in range(1, RELOADS)),
            (seconds * KILLED_AT, self._kill),
            (seconds * KILLED_AT + DOWN_S, self._revive),
        ]
        self._due.sort(key=lambda one: one[0])
        self.is_down = False
        self.failed: dict[str, dict[str, int]] = {}
        self.answered, self.num_attacks, self.ends = 0, 0, dict[str, dict[str, int]]()
        self.samples: dict[str, list[tuple[float, int, int, int]]] = {}
        self.blocks: list[tuple[float, int]] = []
        self.kept: dict[str, list[Kept]] = {}
        self._written_before = dict[str, dict[str, int]]()  # by what a command was before it was killed

    @property
    def at_s(self) -> float:
        return time.monotonic() - self._begin_s

    def rage(self, sample_s: float) -> None:
        next_sample_s = next_words_s = 0.0
        while self.at_s < self._seconds:
            self._do_what_is_due()
            self._gather()
            self._send()
            if self.at_s >= next_sample_s:
                next_sample_s += sample_s
                self._sample()
            if self.at_s >= next_words_s:
                next_words_s += max(5.0, self._seconds / 240)
                print(self._words(), file=sys.stderr, flush=True)
            time.sleep(0.2)
        self._end()

    # ---- what is done

    def _do_what_is_due(self) -> None:
        while self._due and self._due[0][0] <= self.at_s:
            self._due.pop(0)[1]()

    def _reload(self) -> None:
        self._running.gateway.signal(signal.SIGHUP)

    def _kill(self) -> None:
        self.is_down, server = True, self._running.servers[1]
        server.kill()
        self._written_before[server.name] = written(self._folder / f"{server.name}.sqlite")

    def _revive(self) -> None:
        self._running.servers[1].start()
        self.is_down = False

    def _send(self) -> None:
        """Start innocents that have ended, and attacks up to as many as there may be."""
        targets: dict[str, Command] = {"gateway": self._running.gateway, "server": self._running.servers[0]}
        for name, target in targets.items():
            if name not in self._innocents:
                turn_s = max(1.0, min(INNOCENT_S, self._seconds - self.at_s))
                self._innocents[name] = start("innocent_client", target.port, "--seconds", turn_s)
        if len(self._attacks) < AT_ONCE and self._draw.random() < 0.1:
            name, where = self._draw.choice(list(ATTACKS)), self._draw.choice(list(targets.values()))
            lasts_s = min(self._draw.uniform(*ATTACK_S), max(1.0, self._seconds - self.at_s))
            more = ("--seconds", lasts_s, "--seed", self.num_attacks)
            self._attacks.append((name, start("attacks", name, where.port, *more)))
            self.num_attacks += 1

    def _gather(self) -> None:
        for name, attacker in [one for one in self._attacks if one[1].poll() is not None]:
            self._attacks.remove((name, attacker))
            _add(self.ends.setdefault(name, {}), told_by(attacker, 10)["ends"])
        for name, process in [one for one in self._innocents.items() if one[1].poll() is not None]:
            del self._innocents[name]
            found = told_by(process, 10)
            self.answered += found["answered"]
            is_near = abs(self.at_s - INNOCENT_S / 2 - self._seconds * KILLED_AT) < INNOCENT_S
            when = "around the kill" if is_near else "else"
            _add(self.failed.setdefault(f"{name}, {when}", {}), found["failed"])

    def _end(self) -> None:
        until_s = time.monotonic() + 90
        while (self._attacks or self._innocents) and time.monotonic() < until_s:
            self._gather()
            time.sleep(0.2)
        for process in (*(one for _, one in self._attacks), *self._innocents.values()):
            process.kill()

    # ---- what is seen

    def _sample(self) -> None:
        commands = [one for one in (*self._running.servers, self._running.gateway) if not self._is_away(one)]
        for command in commands:
            for name, use in used(command).items():
                self.samples.setdefault(name, []).append((self.at_s, *use))
            rows, before = written(self._folder / f"{command.name}.sqlite"), self._written_before.get(command.name, {})
            kept = {table: min(most, rows[table] - before.get(table, 0)) for table, most in MOST_KEPT.items()}
            self.kept.setdefault(f"{command.name} entry", []).append(Kept(self.at_s, kept))
        with suppress(OSError):  # it may be too busy to tell
            self.blocks.append((self.at_s, self._running.servers[0].answer("/stats")["engine"]["blocks_used"]))

    def _is_away(self, command: Command) -> bool:
        return self.is_down and command is self._running.servers[1]

    def _words(self) -> str:
        memory = ", ".join(f"{name} {many[-1][1] >> 20} MB" for name, many in sorted(self.samples.items()))
        attacks = " ".join(name for name, _ in self._attacks) or "calm"
        return f"{self.at_s:6.0f} s: {self.answered} answered, {self.num_attacks} attacks ({attacks}); {memory}"


def _add(into: dict[str, int], more: dict[str, int]) -> None:
    for name, count in more.items():
        into[name] = into.get(name, 0) + count


def greedy(command: Command) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", command.port, timeout=120)
    headers = {"Authorization": f"Bearer {OPERATOR}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(GREEDY), headers)
    answer = connection.getresponse()
    told = json.loads(answer.read())
    connection.close()
    return told["choices"][0]["text"] if answer.status == 200 else f"{answer.status}: {told}"


def slope(series: list[tuple[float, int, int, int]], from_s: float) -> dict[str, Any]:
    """Return the slope of resident memory from an instant on, with its interval, and the most files and threads.

    Samples near each other are alike, so the interval is rather too narrow: it errs towards growth."""
    late = [one for one in series if one[0] >= from_s]
    figures: dict[str, Any] = {"open_files": max(one[2] for one in series), "threads": max(one[3] for one in series)}
    if len(late) < 8:
        return figures | {"judgement": FLAT, "why": "too few samples"}
    from scipy.stats import theilslopes  # takes a second to import

    at_h, memory_mb = np.array([one[0] for one in late]) / 3600, np.array([one[1] for one in late]) / 2**20
    found = theilslopes(memory_mb, at_h, alpha=0.95)
    is_flat = bool(found.low_slope <= 0 or found.high_slope < FLAT_SHARE * float(np.median(memory_mb)))
    interval = {"mb_an_hour": found.slope, "from": found.low_slope, "to": found.high_slope}
    return figures | interval | {"median_mb": float(np.median(memory_mb)), "judgement": FLAT if is_flat else GROWS}


def written(path: Path) -> dict[str, int]:
    """Returns how many records of each kind have ever been written to a ledger file."""
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=30)) as connection:
        return {table: connection.execute(f"SELECT max(seq) FROM {table}").fetchone()[0] or 0 for table in MOST_KEPT}


def books(path: Path, series: list[Kept], from_s: float) -> dict[str, Any]:
    """Returns what a process kept in the end, and by how much that grew from an instant on; weights are those by which
    the rings are bounded, of the latest records."""
    late = [one for one in series if one.at_s >= from_s] or series[-1:]
    hours, found, growth_mb = max(1e-9, (late[-1].at_s - late[0].at_s) / 3600), dict[str, Any](), 0.0
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        for table, most in MOST_KEPT.items():
            bodies = connection.execute(f"SELECT body FROM {table} ORDER BY seq DESC LIMIT 500").fetchall()
            kind = ClosedAccount if table in ACCOUNT_TABLES else StepRecord
            weights = [weight_bytes(msgspec.json.decode(body, type=kind)) for (body,) in bodies]
            mb, rows = float(np.mean(weights or [0])) / 2**20, late[-1].rows[table]
            growth_mb += (rows - late[0].rows[table]) * mb
            found[table] = {"kept": rows, "most": most, "mb": rows * mb, "bound_mb": most * mb}
    return found | {"growth_mb_an_hour": growth_mb / hours}


def judged(memory: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Returns the memory of a process that keeps records: its growth may be theirs."""
    is_theirs = memory["judgement"] == GROWS and memory["from"] <= kept["growth_mb_an_hour"]
    return memory | {"books": kept} | ({"judgement": FILLING} if is_theirs else {})


def checked_accounts(path: Path) -> dict[str, int]:
    """Return how many accounts a ledger file has, and how many of them do not sum. One is in memory at a time."""
    found = {"accounts": 0, "wrong": 0}
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
        for table in ACCOUNT_TABLES:
            for (body,) in connection.execute(f"SELECT body FROM {table}"):
                found["accounts"] += 1
                try:
                    msgspec.json.decode(body, type=ClosedAccount).verify()
                except ValueError:
                    found["wrong"] += 1
    return found


def weather(folder: Path, seconds: float, seed: int, sample_s: float) -> dict[str, Any]:
    with black_hole(random.Random(seed).choice(KINDS)) as holes, stack(folder, servers=2, others=holes) as running:
        commands = [*running.servers, running.gateway]
        before = [greedy(command) for command in commands]
        storm = Storm(running, folder, seconds, seed)
        storm.rage(sample_s)
        settled = running.settle(SETTLE_S)
        after = [greedy(command) for command in commands]
        invalid = sum(command.answer("/stats")["ledger"]["invalid_accounts"] for command in running.servers)
    memory = {name: slope(many, seconds / 2) for name, many in sorted(storm.samples.items())}
    for name, series in storm.kept.items():
        path = folder / f"{name.removesuffix(' entry')}.sqlite"
        memory[name] = judged(memory[name], books(path, series, seconds / 2))
    accounts = {path.name: checked_accounts(path) for path in ledger_files(folder)}
    return {
        "answered": storm.answered,
        "failed": storm.failed,
        "attacks": {"number": storm.num_attacks, "ends": storm.ends},
        "memory": memory,
        "most_blocks": max((count for _, count in storm.blocks), default=None),
        "accounts": accounts,
        "in_order": {
            "flat": all(one["judgement"] != GROWS for one in memory.values()),
            "blocks": settled,
            "answers": before == after and not before[0][:1].isdigit(),
            "accounts": not invalid and not any(one["wrong"] for one in accounts.values()),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=float, default=10.0, help="seconds between two looks at the processes")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    seconds, sample_s = (40.0, 1.0) if args.small else (60 * args.minutes, args.sample)
    with tempfile.TemporaryDirectory() as folder:
        found = weather(Path(folder), seconds, args.seed, sample_s)
    file_result("storm", found, {**vars(args), "minutes": seconds / 60, "sample": sample_s}, args.json)
    print(json.dumps(found, indent=1), file=sys.stderr)
    return int(not args.small and not all(found["in_order"].values()))


if __name__ == "__main__":
    sys.exit(main())
