"""Does the quality gate tell good from broken? Forms of the packaged model that are sound, and some that are spoilt.

    python -m benchmarks.scenarios.quality_gate [--tokens 12500] [--only CASE ...] [--json]

Each case says which verdict it must get, and whether a KL beyond the usual must be noted; the exit code is 1 if one got
another. Sound: the base itself, its weights in 8 and 4 bits, its cache in 8, a 4-bit checkpoint with zero points, one
of int8. Spoilt, in the checkpoint's own tensors or in the cache: the scales of one output eight times too large, those
of one 8-bit weight 1.2 times, two groups' zero points swapped, a cache whose scales are not read. And two runs that can
say nothing: a text too short, and one that the quantised cache is never read back for.

The 4-bit checkpoint is rounded to nearest between each group's least and greatest weight, in AutoAWQ's "gemm" layout.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.report import file_result
from splittime.lab.quality.documents import Document, python_documents
from splittime.lab.quality.local import LocalModel, rounded_base
from splittime.lab.quality.margins import standard
from splittime.lab.quality.report import Report
from splittime.lab.quality.run import Gate, Tasks
from splittime.lab.quantize.job import quantize
from splittime.lab.quantize.settings import QuantizeSettings
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.text.tokenizer import Tokenizer

PACKAGED = Path(__file__).parents[2] / "src" / "splittime" / "packaged" / "code"
GROUP = 64
PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # the outputs of a word, from its lowest four bits up
SPOILT = "model.layers.2.self_attn.o_proj"
Tensors = dict[str, Tensor]


# ---- a 4-bit checkpoint with zero points


def write_four_bits(folder: Path, spoil: Callable[[Tensors], None] = lambda tensors: None) -> Path:
    """The packaged model with its layers' weights in 4 bits; `spoil` may change the tensors before they are written."""
    shutil.copytree(PACKAGED, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors: Tensors = {}
    for name, weight in load_file(PACKAGED / "model.safetensors").items():
        tensors |= four_bits(name, weight.float()) if "proj.weight" in name else {name: weight}
    spoil(tensors)
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    return folder


def four_bits(name: str, weight: Tensor) -> Tensors:
    """weight [out, in] -> its words, zero points and scales. w = scale (q - zero), q and zero 0 to 15."""
    groups = weight.unflatten(1, (-1, GROUP))  # [out, groups, GROUP]
    least, most = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((most - least) / 15).clamp(min=1e-6).half().float()
    zeros = (-least / scales).round().clamp(0, 15)
    integers = ((groups / scales[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15)
    module = name.removesuffix(".weight")
    return {
        f"{module}.qweight": packed(integers.flatten(1).T),
        f"{module}.qzeros": packed(zeros.T),
        f"{module}.scales": scales.T.half().contiguous(),
    }


def write_eight_bits(folder: Path, spoil: Callable[[Tensors], None] = lambda tensors: None) -> Path:
    """The packaged model as `splittime quantize --scheme int8` makes it."""
    quantize(PACKAGED, folder / "int8", QuantizeSettings(scheme="int8"), None)
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "int8" / "model.safetensors").items()}
    spoil(tensors)
    save_file(tensors, folder / "int8" / "model.safetensors")
    return folder / "int8"


def packed(values: Tensor) -> Tensor:
    """[n, out] of 0 to 15 -> int32 [n, out / 8]."""
    words = values.long().unflatten(1, (-1, 8))
    sums = sum(words[:, :, place] << 4 * shift for shift, place in enumerate(PLACES))
    assert isinstance(sums, Tensor)
    return torch.where(sums >= 1 << 31, sums - (1 << 32), sums).int().contiguous()


def break_scale(tensors: Tensors) -> None:
    """Of one output among 256, all groups."""
    tensors[f"{SPOILT}.scales"][:, 108] *= 8


def enlarge_scales(layer: int) -> Callable[[Tensors], None]:
    """Of one 8-bit weight, all of them."""

    def spoil(tensors: Tensors) -> None:
        tensors[f"model.layers.{layer}.mlp.down_proj.weight_scale"] *= 1.2

    return spoil


def swap_zero_points(tensors: Tensors) -> None:
    """Of one weight, each group's with its neighbour's."""
    zeros = tensors[f"{SPOILT}.qzeros"]
    tensors[f"{SPOILT}.qzeros"] = zeros.unflatten(0, (-1, 2)).flip(1).flatten(0, 1).contiguous()


def lose_scales(model: LocalModel) -> None:
    """Each step finds one scale for all that is in the cache, as if none had been kept."""
    run = model.runner.run

    @torch.inference_mode()
    def unscaled(plan: Any) -> Any:
        for layer in model.runner.store.layers:
            assert layer.scales is not None
            layer.scales[layer.scales != 0] = 1 / 127
        return run(plan)

    model.runner.run = unscaled  # type: ignore[method-assign]


# ---- the cases


@dataclass(frozen=True)
class Case:
    """settings: the candidate's, of `RunnerConfig`. write: makes its checkpoint, of which `spoil` changes the tensors.
    is_noted: that its KL is beyond the usual. tasks: instead of the usual ones."""

    name: str
    wanted: str
    settings: dict[str, Any] = field(default_factory=dict)
    write: Callable[[Path, Callable[[Tensors], None]], Path] | None = None
    spoil: Callable[[Tensors], None] = lambda tensors: None
    damage: Callable[[LocalModel], None] = lambda model: None
    is_noted: bool = False
    tasks: Tasks | None = None


SENTENCE = "def add(first, second):\n    return first + second\n\n\nclass Empty:\n    pass\n\n\n"
HALVES = [Document("first half", SENTENCE * 4), Document("second half", SENTENCE * 4 + "x = 1\n")]
CASES = (
    Case("base against itself", "PASS"),
    Case("int8 weights", "PASS", {"quantization": "int8"}),
    Case("int4 weights", "PASS", {"quantization": "int4"}),
    Case("int8 cache", "PASS", {"kv_cache_dtype": "int8"}),
    Case("4-bit checkpoint", "PASS", write=write_four_bits),
    Case("4-bit checkpoint, a scale x 8", "FAIL", write=write_four_bits, spoil=break_scale, is_noted=True),
    Case("4-bit checkpoint, zero points swapped", "FAIL", write=write_four_bits, spoil=swap_zero_points, is_noted=True),
    Case("int8 checkpoint", "PASS", write=write_eight_bits),
    *(
        Case(
            f"int8 checkpoint, down_proj {n} x 1.2",
            wanted,
            write=write_eight_bits,
            spoil=enlarge_scales(n),
            is_noted=True,
        )
        for n, wanted in enumerate(("FAIL", "PASS", "PASS", "FAIL"))
    ),
    Case("int8 cache, scales not read", "FAIL", {"kv_cache_dtype": "int8"}, damage=lose_scales, is_noted=True),
    Case("int8 cache, texts of one chunk", "FAIL", {"kv_cache_dtype": "int8"}, tasks=Tasks(lengths=(48,))),
    Case("two halves of a short text", "INCONCLUSIVE", {"quantization": "int4"}, tasks=Tasks(documents=HALVES)),
)


def config_of(folder: Path, **settings: Any) -> RunnerConfig:
    return RunnerConfig(model_path=str(folder), max_num_seqs=8, packed_cache="off", **settings)


def load(name: str, folder: Path, **settings: Any) -> LocalModel:
    return LocalModel(name, load_torch_runner(config_of(folder, **settings)), Tokenizer.load(folder))


def judge(case: Case, base: LocalModel, usual: Tasks) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        place = PACKAGED if case.write is None else case.write(Path(folder), case.spoil)
        candidate = load(case.name, place, **case.settings)
        case.damage(candidate)
        tasks = case.tasks or usual
        if not tasks.documents:
            tasks = Tasks(documents=usual.documents, lengths=tasks.lengths, text_tokens=usual.text_tokens)
        asked = standard(candidate.reads.claims)
        rounded = rounded_base(base, config_of(PACKAGED), candidate, config_of(place, **case.settings))
        return Gate(base, candidate, base.tokenizer, asked, silent, rounded).run(tasks)


def is_noted(report: Report) -> bool:
    return any("look for a broken scale" in note for note in report.notes)


def told(case: Case, report: Report) -> dict[str, Any]:
    return {
        "wanted": case.wanted,
        "verdict": report.verdict,
        "is_noted": is_noted(report),
        "as_it_must": (report.verdict, is_noted(report)) == (case.wanted, case.is_noted),
        "reasons": report.reasons[:3],
        "figures": {f"{check.rule}, {check.where}": check.estimate for check in report.checks},
        "bytes_read": {
            name: report.candidate.read[name] for name in report.candidate.claims or () if report.candidate.read
        },
    }


def judge_all(only: list[str] | None, usual: Tasks) -> dict[str, Any]:
    base, results = load("base", PACKAGED), {}
    for case in CASES:
        if only and case.name not in only:
            continue
        report = judge(case, base, usual)
        results[case.name] = told(case, report)
        mark = "as it must" if results[case.name]["as_it_must"] else f"AND NOT {case.wanted}, noted: {case.is_noted}"
        kl = next((check.estimate.value for check in report.checks if check.rule == "kl"), float("nan"))
        noted = next((note for note in report.notes if "look for" in note), "")
        said = "; ".join([*report.reasons[:1], noted])
        print(f"{case.name:40} {report.verdict:13} {mark}; KL {kl:.5f}; {said}", flush=True)
    return results


def silent(what: str, done: int, total: int) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=12_500, help="of text at each length")
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    usual = Tasks(documents=python_documents(200), lengths=(256, 1024), text_tokens=options.tokens)
    results = judge_all(options.only, usual)
    if not options.only:
        file_result("quality_gate", msgspec.to_builtins(results), {"tokens": options.tokens}, options.json)
    sys.exit(not all(result["as_it_must"] for result in results.values()))


if __name__ == "__main__":
    main()
