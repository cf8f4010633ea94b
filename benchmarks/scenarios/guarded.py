"""A server with keys and a gateway before it, in processes of their own that can be killed and started again.

Who asks: `INNOCENT`, whose figures are told; `WIDE`, an attacker's key without limits; `NARROW`, one that may have two
requests open. The gateway asks the server as `GATEWAY`, and knows the same names. `OPERATOR` may look.
"""

import json
import os
import resource
import subprocess
import sys
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.server_process import free_port, wait_until_ready

MODEL = "splittime-code"
OPERATOR, INNOCENT, WIDE, NARROW, GATEWAY = "operator-1", "innocent-1", "wide-1", "narrow-1", "gateway-1"
OPEN_OF_NARROW = 2
USUAL_FILES = 1024  # the soft limit of open files of a usual shell
READY_S = 300.0
FIRST_BYTE_S = 3.0  # less than long answers take here that are no streams
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
)


class Command:
    """One of our commands at a port that stays its own. path: answers 200 once it is ready."""

    def __init__(self, name: str, arguments: Sequence[str], port: int, path: str, words: Path) -> None:
        self.name, self.port, self.url = name, port, f"http://127.0.0.1:{port}"
        self._arguments, self._path, self._words = arguments, path, words
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "splittime.cli.entry", *self._arguments]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # without bytecode a start takes far longer
        with self._words.open("ab") as words:
            self._process = subprocess.Popen(command, stdout=words, stderr=words, env=environment)
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(self._process.pid, resource.RLIMIT_NOFILE, (min(USUAL_FILES, most), most))
        try:
            wait_until_ready(self.url, self._process, READY_S, self._path)
        except RuntimeError as error:
            self.stop()
            raise RuntimeError(f"{self.name}: {error}: {self._words.read_text()[-2000:]}") from None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def told(self, path: str, timeout_s: float = 30.0) -> bytes:
        """Return what a path tells an operator."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {OPERATOR}"})
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.read()

    def answer(self, path: str, timeout_s: float = 30.0) -> Any:
        return json.loads(self.told(path, timeout_s))


class Stack(NamedTuple):
    servers: list[Command]
    gateway: Command

    def settle(self, most_s: float = 60.0) -> bool:
        """Wait until no server runs or holds anything; return whether that came about."""
        until_s = time.monotonic() + most_s
        while time.monotonic() < until_s:
            engines = [server.answer("/stats")["engine"] for server in self.servers]
            if not any(one["num_running"] or one["num_waiting"] or one["blocks_used"] for one in engines):
                return True
            time.sleep(0.2)
        return False


def ledger_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.sqlite"))


def server_command(name: str, folder: Path) -> Command:
    keys, template, port = folder / "keys.toml", folder / "template.jinja", free_port()
    keys.write_text("".join(map(_key, (OPERATOR, INNOCENT, WIDE, NARROW, GATEWAY))))
    keys.chmod(0o600)
    template.write_text(TEMPLATE)
    flags = ["--api-keys-file", str(keys), "--ledger-file", str(folder / f"{name}.sqlite")]
    flags += ["--chat-template", str(template), "--tool-call-parser", "hermes"]
    return Command(name, ["serve", "--port", str(port), *flags], port, "/ready", folder / f"{name}.txt")


def _key(key: str) -> str:
    more = "operator = true\n" if key in (OPERATOR, GATEWAY) else ""  # so that the gateway is believed whose they are
    more += f"max_open_requests = {OPEN_OF_NARROW}\n" if key == NARROW else ""
    return f'[[key]]\nname = "{key}"\nkey = "{key}"\n{more}'


def gateway_command(folder: Path, upstreams: dict[str, str]) -> Command:
    """upstreams: names and addresses of all that serve the model."""
    config, key, port = folder / "gateway.toml", folder / "gateway.key", free_port()
    key.write_text(GATEWAY)
    key.chmod(0o600)
    told = f'port = {port}\nledger_file = "{folder}/gateway.sqlite"\n'
    for name, url in upstreams.items():
        told += f'[[upstream]]\nname = "{name}"\nurl = "{url}"\nmodels = ["{MODEL}"]\nkey_file = "{key}"\n'
        told += f'kind = "splittime"\nfirst_byte_s = {FIRST_BYTE_S}\n'
    for tenant in (OPERATOR, INNOCENT, WIDE, NARROW):
        told += (
            _key(tenant)
            .replace("[[key]]", "[[tenant]]")
            .replace(f'key = "{tenant}"', f'sha256 = "{sha256(tenant.encode()).hexdigest()}"')
        )
    config.write_text(told)
    return Command("gateway", ["gateway", "--config", str(config)], port, "/health", folder / "gateway.txt")


@contextmanager
def stack(folder: Path, servers: int = 1, others: dict[str, str] | None = None) -> Iterator[Stack]:
    """Yield so many servers and a gateway in front of them. others: more upstreams of it, which are not ours."""
    ours = [server_command(f"server{number}", folder) for number in range(servers)]
    gateway = gateway_command(folder, {one.name: one.url for one in ours} | (others or {}))
    with ExitStack() as running:
        for command in (*ours, gateway):
            command.start()
            running.callback(command.stop)
        yield Stack(ours, gateway)


# ---- what the system says of processes


class Use(NamedTuple):
    """rss_bytes: what the processes hold; of memory that forked ones share, each has its part (`Pss_Anon`)."""

    rss_bytes: int
    open_files: int
    threads: int


def used(command: Command) -> dict[str, Use]:
    """Return the use of each kind of process of a command, by the module that it runs."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for pid in _descendants(command.pid):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            module = words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words else "helper"
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
            kib = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
            own_kib = kib["Rss"] - kib["Anonymous"] + kib.get("Pss_Anon", kib["Anonymous"])
            counts = {"rss_bytes": own_kib << 10, "open_files": len(os.listdir(f"/proc/{pid}/fd"))}
            counts["threads"] = len(os.listdir(f"/proc/{pid}/task"))
        except (OSError, ValueError, LookupError):
            continue  # it ended meanwhile
        found[f"{command.name} {module}"].update(counts)
    return {name: Use(**counts) for name, counts in found.items()}


def _descendants(pid: int) -> list[int]:
    found, ahead = list[int](), [pid]
    while ahead:
        found.append(ahead.pop())
        for path in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                ahead += map(int, path.read_text().split())
            except OSError:
                continue
    return found
