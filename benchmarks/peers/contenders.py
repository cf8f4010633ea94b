"""Who races in each precision class, and a contender as the harness sees it: a process that answers lines.

A peers' folder, made once outside the project by `setup_peers.sh`, `make_models.py` and `convert.py`:

    FOLDER/models/MODEL            checkpoint, from make_models.py
    FOLDER/gguf/MODEL-KIND.gguf, FOLDER/ov/MODEL-KIND, FOLDER/vllm/MODEL-KIND    from convert.py
    FOLDER/llama.cpp               sources;  FOLDER/build/llama/bin  its libraries and llama-server
    FOLDER/venv/ov, FOLDER/venv/vllm, FOLDER/venv/convert

Who is not there, does not come up, fails the trial or dies or hangs later is left out from then on, and the result says
why. Whoever dies in the trial and has another way to run (`Entry.otherwise`) is started that way instead, and the
result says that too.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import cpu_flags

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OURS = "splittime"
OF_FILE = ("q8_0", "q6_k", "q4_k_m", "q4_0")  # classes in which we read llama.cpp's file
CXX_OPTIONS = ("-O2", "-std=c++17")
START_S, CELL_S = 600.0, 300.0  # how long a start and a cell may take before whoever takes it is taken for hung
# By class: our settings for the runner, the kinds of GGUF file, the kinds of OpenVINO folder, vLLM's kinds (`VLLM`).
# Each of vLLM's kinds in 4 bits is ahead somewhere: w4a8 in decoding, w4a16 in prefill. llama.cpp's Q4_0 is coarser
# than our int4, its Q4_K_M about as exact. Last, classes in which both read the same file, so that quality is equal.
CLASSES: dict[str, dict[str, Any]] = {
    "float32": {"ours": {"dtype": "float32"}, "gguf": (), "ov": (), "vllm": ("float32",)},
    "bf16": {"ours": {"dtype": "bfloat16"}, "gguf": ("bf16", "f16"), "ov": ("fp16",), "vllm": ("bfloat16",)},
    "int8": {"ours": {"quantization": "int8"}, "gguf": ("q8_0",), "ov": ("int8",), "vllm": ("w8a8",)},
    "int4": {"ours": {"quantization": "int4"}, "gguf": ("q4_0", "q4_k_m"), "ov": ("int4",), "vllm": ("w4a8", "w4a16")},
    **{kind: {"ours": {}, "gguf": (kind,), "ov": (), "vllm": ()} for kind in OF_FILE},
}
# By kind: which of compressed.KINDS, if it is not the checkpoint as it is; which instructions it needs, one of these at
# least; the environment of the process.
VLLM: dict[str, tuple[str | None, tuple[str, ...] | None, dict[str, str]]] = {
    "float32": (None, None, {}),
    "bfloat16": (None, ("avx512_bf16", "amx_bf16"), {}),
    "w8a8": ("w8a8", None, {}),
    "w4a8": ("w4", ("amx_int8",), {"VLLM_CPU_INT4_W4A8": "1"}),
    "w4a16": ("w4", None, {"VLLM_CPU_INT4_W4A8": "0"}),
}
TRIAL = (
    {"cell": "decode", "batch": 2, "prompt_tokens": 16, "new_tokens": 8},
    {"cell": "prefill", "tokens": 64},
)


@dataclass
class Entry:
    """An engine before it is started. needs: the files without which it cannot be. why_not: another reason that keeps
    it out. otherwise: what else to try where `command` does not survive the trial, and that in words."""

    name: str
    command: list[str]
    needs: list[Path]
    why_not: str | None = None
    otherwise: tuple[str, list[str]] | None = None

    @property
    def absent(self) -> str | None:
        """Why it cannot be started."""
        missing = ", ".join(path.name for path in self.needs if not path.exists())
        return self.why_not or (f"no {missing}" if missing else None)

    @property
    def ways(self) -> list[tuple[str, list[str]]]:
        """What to try, in order: each command, and that in words."""
        return [("as it is by default", self.command), *([self.otherwise] if self.otherwise is not None else [])]


def entries(folder: Path, model: str, precision: str, threads: int, settings: dict[str, Any]) -> list[Entry]:
    """Ours first. `settings` go into our runner's over the class's own."""
    chosen = CLASSES[precision]
    checkpoint = our_model(folder, model, precision)
    ours = {"num_threads": threads, **chosen["ours"], **settings}
    module = [sys.executable, "-m", "benchmarks.peers.contender_splittime"]
    needed = checkpoint if precision in OF_FILE else checkpoint / "config.json"
    found = [Entry(OURS, [*module, str(checkpoint), json.dumps(ours)], [needed])]
    trouble = build_llama(folder) if chosen["gguf"] else None
    found += [_llama(folder, f"{model}-{kind}.gguf", kind, threads, trouble) for kind in chosen["gguf"]]
    found += [_openvino(folder, folder / "ov" / f"{model}-{kind}", kind, threads) for kind in chosen["ov"]]
    found += [_vllm(folder, model, kind, threads) for kind in chosen["vllm"]]
    return found


def our_model(folder: Path, model: str, precision: str) -> Path:
    """The checkpoint that we read in this class."""
    return folder / "gguf" / f"{model}-{precision}.gguf" if precision in OF_FILE else folder / "models" / model


def _llama(folder: Path, file_name: str, kind: str, threads: int, trouble: str | None) -> Entry:
    """With AMX, llama.cpp repacks weights for it by default, and may then die: of an instruction that a virtual machine
    advertises and refuses, or built by gcc 12 without the line that `setup_peers.sh` adds."""
    libraries, file = folder / "build" / "llama" / "bin", folder / "gguf" / file_name
    command = [str(libraries / "contender_llama"), str(file), str(threads)]
    otherwise = ("without repacked weights", [*command, "0"])
    return Entry(f"llama.cpp {kind}", [*command, "1"], [libraries, file], trouble, otherwise)


def _openvino(folder: Path, model: Path, kind: str, threads: int) -> Entry:
    python = folder / "venv" / "ov" / "bin" / "python"
    command = [str(python), "-m", "benchmarks.peers.contender_openvino", str(model), str(threads)]
    return Entry(f"openvino {kind}", command, [python, model / "config.json"])


def _vllm(folder: Path, model: str, kind: str, threads: int) -> Entry:
    python, found = folder / "venv" / "vllm" / "bin" / "python", vllm_model(folder, model, kind)
    settings = json.dumps({"dtype": found.dtype, **found.environment})
    command = [str(python), "-m", "benchmarks.peers.contender_vllm", str(found.checkpoint), str(threads), settings]
    return Entry(f"vllm {kind}", command, [python, found.checkpoint / "config.json"], found.why_not)


@dataclass(frozen=True)
class VllmModel:
    """What vLLM is started with. why_not: a reason not to."""

    checkpoint: Path
    dtype: str
    environment: dict[str, str]
    why_not: str | None


def vllm_model(folder: Path, model: str, kind: str) -> VllmModel:
    """vLLM's bfloat16, where the processor has no instructions for it, ran at 5 tokens/s whatever the batch."""
    flags = cpu_flags()
    has_bf16 = not flags.isdisjoint({"avx512_bf16", "amx_bf16"})
    checkpoint, needed, environment = VLLM[kind]
    missing = None if needed is None or not flags.isdisjoint(needed) else f"this processor has none of {needed}"
    dtype = kind if kind in ("float32", "bfloat16") else "bfloat16" if has_bf16 else "float32"
    place = folder / "models" / model if checkpoint is None else folder / "vllm" / f"{model}-{checkpoint}"
    return VllmModel(place, dtype, environment, missing)


