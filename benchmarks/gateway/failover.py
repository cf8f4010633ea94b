"""How long a stream is without a token when its server is killed in the middle, and whether its answer is the same.

    python -m benchmarks.gateway.failover [--rounds N] [--tokens N] [--json]
    python -m benchmarks.gateway.failover --small        a trial: two rounds, no figures to be quoted

Two of our own servers serve the packaged model, each in processes of its own; `splittime gateway` stands in front of
both with `resume = true`. Each round asks a greedy stream (a chat and a completion by turns) twice: undisturbed, and
with `kill -9` for the server that answers it, after a share of the tokens that grows from round to round. Then the
killed server is started again.

* without_token_ms: from the last token read before the break to the first read after it, by the client's clock
* after_kill_ms: from the signal to that token
* usual_gap_ms: the median gap between chunks of the same stream undisturbed
* equal: the text, the usage and the finish reason are those of the undisturbed stream, and it ends in one [DONE]

All processes share the machine's cores.
"""

import argparse
import http.client
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import file_result
from benchmarks.server_process import free_port, wait_until_ready
from splittime.ledger.derive import percentiles

MODEL = "splittime-code"
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Write a function that sorts a list."}]},
    "/v1/completions": {"prompt": "class Stack:\n    def __init__(self):\n"},
}
READY_S = 120


class ServerPair:
    """Two servers on ports of their own, each to be killed and started again."""

    def __init__(self) -> None:
        self.ports = (free_port(), free_port())
        self._processes = [self._start(port) for port in self.ports]
        self._wait()

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "splittime.cli.main", "serve", "--port", str(port)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _wait(self) -> None:
        for port, process in zip(self.ports, self._processes, strict=True):
            wait_until_ready(f"http://127.0.0.1:{port}", process, READY_S)

    def kill(self, number: int) -> None:
        self._processes[number].send_signal(signal.SIGKILL)
        self._processes[number].wait()

    def revive(self, number: int) -> None:
        self._processes[number] = self._start(self.ports[number])
        self._wait()

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
            process.wait(30)


@contextmanager
def gateway(ports: tuple[int, ...]) -> Iterator[str]:
    """Yields the address of a gateway in front of servers at these ports."""
    told = "port = 0\n[breaker]\nfailures = 1000\n"
    for number, port in enumerate(ports):
        told += f'[[upstream]]\nname = "ours{number}"\nurl = "http://127.0.0.1:{port}"\nmodels = ["{MODEL}"]\n'
        told += 'kind = "splittime"\nresume = true\n'
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "gateway.toml"
        config.write_text(told)
        command = [sys.executable, "-m", "splittime.cli.main", "gateway", "--config", str(config), "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["gateway"].removeprefix("http://")
        finally:
            process.terminate()
            process.wait(60)


class Heard(NamedTuple):
    """A stream as its client had it. at_ns: when each chunk with a text was read. resumed: which of these goes on."""

    text: str
    at_ns: list[int]
    resumed: int | None
    usage: dict[str, Any]
    ending: tuple[str, ...]


def listen(
    address: str, path: str, tokens: int, on_chunk: Callable[[int, int], None] = lambda upstream, n: None
) -> Heard:
    """Returns what a stream says. on_chunk: is told the upstream's number and how many chunks there were."""
    body = {"model": MODEL, "stream": True, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **ASKED[path]}
    connection = http.client.HTTPConnection(address)
    connection.request("POST", path, json.dumps({**body, "stream_options": {"include_usage": True}}))
    answer = connection.getresponse()
    upstream = int((answer.headers["x-splittime-upstream"] or "ours0")[-1])
    texts, at_ns, resumed, usage, ending = list[str](), list[int](), None, dict[str, Any](), list[str]()
    for line in answer:
        data = line.removeprefix(b"data: ").strip()
        if not data or data == b"[DONE]":
            ending += ["[DONE]"] if data else []
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            ending.append(f"error: {chunk['error']['message']}")
            continue
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            resumed = len(at_ns) if "resumed" in chunk else resumed
            texts.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
            at_ns.append(time.monotonic_ns())
            ending += [choice["finish_reason"]] if choice["finish_reason"] else []
            on_chunk(upstream, len(at_ns))
    connection.close()
    usage = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
    return Heard("".join(texts), at_ns, resumed, usage, tuple(ending))


class Killer:
    """Kills the server that answers, once so many chunks are there."""

    def __init__(self, servers: ServerPair, after_chunks: int) -> None:
        self._servers, self._after = servers, after_chunks
        self.killed: int | None = None
        self.at_ns = 0

    def __call__(self, upstream: int, num_chunks: int) -> None:
        if self.killed is None and num_chunks >= self._after:
            self.killed, self.at_ns = upstream, time.monotonic_ns()
            self._servers.kill(upstream)


def one_round(address: str, servers: ServerPair, path: str, tokens: int, share: float) -> dict[str, Any]:
    """Returns the figures of one stream whose server is killed after this share of its chunks."""
    whole = listen(address, path, tokens)
    killer = Killer(servers, max(2, int(share * len(whole.at_ns))))
    broken = listen(address, path, tokens, killer)
    if killer.killed is not None:
        servers.revive(killer.killed)
    gaps = [(later - sooner) / 1e6 for sooner, later in zip(whole.at_ns, whole.at_ns[1:], strict=False)]
    figures = {
        "path": path,
        "killed_after_share": share,
        "equal": (broken.text, broken.usage, broken.ending) == (whole.text, whole.usage, whole.ending),
        "ending": broken.ending,
        "usual_gap_ms": statistics.median(gaps),
    }
    if broken.resumed:
        first_ns = broken.at_ns[broken.resumed]
        figures["without_token_ms"] = (first_ns - broken.at_ns[broken.resumed - 1]) / 1e6
        figures["after_kill_ms"] = (first_ns - killer.at_ns) / 1e6
    return figures


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    resumed = [row for row in rows if "without_token_ms" in row]
    names = ("without_token_ms", "after_kill_ms", "usual_gap_ms")
    return {
        "streams": len(rows),
        "resumed": len(resumed),
        "equal": sum(row["equal"] for row in rows),
        **{name: percentiles([row[name] for row in resumed], (50, 99)) for name in names if resumed},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rounds = 2 if args.small else args.rounds
    servers = ServerPair()
    try:
        with gateway(servers.ports) as address:
            paths = list(ASKED)
            rows = [
                one_round(address, servers, paths[i % 2], args.tokens, 0.05 + 0.85 * i / rounds) for i in range(rounds)
            ]
    finally:
        servers.stop()
    found = summary(rows)
    settings = {"rounds": rounds, "tokens": args.tokens, "small": args.small, "model": MODEL}
    file_result("gateway_failover", {"summary": found, "rows": rows}, settings, args.json)
    print(
        f"{found['resumed']} of {found['streams']} streams went on, {found['equal']} with the undisturbed answer; "
        f"without a token for {found.get('without_token_ms')} ms, usually {found.get('usual_gap_ms')} ms",
        file=sys.stderr,
    )
    return int(found["equal"] < found["streams"])


if __name__ == "__main__":
    sys.exit(main())
