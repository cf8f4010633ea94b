"""The `splittime` command. Nothing heavy is imported before a command needs it: `--help` must answer at once."""

from typing import Annotated

import typer

from splittime import __version__
from splittime.cli import bench, doctor, explain, generate, quality, quantize, serve
from splittime.cli.config import app as config_app

app = typer.Typer(
    name="splittime",
    help="An LLM inference server that accounts for every nanosecond of every request.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags short
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="serve", epilog=serve.EXAMPLES)(serve.serve)
app.command(name="generate", epilog=generate.EXAMPLES)(generate.generate)
app.command(name="explain", epilog=explain.EXAMPLES)(explain.explain)
app.command(name="doctor", epilog=doctor.EXAMPLES)(doctor.doctor)
app.command(name="quantize", epilog=quantize.EXAMPLES)(quantize.quantize)
app.command(name="quality", epilog=quality.EXAMPLES)(quality.quality)
app.add_typer(bench.app, name="bench")
app.add_typer(config_app, name="config")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"splittime {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """An LLM inference server that accounts for every nanosecond of every request."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
