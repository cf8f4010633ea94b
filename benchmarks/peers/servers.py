"""The engines as HTTP servers on loopback, with prefix caches off and the same number of threads."""

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import CLASSES, OURS, ROOT, Entry, how_it_ended, our_model, vllm_model
from benchmarks.server_process import free_port
from splittime.runner.config import NONE

CONTEXT_TOKENS = 512  # of one request: the longest prompt and output that http_load draws, and room
MAX_STREAMS = 64


@dataclass
class ServerEntry(Entry):
    """body: what a request needs beyond prompt, max_tokens and stream; each server refuses the others' fields. The
    server's port is the last word of what is started, behind `port_flags`."""

    body: dict[str, Any] = field(default_factory=dict)
    ready_path: str = "/health"
    environment: dict[str, str] = field(default_factory=dict)
    port_flags: tuple[str, ...] = ("--port",)
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


GREEDY = {"temperature": 0, "ignore_eos": True}


def server_entries(
    folder: Path, model: str, precision: str, threads: int, settings: dict[str, Any]
) -> list[ServerEntry]:
    """Ours, llama-server with the class's first kind of GGUF, OpenVINO behind a small server, vLLM's kinds."""
    chosen = CLASSES[precision]
    checkpoint = our_model(folder, model, precision)
    found = [_ours(checkpoint, {"num_threads": threads, **chosen["ours"], **settings})]
    found += [_llama(folder, folder / "gguf" / f"{model}-{kind}.gguf", kind, threads) for kind in chosen["gguf"][:1]]
    found += [_openvino(folder, folder / "ov" / f"{model}-{kind}", kind, threads) for kind in chosen["ov"]]
    found += [_vllm(folder, model, kind) for kind in chosen["vllm"]]
    return found


def _ours(checkpoint: Path, settings: dict[str, Any]) -> ServerEntry:
    limits = {"max_model_len": CONTEXT_TOKENS, "max_num_seqs": MAX_STREAMS, "kv_cache_memory_bytes": "1GiB"}
    limits["speculative_config"] = NONE  # random weights repeat themselves, and the others guess nothing
    flags = [
        part for key, value in {**limits, **settings}.items() for part in (f"--{key.replace('_', '-')}", str(value))
    ]
    command = [
        sys.executable,
        "-m",
        "splittime.cli.main",
        "serve",
        str(checkpoint),
        "--no-enable-prefix-caching",
        *flags,
    ]
    return ServerEntry(OURS, command, [checkpoint / "config.json"], body=GREEDY, ready_path="/ready")


def _llama(folder: Path, file: Path, kind: str, threads: int) -> ServerEntry:
    program = folder / "build" / "llama" / "bin" / "llama-server"
    slots = ["-np", "32", "-c", str(32 * CONTEXT_TOKENS), "--cache-ram", "0"]
    command = [str(program), "-m", str(file), "-t", str(threads), "-tb", str(threads), *slots, "--host", "127.0.0.1"]
    entry = ServerEntry(f"llama.cpp {kind}", command, [program, file], body={**GREEDY, "cache_prompt": False})
    entry.otherwise = ("without repacked weights", [*command, "--no-repack"])
    return entry


def _openvino(folder: Path, model: Path, kind: str, threads: int) -> ServerEntry:
    python = folder / "venv" / "ov" / "bin" / "python"
    command = [str(python), "-m", "benchmarks.peers.openvino_server", str(model), str(threads)]
    return ServerEntry(f"openvino {kind}", command, [python, model / "config.json"], port_flags=())


def _vllm(folder: Path, model: str, kind: str) -> ServerEntry:
    python, found = folder / "venv" / "vllm" / "bin" / "python", vllm_model(folder, model, kind)
    limits = ["--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(MAX_STREAMS)]
    options = ["--dtype", found.dtype, "--enforce-eager", "--no-enable-prefix-caching", "--host", "127.0.0.1"]
    body = {**GREEDY, "model": str(found.checkpoint)}
    module = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(found.checkpoint)]
    needs = [python, found.checkpoint / "config.json"]
    entry = ServerEntry(f"vllm {kind}", [*module, *limits, *options], needs, body=body, environment=found.environment)
    entry.why_not = found.why_not
    return entry


@contextmanager
def serving(entry: ServerEntry, threads: int, log: Path, timeout_s: float = 300) -> Iterator[float]:
    """Yields the seconds from the process's start until it was ready. Raises RuntimeError with the end of its log."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "HF_HUB_OFFLINE": "1",
        **entry.environment,
    }
    command = [*entry.command, *entry.port_flags, str(entry.port)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        yield _until_ready(entry, process, log, timeout_s)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_ready(entry: ServerEntry, process: subprocess.Popen, log: Path, timeout_s: float) -> float:
    begin = time.monotonic()
    while time.monotonic() - begin < timeout_s:
        if process.poll() is not None:
            words = log.read_text(errors="replace")[-1500:].strip()
            raise RuntimeError(f"{entry.name} {how_it_ended(process.returncode)}: {words}")
        try:
            with urllib.request.urlopen(entry.url + entry.ready_path, timeout=1):
                return time.monotonic() - begin
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"{entry.name} was not ready after {timeout_s} s")
