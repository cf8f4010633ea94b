"""`splittime distill TEACHER --student CONFIG`: train a smaller model to say what a larger one would.

Progress goes to standard error. A run that is killed goes on from its last checkpoint when the command is repeated.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from rich.progress import BarColumn, Task, TaskProgressColumn, TextColumn, TimeElapsedColumn

from splittime.cli.options import JsonFlag, argument, flag, wide, with_options, write_data
from splittime.cli.progress import bars, loading

if TYPE_CHECKING:
    from rich.table import Table

    from splittime.lab.distill.fidelity import DraftGain, Scores
    from splittime.lab.distill.run import HeadResult, Hooks, Result
    from splittime.lab.distill.trainer import State, Update
    from splittime.stats.paired import BootstrapEstimate

EXAMPLES = """\b
Examples:
  splittime distill code --student code-draft --text sources/ --minutes 30 \\
      --out ./draft
  splittime distill ./llama --student small.json --text wiki.jsonl \\
      --own-outputs 2000 --tokens 50000000 --out ./small
  splittime distill code --student code-draft --text a.jsonl \\
      --held-out b.jsonl --minutes 10 --beside code-draft --out ./draft
  splittime distill code --student mtp --text a.jsonl --own-outputs 500 \\
      --minutes 10 --out ./head
  splittime distill code --student code-draft --text a.jsonl --alpha 0 \\
      --minutes 10 --out ./plain
  splittime serve code --speculative-config \\
      '{"method": "draft_model", "model": "./draft"}'
