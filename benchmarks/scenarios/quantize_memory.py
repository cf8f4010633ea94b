"""How much memory does `splittime quantize` take, beside what its largest layer needs?

    python -m benchmarks.scenarios.quantize_memory --model MODEL_FOLDER [--schemes w4a16,gptq,awq] [--layers 3] [--json]

The command runs in a process of its own. Its peak resident set is the kernel's (`ru_maxrss`); beside it, as sampled
from `smaps_rollup`, its anonymous memory and what it has mapped of files, which the kernel takes back when others need
it. What a layer needs is worked out from the model's shapes (`layer_need_bytes`); the promise is that and 1 GB.

GPTQ takes minutes a layer here, and one layer is like the next: with --layers the model is cut to its first few, enough
to see whether anything stays behind from one to the next. Embedding and head are the whole model's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.report import RESULTS, file_result
from splittime.lab.quantize import layer_map, treat
from splittime.lab.quantize.forward import IN_MEMORY_BYTES
from splittime.lab.quantize.rounding import DOUBLE_COLUMNS
from splittime.lab.quantize.settings import QuantizeSettings
from splittime.models.config import ModelConfig, load_config

NAME = "quantize_memory"
ALLOWED_BYTES = 1 << 30
SAMPLE_S = 0.1  # looking costs the process time
FLOAT = 4


def layer_need_bytes(
    config: ModelConfig, index: int, settings: QuantizeSettings, tokens: tuple[int, int]
) -> dict[str, int]:
    """What one layer needs in float32, by what for. tokens: (windows, length) of calibration text.

    weights: as they were, as they become, and as integers of a byte; with text those that share an input once more, one
    below the other. hessians: those that are gathered together. work: of the widest weight, [rows, in]: GPTQ's two
    copies of it, the reordered Hessian and three factors of it (of 8 bytes up to `DOUBLE_COLUMNS`); AWQ's weight cut,
    rounded, changed and multiplied, with its Hessian divided. activations: the hidden states, and one window's inputs
    and outputs of every linear.
    """
    shapes = layer_map.linear_shapes(config, index)
    elements = sum(rows * width for rows, width in shapes.values())
    has_text = settings.needs_text
    windows, length = tokens if has_text else (0, 0)
    states = FLOAT * windows * length * config.hidden_size
    return {
        "weights": elements * (2 * FLOAT + 1 + (FLOAT if has_text else 0)),
        "hessians": _hessians(config, index, settings) if has_text else 0,
        "work": max(_work(*shape, settings) for shape in shapes.values()),
        "activations": min(states, IN_MEMORY_BYTES) + FLOAT * length * sum(map(sum, shapes.values())),
    }


def _hessians(config: ModelConfig, index: int, settings: QuantizeSettings) -> int:
    """Of all inputs of a layer, but at most `GRAM_BYTES` together, or the largest."""
    shapes = layer_map.linear_shapes(config, index)
    groups = layer_map.groups(config, index, joint=not treat.is_sequential(settings))
    found = [FLOAT * shapes[group.linears[0]][1] ** 2 for group in groups]
    return max(max(found), min(sum(found), treat.GRAM_BYTES))


def _work(rows: int, width: int, settings: QuantizeSettings) -> int:
    weight, square = FLOAT * rows * width, FLOAT * width**2
    if settings.scheme == "gptq":
        return 2 * weight + square + 3 * square * (2 if width <= DOUBLE_COLUMNS else 1)
    return 4 * weight + square if settings.scheme == "awq" else 2 * weight


def measure(model: Path, settings: QuantizeSettings, text: Path, out: Path) -> dict[str, Any]:
    words = ["--scheme", str(settings.scheme), "--out", str(out)]
    if settings.needs_text:
        words += ["--calibrate", str(text), "--samples", str(settings.samples), "--length", str(settings.length)]
    command = [sys.executable, "-m", "splittime.cli.main", "quantize", str(model), *words]
    begin = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    seen = {"Rss": 0, "Anonymous": 0, "mapped": 0}
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, seen, ended))
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    ended.set()
    watcher.join()
    if status:
        raise SystemExit(f"quantize ended with {os.waitstatus_to_exitcode(status)}")
    return {
        "peak_rss_bytes": usage.ru_maxrss << 10,
        "anonymous_bytes": seen["Anonymous"],
        "mapped_bytes": seen["mapped"],
        "seconds": round(time.monotonic() - begin, 1),
    }


def _watch(process_id: int, seen: dict[str, int], ended: threading.Event) -> None:
    """The most of each, until the process has ended."""
    path = Path(f"/proc/{process_id}/smaps_rollup")
    while not ended.wait(SAMPLE_S):
        try:
            now = _rollup(path.read_text())
        except OSError:
            return
        now["mapped"] = now["Rss"] - now["Anonymous"]
        for key in seen:
            seen[key] = max(seen[key], now[key])


def _rollup(text: str) -> dict[str, int]:
    fields = (line.split() for line in text.splitlines()[1:])
    return {"Rss": 0, "Anonymous": 0} | {words[0].rstrip(":"): int(words[1]) << 10 for words in fields}


def row(model: Path, scheme: str, samples: int, length: int, text: Path) -> dict[str, Any]:
    settings = QuantizeSettings(scheme=scheme, samples=samples, length=length).resolved()
    config = load_config(model)
    needs = [layer_need_bytes(config, index, settings, (samples, length)) for index in range(config.num_layers)]
    need = max(needs, key=lambda each: sum(each.values()))
    with tempfile.TemporaryDirectory() as place:
        found = measure(model, settings, text, Path(place) / "out")
    beyond = found["anonymous_bytes"] - sum(need.values())
    return {
        "model": model.name,
        "layers": config.num_layers,
        "scheme": scheme,
        "windows": [samples, length] if settings.needs_text else None,
        "need_bytes": need,
        "need_total_bytes": sum(need.values()),
        **found,
        "beyond_need_bytes": beyond,
        "is_within": beyond <= ALLOWED_BYTES,
    }


def first_layers(model: Path, count: int, folder: Path) -> Path:
    """A folder with a model of these layers alone."""
    folder.mkdir()
    for path in model.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    values = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": count}
    if values.get("layer_types"):
        values["layer_types"] = values["layer_types"][:count]
    (folder / "config.json").write_text(json.dumps(values))
    with safe_open(model / "model.safetensors", framework="pt") as file:
        kept = [name for name in file.keys() if not name.startswith("model.layers.") or int(name.split(".")[2]) < count]  # noqa: SIM118
        save_file({name: file.get_tensor(name) for name in kept}, folder / "model.safetensors")
    return folder


def calibration_text(path: Path) -> Path:
    """Sources of this Python's library, enough for the windows."""
    root = Path(os.__file__).parent
    path.write_text("\n".join(file.read_text(encoding="utf-8") for file in sorted(root.glob("*.py"))[:80]))
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--schemes", default="w4a16,gptq,awq")
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, help="cut the model to its first layers")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        text, model = calibration_text(Path(place) / "text.txt"), options.model
        if options.layers is not None:
            model = first_layers(model, options.layers, Path(place) / model.name)
        for scheme in options.schemes.split(","):
            rows.append(row(model, scheme, options.samples, options.length, text))
            print(_told(rows[-1]), flush=True)
            _file(rows, vars(options))


def _file(rows: list[dict[str, Any]], options: dict[str, Any]) -> None:
    """Beside the rows of other models and schemes that were filed before."""
    path = RESULTS / f"{NAME}.json"
    kept = json.loads(path.read_text())["figures"]["rows"] if path.exists() else []
    mine = {(row["model"], row["scheme"]) for row in rows}
    kept = [row for row in kept if (row["model"], row["scheme"]) not in mine]
    file_result(NAME, {"rows": kept + rows}, options, options["json"])


def _told(found: dict[str, Any]) -> str:
    told = {name.removesuffix("_bytes"): f"{found[name] / 1e6:,.0f} MB" for name in found if _is_size(found, name)}
    said = "within" if found["is_within"] else "BEYOND"
    return f"{found['scheme']:6} {said} {told} {found['seconds']} s"


def _is_size(found: dict[str, Any], name: str) -> bool:
    return name.endswith("_bytes") and isinstance(found[name], int)


if __name__ == "__main__":
    main()
