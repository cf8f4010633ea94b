"""The `splittime` command. A command's modules are imported when it is called: each start of a server or a gateway
would wait for those of all others. `--help` of the whole imports them all."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import chain
from typing import Annotated, Any, NamedTuple

import typer

from splittime import __version__
from splittime.cli.panels import ALL, CommandGroup, add

_FLAG = re.compile(r"(--(?!ttft)(?:[a-z]+-)*(?:key|keys|token|password|secret))(?:=.*)?", re.DOTALL)
_IN_URL = re.compile(r"[a-z+]+://[^/@\s]*:[^/@\s]+@", re.IGNORECASE)
_IN_HEADER = re.compile(r"(?:authorization|x-api-key)\s*[:=]", re.IGNORECASE)


class Listed(NamedTuple):
    """A command of the list: where its function is, or a `Typer` with commands of its own. summary: as of `add`."""

    module: str
    name: str
    summary: str


COMMANDS = {
    "serve": Listed("serve", "serve", "Serve a model over an OpenAI-compatible HTTP API."),
    "run": Listed("run", "run", "Answer a prompt or chat at the terminal, and say where time went."),
    "explain": Listed("explain", "explain", "Show where a request's time went, and why it was slow."),
    "doctor": Listed("doctor", "doctor", "Say what holds a server's requests back, and what to try."),
    "incident": Listed("incident", "incident", "Put an incident into one file, without prompts and secrets."),
    "check-template": Listed("check_template", "check_template", "Say whether a chat template keeps the prefix cache."),
    "simulate": Listed("simulate", "command", "Say what a change would have done to recorded requests."),
    "attach": Listed("attach", "attach", "Start vLLM's own server with these books."),
    "up": Listed("up", "up", "Start replicas that are scaled by their load, behind gateways."),
    "calibrate": Listed("calibrate", "calibrate", "Measure what a server's steps take, for plans."),
    "plan": Listed("plan", "plan", "Say how many servers a load needs, and what they cost."),
    "tune": Listed("tune", "command", "Find the settings that keep an SLO, and prove them."),
    "quantize": Listed("quantize", "quantize", "Quantise or prune a model into a new checkpoint."),
    "distill": Listed("distill", "distill", "Train a smaller model to say what a larger one would."),
    "quality": Listed("quality", "quality", "Say whether a quantised model is as good as its base."),
    "generate": Listed("run", "run", "Another name of run."),
    "gateway": Listed("gateway", "app", "Stand in front of OpenAI-compatible servers, with accounts."),
    "bench": Listed("bench", "app", "Load any OpenAI-compatible server, and measure it."),
    "config": Listed("config", "app", "Show the settings and where they come from."),
}


GROUPS = {
    "Serve": ("serve", "attach", "gateway"),
    "Ask": ("run", "generate"),
    "Explain": ("explain", "doctor", "incident", "check-template"),
    "Measure": ("bench", "calibrate", "quality"),
    "Change": ("simulate", "tune", "quantize", "distill"),
    "Operate": ("up", "plan", "config"),
}
EXAMPLES = """\b
Examples:
  splittime serve                        a small model, on port 8000
  splittime run "Why is the sky blue?"   an answer, and where its time went
  splittime explain --slowest 3          why three requests took so long
  splittime doctor                       what holds a server back; its cure
  splittime bench run URL --rate 5       load for any OpenAI-compatible server

More: splittime COMMAND --help, splittime list, splittime version
"""


class CommandsByName(Mapping[str, Any]):
    """Imports each command when it is asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _command(name, COMMANDS[name])
        return self._made[name]

    def get(self, name: str, default: Any = None) -> Any:
        """As of any mapping, but that a fault of a command's module is no name that there is not."""
        return self[name] if name in COMMANDS else default

    def __contains__(self, name: object) -> bool:
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(GROUPS.values())

    def __len__(self) -> int:
        return len(COMMANDS)


def _command(name: str, listed: Listed) -> Any:
    module = import_module(f"splittime.cli.{listed.module}")
    found = getattr(module, listed.name)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        add(alone, found, module.EXAMPLES, listed.summary, name)
        found = alone
    made = typer.main.get_command(found)
    made.name, made.short_help = name, listed.summary
    return made


class LazyGroup(CommandGroup):
    """All commands, by what they are for."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given | {"commands": CommandsByName()})

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """As of any group; some programs have words for these."""
        first, rest = "".join(args[:1]), args[1:]
        words = {"version": ["--version"], "list": [ALL], "help": [*rest, "--help"], "chat": ["run", *rest]}
        return super().parse_args(ctx, words.get(first, args))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([row for name in names for row in _rows(name, ALL in ctx.meta)])
        if ALL in ctx.meta:
            from splittime.assemble.model_source import named_models

            with formatter.section("Models that have a name"):
                formatter.write_dl(named_models())


def _rows(name: str, is_whole: bool) -> Iterator[tuple[str, str]]:
    """Yields a command with its summary. is_whole: those of its own too."""
    yield name, COMMANDS[name].summary
    if is_whole and COMMANDS[name].name == "app":
        parts = _command(name, COMMANDS[name]).commands
        yield from ((f"{name} {part}", parts[part].get_short_help_str(100)) for part in parts)


app = typer.Typer(
    name="splittime",
    cls=LazyGroup,
    help="An LLM inference server that accounts for every nanosecond of every request.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags short
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from splittime.assemble.installation import kernels  # numpy: a fifth of a second

        typer.echo(f"splittime {__version__}\nkernels: {kernels()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_show_version, is_eager=True, help="Show version and kernels.")
    ] = False,
) -> None:
    """An LLM inference server that accounts for every nanosecond of every request."""
    if (warning := warning_of(sys.argv[1:])) is not None:
        typer.echo(warning, err=True)


def main() -> None:
    app()


def shown_keys(words: Sequence[str]) -> Iterator[str]:
    """Yields what in a command line has a key: a flag, a URL with a password, a header."""
    for word in words:
        flag = _FLAG.fullmatch(word)
        if flag is not None:
            yield flag[1]
        elif _IN_URL.match(word):
            yield "a URL with a password"
        elif _IN_HEADER.match(word):
            yield "a header with a key"


def warning_of(words: Sequence[str]) -> str | None:
    """Returns what the user is told; None where no key is shown."""
    found = ", ".join(dict.fromkeys(shown_keys(words)))
    way_out = "give keys by the environment (SPLITTIME_API_KEY) or in a file (api_keys_file, key_file)"
    return (
        f"warning: {found}: every user of this machine can read it in the list of processes; {way_out}"
        if found
        else None
    )


if __name__ == "__main__":
    main()
