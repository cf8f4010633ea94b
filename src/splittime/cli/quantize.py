"""`splittime quantize`: make a smaller checkpoint (or a pruned one) that this server and others read.

Progress goes to standard error. A run that is killed goes on from its last finished layer when the command is repeated.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from splittime.assemble import model_source
from splittime.cli.options import JsonFlag, ModelArgument, flag, switch, wide, with_options, write_data
from splittime.cli.progress import bars, count_words, loading
from splittime.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from splittime.lab.quantize.job import QuantizeSummary

EXAMPLES = """\b
Examples:
  splittime quantize ./model --scheme w4a16 --out ./model-w4a16
  splittime quantize ./model --scheme awq --group-size 64 \\
      --calibrate text.txt --out ./model-awq
  splittime quantize meta-llama/Llama-3.2-1B --scheme gptq --act-order \\
      --static-groups --calibrate text.jsonl --out ./llama-gptq
  splittime quantize ./model --scheme w8a8 --smooth 0.5 --calibrate text.txt \\
      --out ./model-w8a8
  splittime quantize ./model --scheme fp8 --out ./model-fp8
  splittime quantize ./model --prune 2:4 --metric wanda --calibrate text.txt \\
      --out ./model-pruned
  splittime serve ./model-awq
\b
The schemes, and the format of their files:
  int8   8 bits, a scale for each row; rounded to nearest
         compressed-tensors, pack-quantized
  fp8    e4m3, a scale for each row; activations are rounded to it as well;
         rounded to nearest, no text needed: for cards that multiply it
         compressed-tensors, float-quantized
  w8a8   int8, and activations rounded at each token; SmoothQuant
         compressed-tensors, int-quantized
  w4a16  4 bits in groups; rounded to nearest
         compressed-tensors, pack-quantized
  awq    4 bits in groups, scaled by their activations
         AutoAWQ, gemm
  gptq   4 or 8 bits in groups, errors compensated
         GPTQ
\b
If it is killed, repeat the command: it goes on from the last finished layer,
and ends in the same bytes.
Exit codes: 0 done, 1 failed, 2 cannot be done as asked, 130 Ctrl-C.
"""


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    out: Path = flag("DIR", "The new checkpoint; must not be there yet.", ...)
    model: ModelArgument = None
    scheme: str | None = flag("int8|fp8|w8a8|w4a16|awq|gptq", "How weights are rounded.")
    calibrate: Path | None = flag(
        "FILE",
        'Text like what the model will be asked: plain, or lines of {"text": ...} or {"messages": [...]}. '
        "awq, gptq, w8a8 and wanda need it; with the others it measures the error.",
    )
    group_size: int | None = flag("N", "Columns that share a scale, -1 for whole rows. Default: 128.")
    bits: int | None = flag("4|8", "Bits of gptq. Default: 4.")
    act_order: bool = switch("--act-order", "gptq: round the columns that matter most first.")
    static_groups: bool = switch(
        "--static-groups", "With --act-order: groups stay in the order of columns, as vLLM wants them."
    )
    smooth: float | None = flag("X", "w8a8: how much of the difficulty to move into weights. Default: 0.5; 0: off.")
    prune: str | None = flag("2:4|unstructured", "Make weights zero instead of rounding.")
    sparsity: float | None = flag("P", "Share of zeros of --prune unstructured.")
    metric: str | None = flag("magnitude|wanda", "Which weights to keep. Default: magnitude.")
    samples: int | None = flag("N", "Windows of calibration text. Default: 128.")
    length: int | None = flag("L", "Their tokens. Default: 512, or the context.")
    seed: int | None = flag("N", "Chooses the windows. Default: 0.")
    json: JsonFlag = False


@with_options(QuantizeOptions)
def quantize(given: QuantizeOptions) -> None:
    """Quantise or prune a model into a new checkpoint, layer by layer."""
    folder = model_source.locate(given.model)
    if folder.is_file():
        hint = "start from the folder of safetensors that it was made of"
        raise ConfigError(f"{folder.name} is a GGUF file; it is not read here", param="model", hint=hint)
    with loading("reading the model", at_once=True):
        from splittime.lab.quantize import calibration, job  # brings torch
        from splittime.lab.quantize.settings import QuantizeSettings, settings_from

        fields = {name: getattr(given, name) for name in QuantizeSettings.__struct_fields__}
        settings = settings_from(fields, has_text=given.calibrate is not None)
        text = None if given.calibrate is None else calibration.read_for(folder, given.calibrate, settings)
    with _progress() as (on_layer, on_step):
        summary = job.quantize(folder, given.out, settings, text, on_layer=on_layer, on_step=on_step)
    if given.json:
        write_data(msgspec.json.encode(summary))
    else:
        _show(summary)


@contextmanager
def _progress() -> Iterator[tuple]:
    """A bar of layers with what is being done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with bars(*columns, words=lambda task: f"{count_words(task)}, {task.fields['now']}") as bar:
        task = bar.add_task("layers", total=None, now="reading")
        yield (
            lambda done, total: bar.update(task, completed=done, total=total),
            lambda text: bar.update(task, now=text),
        )


def _show(summary: "QuantizeSummary") -> None:
    console = wide()
    console.print(_table(summary))
    share = summary.bytes_after / summary.bytes_before
    console.print(
        f"{summary.out}: {_megabytes(summary.bytes_before)} before, {_megabytes(summary.bytes_after)} after "
        f"({share:.0%}), {summary.seconds:.1f} s"
    )
    if summary.calibration_tokens:
        console.print(
            f"{summary.calibration_tokens:,} tokens of text, {_megabytes(summary.hidden_bytes)} of hidden states kept"
        )
    if summary.resumed_layers:
        console.print(f"{summary.resumed_layers} of {summary.layers} layers were finished by an earlier run")
    if summary.honest:
        console.print(summary.honest)


def _table(summary: "QuantizeSummary") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(title=f"Relative error of {summary.error_of}, {summary.layers} layers", box=box.SIMPLE)
    table.add_column("kind")
    for name in ("weights", "mean", "worst"):
        table.add_column(name, justify="right")
    table.add_column("the worst is")
    for row in summary.errors:
        table.add_row(row.kind, str(row.weights), f"{row.mean:.2%}", f"{row.worst:.2%}", row.worst_weight)
    return table


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
