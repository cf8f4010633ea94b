"""The `splittime` command. Nothing heavy is imported before a command needs it: `--help` must answer at once."""

from typing import Annotated

import typer

from splittime import __version__
from splittime.cli import (
    attach,
    bench,
    calibrate,
    distill,
    doctor,
    explain,
    fleet,
    gateway,
    incident,
    plan,
    quality,
    quantize,
    run,
    serve,
    simulate,
    tune,
    up,
)
from splittime.cli.config import app as config_app
from splittime.cli.panels import GroupedCommand

app = typer.Typer(
    name="splittime",
    help="An LLM inference server that accounts for every nanosecond of every request.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long flags short
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command, _examples, _summary in (  # a summary must fit into a line of 80 columns, or is cut there
    (serve.serve, serve.EXAMPLES, "Serve a model over an OpenAI-compatible HTTP API."),
    (run.run, run.EXAMPLES, "Answer a prompt or chat at the terminal, and say where time went."),
    (explain.explain, explain.EXAMPLES, "Show where a request's time went, and why it was slow."),
    (doctor.doctor, doctor.EXAMPLES, "Say what holds a server's requests back, and what to try."),
    (incident.incident, incident.EXAMPLES, "Put an incident into one file, without prompts and secrets."),
    (simulate.command, simulate.EXAMPLES, "Say what a change would have done to recorded requests."),
    (attach.attach, attach.EXAMPLES, "Start vLLM's own server with these books."),
    (up.up, up.EXAMPLES, "Start replicas that are scaled by their load, behind gateways."),
    (calibrate.calibrate, calibrate.EXAMPLES, "Measure what a server's steps take, for plans."),
    (plan.plan, plan.EXAMPLES, "Say how many servers a load needs, and what they cost."),
    (fleet.fleet, fleet.EXAMPLES, "Say what many servers behind the gateway would do, on paper."),
    (tune.command, tune.EXAMPLES, "Find the settings that keep an SLO, and prove them."),
    (quantize.quantize, quantize.EXAMPLES, "Quantise or prune a model into a new checkpoint."),
    (distill.distill, distill.EXAMPLES, "Train a smaller model to say what a larger one would."),
    (quality.quality, quality.EXAMPLES, "Say whether a quantised model is as good as its base."),
):
    app.command(name=_command.__name__, cls=GroupedCommand, epilog=_examples, short_help=_summary)(_command)
app.command(name="generate", cls=GroupedCommand, epilog=run.EXAMPLES, short_help="Another name of run.")(run.run)
app.add_typer(gateway.app, name="gateway", short_help="Stand in front of OpenAI-compatible servers, with accounts.")
app.add_typer(bench.app, name="bench", short_help="Load any OpenAI-compatible server, and measure it.")
app.add_typer(config_app, name="config", short_help="Show the settings and where they come from.")


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from splittime.assemble.installation import kernels  # numpy: a fifth of a second

        typer.echo(f"splittime {__version__}\nkernels: {kernels()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and the kernels.")
    ] = False,
) -> None:
    """An LLM inference server that accounts for every nanosecond of every request."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
