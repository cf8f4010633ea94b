"""Who races in each precision class, and a contender as the harness sees it: a process that answers lines.

A peers' folder, made once outside the project by `setup_peers.sh`, `make_models.py` and `convert.py`:

    FOLDER/models/MODEL            checkpoint, from make_models.py
    FOLDER/gguf/MODEL-KIND.gguf    from convert.py
    FOLDER/ov/MODEL-KIND           from convert.py
    FOLDER/llama.cpp               sources;  FOLDER/build/llama/bin  its libraries and llama-server
    FOLDER/venv/ov, FOLDER/venv/vllm, FOLDER/venv/convert

Who is not there is left out, and the result says so.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OURS = "splittime"
CXX_OPTIONS = ("-O2", "-std=c++17")
# Of each class: our settings for the runner; the kinds of GGUF file; the kind of OpenVINO folder; vLLM's dtypes. vLLM
# has no 8-bit or 4-bit weights of its own for a CPU; its bfloat16, where the CPU has no instructions for that, ran at
# 5 tokens/s whatever the batch. Add "bfloat16" where the CPU has them.
CLASSES: dict[str, dict[str, Any]] = {
    "float32": {"ours": {"dtype": "float32"}, "gguf": (), "ov": (), "vllm": ("float32",)},
    "bf16": {"ours": {"dtype": "bfloat16"}, "gguf": ("bf16", "f16"), "ov": ("fp16",), "vllm": ()},
    "int8": {"ours": {"quantization": "int8"}, "gguf": ("q8_0",), "ov": ("int8",), "vllm": ()},
    "int4": {"ours": {"quantization": "int4"}, "gguf": ("q4_0",), "ov": ("int4",), "vllm": ()},
}


@dataclass
class Entry:
    """A contender before it is started; `needs` are the files without which it cannot be."""

    name: str
    command: list[str]
    needs: list[Path]

    @property
    def missing(self) -> list[str]:
        return [path.name for path in self.needs if not path.exists()]


def entries(folder: Path, model: str, precision: str, threads: int, settings: dict[str, Any]) -> list[Entry]:
    """Ours first. `settings` go into our runner's over the class's own."""
    chosen = CLASSES[precision]
    checkpoint = folder / "models" / model
    ours = {"num_threads": threads, **chosen["ours"], **settings}
    module = [sys.executable, "-m", "benchmarks.peers.contender_splittime"]
    found = [Entry(OURS, [*module, str(checkpoint), json.dumps(ours)], [checkpoint / "config.json"])]
    found += [_llama(folder, folder / "gguf" / f"{model}-{kind}.gguf", kind, threads) for kind in chosen["gguf"]]
    found += [_in_venv(folder, "ov", folder / "ov" / f"{model}-{kind}", kind, threads) for kind in chosen["ov"]]
    found += [_in_venv(folder, "vllm", checkpoint, dtype, threads) for dtype in chosen["vllm"]]
    return found


def _llama(folder: Path, file: Path, kind: str, threads: int) -> Entry:
    libraries = folder / "build" / "llama" / "bin"
    return Entry(f"llama.cpp {kind}", [str(libraries / "contender_llama"), str(file), str(threads)], [libraries, file])


def _in_venv(folder: Path, venv: str, model: Path, kind: str, threads: int) -> Entry:
    python = folder / "venv" / venv / "bin" / "python"
    module, name = {"ov": ("openvino", "openvino"), "vllm": ("vllm", "vllm")}[venv]
    command = [str(python), "-m", f"benchmarks.peers.contender_{module}", str(model), str(threads)]
    return Entry(f"{name} {kind}", command + ([kind] if venv == "vllm" else []), [python, model / "config.json"])


def build_llama(folder: Path) -> None:
    """Compile our driver of libllama against the build, if that is there and newer. Raises CalledProcessError."""
    sources, libraries = folder / "llama.cpp", folder / "build" / "llama" / "bin"
    source, target = HERE / "contender_llama.cpp", libraries / "contender_llama"
    if not libraries.exists() or (target.exists() and target.stat().st_mtime > source.stat().st_mtime):
        return
    includes = [f"-I{sources / part}" for part in ("include", "ggml/include", "vendor")]
    links = [f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"]
    subprocess.run(["g++", *CXX_OPTIONS, str(source), *includes, *links, "-o", str(target)], check=True)


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

    def read(self) -> dict[str, Any]:
        """The next line. Raises RuntimeError with the end of its log if it ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: {self._log.read_text(errors='replace')[-1500:].strip()}")
        return json.loads(line)

    def ask(self, cell: dict[str, Any]) -> dict[str, Any]:
        """Its answer, which is {"error": ...} too if the contender is no more."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(cell) + "\n")
            self._process.stdin.flush()
            return self.read()
        except (OSError, RuntimeError) as error:
            return {"error": str(error)}

    def resident_gb(self) -> float:
        """Memory of its own process and the file pages it maps, as the kernel counts them now."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e9

    def stop(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
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
    """Those that came up, and about each entry what it said of itself, or why it is not among them.

    They load one after another, so that none pages another out while it converts its weights.
    """
    racing: dict[str, Contender] = {}
    about: dict[str, Any] = {}
    with ExitStack() as stack:
        for entry in found:
            if entry.missing:
                about[entry.name] = {"absent": f"no {', '.join(entry.missing)}"}
                continue
            contender = Contender(entry.name, entry.command, logs / f"{entry.name.replace(' ', '-')}.log")
            stack.callback(contender.stop)
            try:
                ready = contender.read()
            except RuntimeError as error:
                about[entry.name] = {"absent": without_folders(str(error))}
                continue
            said = without_folders(ready["about"])
            about[entry.name] = {"load_s": ready["load_s"], **said, "resident_gb": contender.resident_gb()}
            racing[entry.name] = contender
        yield racing, about
