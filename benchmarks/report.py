"""What every benchmark result is filed with: the commit, the machine and its state, and the figures. One JSON a run.

The folder is `benchmarks/results`, or the one that BENCHMARK_RESULTS names: a trial overwrites no result."""

import json
import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = frozenset(
    {"avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}
)
BEST_LAST = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile")  # of which the best names a processor's kind
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).with_name("results"))


def conditions() -> dict[str, Any]:
    """Commit, hardware and load. `load_1min` well above 0 before a run means that the figures are not to be trusted."""
    return {
        "commit": _run("git", "rev-parse", "--short", "HEAD"),
        "is_dirty": bool(_run("git", "status", "--porcelain", "--untracked-files=no", "..", ":!results")),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "flags": sorted(cpu_flags() & FLAGS),
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
        "timer_noise_us": timer_noise_us(),
    }


def processor(found: dict[str, Any]) -> str:
    """A name for files of the kind of processor that these conditions tell of: maker, family, model, and its best
    instructions, since virtual machines of one model may show more or fewer."""
    words = re.sub(r"\((r|tm)\)|\bprocessor\b|\bcpu\b|@.*hz", " ", found["cpu"].lower())
    best = [flag for flag in BEST_LAST if flag in found["flags"]]
    return re.sub(r"[^a-z0-9]+", "-", " ".join([words, *best[-1:]])).strip("-")


def timer_noise_us(duration_s: float = 0.5) -> dict[str, float]:
    """How long the machine takes a busy thread away: gaps of a spinning loop (p99.9 and longest), in microseconds."""
    gaps = []
    last_ns = begin_ns = time.monotonic_ns()
    while last_ns - begin_ns < duration_s * 1e9:
        now_ns = time.monotonic_ns()
        gaps.append(now_ns - last_ns)
        last_ns = now_ns
    gaps.sort()
    return {"p99.9": gaps[int(0.999 * len(gaps))] / 1e3, "max": gaps[-1] / 1e3}


def file_result(name: str, figures: dict[str, Any], settings: dict[str, Any], as_json: bool) -> Path:
    """Write the result beside the others; print it as JSON if asked."""
    shown = {key: _without_folders(value) for key, value in settings.items()}
    result = {"benchmark": name, "conditions": conditions(), "settings": shown, "figures": figures}
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    if as_json:
        print(json.dumps(result, default=str))
    return path


def _without_folders(value: Any) -> Any:
    """A path as its last part: where it lay on this machine is nobody's business."""
    is_path = isinstance(value, Path) or (isinstance(value, str) and "/" in value)
    return Path(value).name if is_path else value


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip()


def _cpu_info(key: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(key):
            return line.split(":", 1)[1].strip()
    return ""


def _cpu_model() -> str:
    return f"{_cpu_info('model name')} (family {_cpu_info('cpu family')}, model {_cpu_info('model')})"


def cpu_flags() -> set[str]:
    return set(_cpu_info("flags").split())