\b
The loss is alpha T^2 KL(teacher || student) at temperature T, and (1 - alpha)
of the cost of the text's own tokens; --alpha 0 is text alone, to compare.
\b
At the end the student is measured on text that it has not learnt from: what
it is worth (task) and, apart from that, how like its teacher it is (KL,
top-1, expected acceptance as a draft), each with a 95 % interval; and what
it would gain as a draft model, predicted from that and timed steps.
\b
If it is killed, repeat the command: it goes on from the last checkpoint, at
most a minute old.
Exit codes: 0 done, 1 failed, 2 cannot be done as asked, 130 Ctrl-C.
"""


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    teacher: str = argument("TEACHER", "Folder, packaged name, or Hugging Face id.", ...)
    student: str = flag(
        "CONFIG", "A config.json, a folder with one, a packaged name; or mtp, a head on the teacher.", ...
    )
    text: list[Path] = flag("FILE", "Text to learn from: file, .jsonl, folder. May be repeated.", ...)
    out: Path = flag("DIR", "The student's folder; must not be there yet.", ...)
    held_out: list[Path] | None = flag("FILE", "Text to measure on. Default: a tenth of the documents.")
    own_outputs: int = flag("N", "Sequences for the teacher to write, learnt from as well.", 0)
    minutes: float | None = flag("M", "Budget of training time.")
    tokens: int | None = flag("N", "Budget of tokens seen.")
    temperature: float = flag("T", "Temperature of both models' distributions.", 1.0)
    alpha: float = flag("A", "Weight of the teacher; 0 is plain training on the text.", 0.9)
    step_tokens: int = flag("N", "Tokens of an update.", 4096)
    start_from: Path | None = flag("FOLDER", "Begin with these weights, not random ones.")
    beside: list[str] | None = flag("MODEL", "Another student to measure on the same text. May be repeated.")
    matrix_rate: float = flag("X", "Muon's peak learning rate.", 0.02)
    other_rate: float = flag("X", "AdamW's peak learning rate.", 0.008)
    workers: int = flag("N", "Threads, a core each.", 2)
    seed: int = flag("N", "Seed of weights, windows and samples.", 0)
    json: JsonFlag = False


@with_options(DistillOptions)
def distill(given: DistillOptions) -> None:
    """Distil a model into a smaller one with the same tokenizer."""
    with loading("reading", at_once=True):
        from splittime.lab.distill import run as local  # brings torch
        from splittime.lab.distill.inputs import DistillRequest
        from splittime.lab.distill.job import DistillSettings

    settings = DistillSettings(**{field.name: getattr(given, field.name) for field in fields(DistillSettings)})
    sources = (given.teacher, given.student, given.text, given.held_out or ())
    asked = DistillRequest(*sources, given.out, given.start_from, given.beside or (), settings)
    with _progress(settings) as hooks:
        result = local.distill(asked, hooks)
    if given.json:
        write_data(msgspec.json.encode(result))
    elif isinstance(result, local.HeadResult):
        _show_head(result)
    else:
        _show(result)


@contextmanager
def _progress(settings: Any) -> Iterator["Hooks"]:
    """A bar of the budget with the loss and its speed; of the measuring afterwards."""
    from splittime.lab.distill.run import Hooks

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with bars(*columns, words=_share_words) as bar:
        task = bar.add_task("reading", total=None)
        yield Hooks(
            tell=lambda what, done, of: bar.update(task, description=what, completed=done, total=of),
            on_update=lambda state, update: bar.update(
                task, description=_words(state, update), completed=state.progress(settings), total=1.0
            ),
        )


def _share_words(task: Task) -> str:
    return task.description if task.total is None else f"{task.percentage:.0f} %, {task.description}"


def _words(state: "State", update: "Update") -> str:
    parts = update.parts
    speed = state.tokens / max(state.seconds, 1e-9)
    return f"loss {parts.loss:.3f} (task {parts.task:.3f}, kl {parts.kl:.3f}) {speed:,.0f} tokens/s"


def _show(result: "Result") -> None:
    console = wide()
    console.print(_table(result))
    for each in result.differences:
        console.print(
            f"{each.first} less {each.second}: bits per byte {_signed(each.bits_per_byte)}, KL {_signed(each.kl)}, "
            f"top-1 {_signed(each.top1)}, acceptance {_signed(each.acceptance)}"
        )
    for gain in result.gains:
        _show_gain(gain)
    console.print(
        f"{result.out}: {result.student_parameters:,} parameters (teacher {result.teacher_parameters:,}), "
        f"{result.seen_tokens:,} tokens, updates: {result.updates:,}, {result.seconds:,.0f} s"
    )
    _show_notes(result.notes)


def _show_notes(notes: Sequence[str]) -> None:
    for note in notes:
        wide().print(f"note: {note}")


def _show_head(result: "HeadResult") -> None:
    console, scores, gain = wide(), result.scores, result.gain
    shares = ", ".join(f"{share:.0%}" for share in scores.by_depth)
    console.print(
        f"On {scores.tokens:,} held-out tokens, a draft is what the teacher says next in {scores.chance:.0%} "
        f"[{scores.low:.0%}, {scores.high:.0%}]; the first, second and third of those with right ones before: {shares}"
    )
    _show_gain(gain)
    console.print(
        f"{result.out}: a head of {result.head_parameters:,} parameters, {result.seen_tokens:,} tokens, updates: "
        f"{result.updates:,}, {result.seconds:,.0f} s"
    )
    _show_notes(result.notes)


def _show_gain(gain: "DraftGain") -> None:
    steps = f"{gain.student_step_ns / 1e6:.2f} ms a step, the teacher {gain.teacher_step_ns / 1e6:.2f}"
    wide().print(
        f"{gain.name} as a draft model, predicted for one greedy request: {gain.gain:.2f} times the tokens/s "
        f"[{gain.low:.2f}, {gain.high:.2f}]; it takes {steps}"
    )


def _table(result: "Result") -> "Table":
    from rich import box
    from rich.table import Table

    first = result.scores[0]
    title = f"On {first.tokens:,} held-out tokens of {first.documents} documents, with 95 % intervals"
    table = Table(title=title, box=box.SIMPLE)
    table.add_column("model")
    for name in ("bits per byte", "nats per token", "KL to teacher", "top-1 as teacher", "expected acceptance"):
        table.add_column(name, justify="right")
    for row in result.scores:
        table.add_row(row.name, *_cells(row))
    return table


def _cells(row: "Scores") -> list[str]:
    return [_with_interval(each) for each in (row.bits_per_byte, row.task, row.kl, row.top1, row.acceptance)]


def _with_interval(estimate: "BootstrapEstimate") -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _signed(estimate: "BootstrapEstimate") -> str:
    return f"{estimate.value:+.4f} [{estimate.low:+.4f}, {estimate.high:+.4f}]"
