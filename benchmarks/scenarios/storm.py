"""Everything at once for hours: two servers, a gateway, ordinary streams, attacks at random, a kill. Is all in order?

    python -m benchmarks.scenarios.storm [--minutes 120] [--seed 1] [--json]
    python -m benchmarks.scenarios.storm --small        a trial of some 40 s, no figures to be quoted

The gateway has a third upstream that never answers (`black_hole`). Two innocents ask without end, one at the gateway
and one at the first server. Beside them, drawn by the seed, up to `AT_ONCE` of the attacks (`attacks`) strike for 5 to
30 s at that server or at the gateway. The gateway reads its config anew every twentieth of the time. A sixth into it
the second server is killed (`kill -9`) and started again 5 s later, early: it has filled anew when it is judged.
Every `--sample` seconds: resident memory, open files and threads of each kind of process, blocks in use, and what each
server and the gateway keep in memory to be asked for (`kept_bytes` of their /metrics): closed books, stored responses.

In the end nobody asks any more, and it must be so, or the command ends with 1:

* flat: no kind of process grew over the second half: the interval of its slope (Theil-Sen, 95 %) reaches down to zero,
  or its upper end is below `FLAT_SHARE` of its memory an hour. One that is flat but for what it keeps is filling, and
  does not grow: what it keeps is bounded
* blocks: none is in use, and nothing runs or waits
* answers: a greedy answer of each server, and through the gateway, is the one of the beginning
* accounts: each one in every ledger file sums exactly (`verify`), and the servers counted no invalid one
* innocents: their failures, which are told; those of the seconds around the kill are expected
"""

import argparse
import http.client
import json
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
from splittime.ledger.sqlite import ACCOUNT_TABLES

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
KEPT_BYTES = re.compile(rb'^splittime_(?:gateway_)?kept_bytes\{kind="(\w+)"\} (\S+)$', re.MULTILINE)


class Sample(NamedTuple):
    """What was seen of a kind of process. kept: what it keeps to be asked for, in bytes by kind, as it says."""

    at_s: float
    rss_bytes: int
    open_files: int
    threads: int
    kept: dict[str, int]


class Storm:
    """draw: decides all that is done by chance. innocents, attacks: what each process told that ended."""

    def __init__(self, running: Stack, seconds: float, seed: int) -> None:
        self._running, self._seconds, self._draw = running, seconds, random.Random(seed)
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
        self.samples: dict[str, list[Sample]] = {}
        self.blocks: list[tuple[float, int]] = []

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
        self.is_down = True
        self._running.servers[1].kill()

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
            own, kept = f"{command.name} entry", dict[str, int]()
            with suppress(OSError):  # it may be too busy to tell: as before
                kept = kept_by(command.told("/metrics"))
            for name, use in used(command).items():
                series = self.samples.setdefault(name, [])
                last = series[-1].kept if series else {}
                series.append(Sample(self.at_s, *use, (kept or last) if name == own else {}))
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


def kept_by(metrics: bytes) -> dict[str, int]:
    return {kind.decode(): int(float(count)) for kind, count in KEPT_BYTES.findall(metrics)}


def slope(series: Sequence[Sample], from_s: float) -> dict[str, Any]:
    """Return the slope of resident memory from an instant on, with its interval, and the most files and threads.

    Samples near each other are alike, so the interval is rather too narrow: it errs towards growth."""
    late = [one for one in series if one.at_s >= from_s]
    figures = {"open_files": max(one.open_files for one in series), "threads": max(one.threads for one in series)}
    if len(late) < 8:
        return figures | {"judgement": FLAT, "why": "too few samples"}
    from scipy.stats import theilslopes  # takes a second to import

    at_h, memory_mb = np.array([one.at_s for one in late]) / 3600, np.array([one.rss_bytes for one in late]) / 2**20
    found, median_mb = theilslopes(memory_mb, at_h, alpha=0.95), float(np.median(memory_mb))
    is_flat = bool(found.low_slope <= 0 or found.high_slope < FLAT_SHARE * median_mb)
    interval = {"mb_an_hour": found.slope, "from": found.low_slope, "to": found.high_slope}
    return figures | interval | {"median_mb": median_mb, "judgement": FLAT if is_flat else GROWS}


def judged(series: Sequence[Sample], from_s: float) -> dict[str, Any]:
    """Return the memory of a kind of process: where it grows, whether what it keeps explains that."""
    found = slope(series, from_s)
    kept = [Counter(one.kept) for one in series if one.at_s >= from_s] or [Counter(series[-1].kept)]
    if not kept[-1]:
        return found
    beside = slope([one._replace(rss_bytes=one.rss_bytes - sum(one.kept.values())) for one in series], from_s)
    found["kept_mb"] = {kind: {"then": kept[0][kind] / 2**20, "end": kept[-1][kind] / 2**20} for kind in kept[-1]}
    found["beside_kept"] = {name: beside.get(name) for name in ("mb_an_hour", "from", "to")}
    is_theirs = (found["judgement"], beside["judgement"]) == (GROWS, FLAT)
    return found | ({"judgement": FILLING} if is_theirs else {})


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
        storm = Storm(running, seconds, seed)
        storm.rage(sample_s)
        settled = running.settle(SETTLE_S)
        after = [greedy(command) for command in commands]
        invalid = sum(command.answer("/stats")["ledger"]["invalid_accounts"] for command in running.servers)
    memory = {name: judged(many, seconds / 2) for name, many in sorted(storm.samples.items())}
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
