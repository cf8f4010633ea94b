"""Command-line flags made from the table of settings, and what all commands share: `--json`, `--config`, exit codes.

`EXIT_CODES` says what each code means, where a command does not say it itself. Data goes to standard output, talk to
standard error.
"""

import dataclasses
import functools
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from splittime.assemble import settings as settings_module
from splittime.cli.panels import RARELY, panel_of, place_of
from splittime.core.errors import ConfigError, NobodyThere, RequestError, SplittimeError
from splittime.core.settings import Setting, settings_of
from splittime.present.tables import UNLIMITED, Sentence
from splittime.present.terminal import plain

INTERRUPTED = 130
NOBODY = 4
EXIT_CODES = "Exit codes: 0 done, 1 failed, 2 a usage or settings error, 130 Ctrl-C."
ASKING_CODES = EXIT_CODES.replace("130", f"{NOBODY} nobody answers,\n130")

_TYPES: dict[str, Any] = {
    "text": str | None,
    "texts": list[str] | None,
    "whole": int | None,
    "number": float | None,
    "switch": bool | None,
    "bytes": str | None,
}

_MODEL = "Folder, GGUF file or Hugging Face id. Default: smollm2 if installed, else the packaged one."
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL)]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
ConfigFlag = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings file. Default: splittime.toml, if there.")
]


def flag(metavar: str | None, words: str, default: Any = None, *names: str, **more: Any) -> Any:
    """Returns the default of a command's flag, which says all about it. words: its help; default: `...` where it must
    be given; names: where they are not the parameter's own."""
    return typer.Option(default, *names, metavar=metavar, help=words, **more)


def switch(name: str, words: str) -> Any:
    """As `flag`, of one that is off unless it is given, and has no opposite."""
    return typer.Option(False, name, help=words)


def argument(metavar: str | None, words: str, default: Any = None) -> Any:
    """As `flag`, of a word that is no flag."""
    return typer.Argument(default, metavar=metavar, help=words)


rare = functools.partial(flag, rich_help_panel=RARELY)


class CleanConsole(Console):
    """What it shows may be a server's words, a file's or a model's name: none of them moves the cursor, or anything
    else that a terminal obeys. Only rich itself does."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


def talk() -> Console:
    """Returns where everything that is not data goes. In a log a sentence is one line, however long."""
    console = CleanConsole(stderr=True, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = UNLIMITED
    return console


def write_data(line: bytes) -> None:
    """Writes a line of data to standard output, where its reader has it at once."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def wide() -> Console:
    """Standard output for tables. A file or a pipe is a terminal of 80 columns, or of COLUMNS."""
    return CleanConsole(highlight=False)


def with_settings(*parts: str, options: type | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of these parts; it gets them, with file and environment, as `settings`.

    options: a dataclass of the command's other flags, as in `with_options`; the command gets a value of it as `given`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        taken = {setting.name for part in parts for setting in settings_of(settings_module.PARTS[part])}
        chosen = sorted((s for s in settings_module.SETTINGS if s.name in taken), key=place_of)
        names = {setting.name for setting in chosen} | {"model"}
        own = parameters_of(options) if options is not None else _own_parameters(command)
        shown = [*own, *(flag_of(setting) for setting in chosen), _CONFIG_PARAMETER]

        @functools.wraps(command)
        def with_values(**arguments: Any) -> None:
            flags = {name: arguments.pop(name) for name in names if name in arguments}
            with_model = {"model": flags["model"]} if "model" in flags else {}
            settings = settings_module.load(flags, arguments.pop("config"))
            own_arguments = {**arguments, **{name: settings[name] for name in with_model}}
            command(settings, **own_arguments) if options is None else command(settings, options(**own_arguments))

        sign(with_values, shown)
        return fails_clearly(with_values)

    return decorate


def with_options(options: type, failed: int | None = None) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Give a command a flag for each field of the dataclass `options`, annotated as typer wants it; it is called with a
    value of it. failed: as of `fails_clearly`."""

    def decorate(command: Callable[[Any], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_value(**arguments: Any) -> None:
            command(options(**arguments))

        sign(with_value, parameters_of(options))
        return fails_clearly(with_value, failed)

    return decorate


def _own_parameters(command: Callable[..., None]) -> list[inspect.Parameter]:
    return [one for one in inspect.signature(command).parameters.values() if one.name != "settings"]


def sign(command: Any, flags: list[inspect.Parameter]) -> None:
    """What typer makes the flags from."""
    command.__signature__ = inspect.Signature(flags)
    command.__annotations__ = {flag.name: flag.annotation for flag in flags}


def parameters_of(options: Any) -> list[inspect.Parameter]:
    """Returns a parameter for each field of a dataclass; what must be given comes first."""
    hints = typing.get_type_hints(options, include_extras=True)
    fields = sorted(dataclasses.fields(options), key=lambda field: getattr(field.default, "default", None) is not ...)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(one.name, kind, default=one.default, annotation=hints[one.name]) for one in fields]


def fails_clearly(command: Callable[..., None], failed: int | None = None) -> Callable[..., None]:
    """Turn our errors into a message on standard error and an exit code, as `ASKING_CODES`. failed: instead of 1."""

    @functools.wraps(command)
    def guarded(**arguments: Any) -> None:
        try:
            command(**arguments)
        except SplittimeError as error:
            say_error(error)
            raise typer.Exit(code_of(error, failed)) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:  # the reader of our output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None

    return guarded


def code_of(error: SplittimeError, failed: int | None = None) -> int:
    if error.info.code == "interrupted":
        return INTERRUPTED
    if isinstance(error, NobodyThere):
        return NOBODY
    if failed is not None:
        return failed
    return 2 if isinstance(error, ConfigError | RequestError) else 1


def say_error(error: SplittimeError) -> None:
    console = talk()
    for head, words, style in (("error: ", error.info.message, "red"), ("hint:  ", error.info.hint or "", "")):
        if "\n" in words:  # another program's last words
            console.print(f"{head}{words}", style=style, markup=False)
        elif words:
            console.print(Sentence(words, style, head=head, indent=len(head)))


def flag_of(setting: Setting, words: str | None = None, is_hidden: bool = False) -> inspect.Parameter:
    """The flag of a setting. None means that it was not given. words: its help; default: with the setting's default.
    is_hidden: it is not listed."""
    names: Iterable[str] = (setting.flag,)
    if setting.kind == "switch":
        names = (f"{setting.flag}/--no-{setting.flag[2:]}",)
    metavar = "|".join(setting.choices) if setting.choices else _METAVARS.get(setting.kind)
    panel = panel_of(setting)
    option = typer.Option(
        None,
        *names,
        help=words or _help(setting),
        show_default=False,
        metavar=metavar,
        rich_help_panel=panel,
        hidden=is_hidden,
    )
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=_TYPES[setting.kind]
    )


def _help(setting: Setting) -> str:
    if setting.kind == "texts":
        return f"{setting.doc.help} May be given again."
    if not setting.shown_default:
        return setting.doc.help
    default = size(setting.default) if setting.kind == "bytes" else setting.shown_default
    return f"{setting.doc.help} Default: {default}."


def size(num_bytes: int) -> str:
    """Returns a size as the flags take it: `4MiB`; what is no whole number of units stays as it is."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return str(num_bytes)


_METAVARS = {"text": "TEXT", "texts": "TEXT", "whole": "N", "number": "X", "bytes": "SIZE"}
_CONFIG_PARAMETER = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFlag)
