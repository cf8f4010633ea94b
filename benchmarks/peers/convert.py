"""The checkpoints of `make_models.py` in the peers' own formats.

    python -m benchmarks.peers.convert FOLDER --model llama-1b

FOLDER is laid out as `contenders.py` says. Makes FOLDER/gguf/MODEL-{bf16,f16,q8_0,q4_0}.gguf with llama.cpp's converter
and quantizer, and FOLDER/ov/MODEL-{fp16,int8,int4} with optimum-intel (int4: symmetric, groups of 64, all layers; as
every 4-bit recipe there it keeps the embedding and the head in 8 bits). What is there already is left alone.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.progress import track

GGUF = ("bf16", "f16", "q8_0", "q4_0")
OPENVINO = {
    "fp16": ["fp16"],
    "int8": ["int8"],
    "int4": ["int4", "--group-size", "64", "--ratio", "1.0", "--sym"],
}
# llama.cpp's converter knows tokenizers by a fingerprint and refuses all others; ours splits text as Llama 3 does.
CONVERTER = """
import runpy, sys
root = sys.argv.pop(1)
sys.path[:0] = [root, root + "/gguf-py"]
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
sys.argv[0] = root + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def to_gguf(folder: Path, model: str, kind: str) -> None:
    target = folder / "gguf" / f"{model}-{kind}.gguf"
    if target.exists():
        return
    target.parent.mkdir(exist_ok=True)
    if kind in ("bf16", "f16"):
        with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
            script.write(CONVERTER)
            script.flush()
            python, source = folder / "venv/convert/bin/python", folder / "models" / model
            _run(python, script.name, folder / "llama.cpp", source, "--outtype", kind, "--outfile", target)
    else:
        source = folder / "gguf" / f"{model}-bf16.gguf"
        _run(folder / "build/llama/bin/llama-quantize", source, target, kind.upper(), os.cpu_count() or 1)


def to_openvino(folder: Path, model: str, kind: str) -> None:
    target = folder / "ov" / f"{model}-{kind}"
    if (target / "openvino_model.bin").exists():
        return
    source = ["-m", folder / "models" / model, "--task", "text-generation-with-past"]
    _run(
        folder / "venv/convert/bin/optimum-cli",
        "export",
        "openvino",
        *source,
        "--weight-format",
        *OPENVINO[kind],
        target,
    )


def _run(*command: object) -> None:
    """Its output is shown only if it fails, and then the last of it."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(str(part) for part in command)}\n{(done.stdout + done.stderr)[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-1b")
    arguments = parser.parse_args()
    work = [(to_gguf, kind) for kind in GGUF] + [(to_openvino, kind) for kind in OPENVINO]
    for convert, kind in track(work, f"converting {arguments.model}"):
        convert(arguments.folder.resolve(), arguments.model, kind)


if __name__ == "__main__":
    main()
