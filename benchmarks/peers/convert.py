"""The checkpoints of `make_models.py` in the peers' own formats.

    python -m benchmarks.peers.convert FOLDER --model llama-1b

FOLDER is laid out as `contenders.py` says. Makes FOLDER/gguf/MODEL-{bf16,f16,q8_0,q6_k,q4_k_m,q4_0}.gguf with
llama.cpp's converter and quantizer, FOLDER/ov/MODEL-{fp16,int8,int4} with optimum-intel (int4: symmetric, groups of 64,
all layers; as every 4-bit recipe there it keeps the embedding and the head in 8 bits), and
FOLDER/vllm/MODEL-{w8a8,w4} by `compressed.py`. What is there already is left alone. What fails is told, and costs
nobody else his file.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.progress import track

from benchmarks.peers import compressed

GGUF = ("bf16", "f16", "q8_0", "q6_k", "q4_k_m", "q4_0")
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


def to_vllm(folder: Path, model: str, kind: str) -> None:
    target = folder / "vllm" / f"{model}-{kind}"
    if not (target / "config.json").exists():
        compressed.write(folder / "models" / model, target, kind)


def _run(*command: object) -> None:
    """Its output is shown only if it fails, and then the last of it. Raises RuntimeError."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    words = [str(part) for part in command]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(words)}\n{(done.stdout + done.stderr)[-3000:]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="llama-1b")
    arguments = parser.parse_args()
    work = [(to_gguf, kind) for kind in GGUF] + [(to_openvino, kind) for kind in OPENVINO]
    work += [(to_vllm, kind) for kind in compressed.KINDS]
    for convert, kind in track(work, f"converting {arguments.model}"):
        try:
            convert(arguments.folder.resolve(), arguments.model, kind)
        except (OSError, RuntimeError) as error:
            print(f"no {kind} ({convert.__name__}): {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