def build_llama(folder: Path) -> str | None:
    """Compile our driver of libllama against the build, if that is there and newer; returns what went wrong."""
    sources, libraries = folder / "llama.cpp", folder / "build" / "llama" / "bin"
    source, target = HERE / "contender_llama.cpp", libraries / "contender_llama"
    if not libraries.exists() or (target.exists() and target.stat().st_mtime > source.stat().st_mtime):
        return None
    includes = [f"-I{sources / part}" for part in ("include", "ggml/include", "vendor")]
    links = [f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    command = ["g++", *CXX_OPTIONS, str(source), *includes, *links, "-o", str(target)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"contender_llama.cpp was not compiled: {error}"
    if done.returncode == 0:
        return None
    return without_folders(f"contender_llama.cpp does not compile against this build: {done.stderr[-600:].strip()}")


class Ended(RuntimeError):
    """The contender's process has ended, or answers no more; says how."""


def how_it_ended(status: int | None) -> str:
    """status: as subprocess tells it; None while the process runs."""
    if status is None:
        return "closed its output"
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


class Contender:
    """A started contender. It is asleep between `ask`s."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
            )
        self._log = log

    def read(self, limit_s: float) -> dict[str, Any]:
        """The next line. Raises Ended with the end of its log if it ended instead, or took longer than this."""
        assert self._process.stdout is not None
        is_there, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if is_there else ""
        if line:
            return json.loads(line)
        how = self._how_it_ended() if is_there else f"no answer in {limit_s:.0f} s"
        raise Ended(f"{how}. {self._log.read_text(errors='replace')[-1500:].strip()}".strip(". "))

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        return how_it_ended(self._process.returncode)

    def ask(self, cell: dict[str, Any], limit_s: float = CELL_S) -> dict[str, Any]:
        """Its answer, which may be {"error": ...}. Raises Ended."""
        assert self._process.stdin is not None
        with suppress(OSError):  # a broken pipe: `read` finds out how it ended
            self._process.stdin.write(json.dumps(cell) + "\n")
            self._process.stdin.flush()
        return self.read(limit_s)

    def resident_gb(self) -> float:
        """Memory of its own process and the file pages it maps, as the kernel counts them now."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e9

    def stop(self, patience_s: float = 10.0) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def without_folders(value: Any) -> Any:
    """Paths in texts cut to their last part: results are published, where things lay on this machine is not."""
    if isinstance(value, dict):
        return {key: without_folders(inner) for key, inner in value.items()}
    return re.sub(r"(?<![\w:])(?:/[^\s/'\"]+)+/", "", value) if isinstance(value, str) else value


@contextmanager
def started(found: list[Entry], logs: Path) -> Iterator[tuple[dict[str, Contender], dict[str, Any]]]:
    """Yields the contenders that came up, and about each entry what it said of itself, or why it did not come up.

    They load one after another, so that none pages another out while it converts its weights.
    """
    racing: dict[str, Contender] = {}
    about: dict[str, Any] = {}
    with ExitStack() as stack:
        for entry in found:
            contender, about[entry.name] = brought_up(entry, logs)
            if contender is not None:
                stack.callback(contender.stop)
                racing[entry.name] = contender
        yield racing, about


def brought_up(entry: Entry, logs: Path) -> tuple[Contender | None, dict[str, Any]]:
    """Start a contender and try it, if need be the other way. None, and why, if it survives neither."""
    if entry.absent is not None:
        return None, {"absent": entry.absent}
    begin = time.monotonic()
    troubles: dict[str, str] = {}
    for words, command in entry.ways:
        contender = Contender(entry.name, command, logs / f"{entry.name.replace(' ', '-')}.log")
        try:
            said = _tried(contender)
        except Ended as ended:
            contender.stop()
            troubles[words] = without_folders(str(ended))
            continue
        fell_back = {"runs": words, "because": troubles} if troubles else {}
        start_s = time.monotonic() - begin
        return contender, {**said, "start_s": start_s, "resident_gb": contender.resident_gb(), **fell_back}
    return None, {"absent": "; ".join(f"{way}: {why}" for way, why in troubles.items())}


def _tried(contender: Contender) -> dict[str, Any]:
    """What it says of itself, once it has answered each cell of the trial. Raises Ended."""
    ready = contender.read(START_S)
    for cell in TRIAL:
        answer = contender.ask(dict(cell))
        if "error" in answer:
            raise Ended(f"failed the trial: {answer['error']}")
    return {"load_s": ready["load_s"], **without_folders(ready["about"])}
