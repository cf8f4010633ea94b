"""`splittime serve`: puts the parts together. The engine process is started first, since it takes longest (the script
starts it before this module is imported: `drive.head_start`); the server's own imports, the tokenizer and the ledger
are made ready while it loads. The port answers before the engine is ready: `/health` says alive, `/ready` says not
yet."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import orjson
import typer

from splittime import __version__
from splittime.api.limits import LoadedAdapter, ModelInfo
from splittime.assemble import model_source
from splittime.assemble.settings import Settings, worker_settings
from splittime.cli.announcement import StartTimeline, announce
from splittime.cli.options import JsonFlag, ModelArgument, with_settings, write_data
from splittime.cli.progress import seconds_of
from splittime.core import background
from splittime.core.errors import ConfigError, EngineError
from splittime.core.pooling import Pooling
from splittime.server.config import ServerConfig, lora_modules
from splittime.web.ports import check_port_is_free

if TYPE_CHECKING:
    from splittime.drive.messages import Ready
    from splittime.drive.process import ProcessClient
    from splittime.ledger.store import Ledger
    from splittime.server.app import App

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
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
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
        say = starting.enter_context(seconds_of(f"splittime {__version__}: starting the engine for {folder.name}"))
        client = ProcessClient(
            WORKER_COMMAND,
            engine_settings,
            ledger.add_step,
            lambda told: say(f"loading {folder.name}: {told.progress}", told.share),
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
        from splittime.server.app import build_app
    timeline.mark("import server")
    tokenizer = model_source.load_tokenizer(folder, config.chat_template)
    timeline.mark("load tokenizer")
    application = build_app(client, tokenizer, ledger, config, started_ns=timeline.start_ns)
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
