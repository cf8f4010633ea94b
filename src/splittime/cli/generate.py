"""`splittime generate`: stream one answer to the terminal from an engine in this process, then show its account."""

import sys
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import msgspec
import orjson
import typer
from rich.console import Console

from splittime.cli import model_source
from splittime.cli.options import EXIT_CODES, JsonFlag, ModelArgument, talk, with_settings
from splittime.cli.settings import Settings
from splittime.core.errors import ConfigError, RequestError
from splittime.core.sampling import SamplingParams
from splittime.ledger.export import account_json

if TYPE_CHECKING:
    from splittime.llm import LLM

PANEL = "Sampling"
ADVISED = "Default: the model's own advice."

EXAMPLES = f"""\b
Examples:
  splittime generate -p "def read_json(path):" --max-tokens 60
  echo "def main(" | splittime generate --temperature 0 --json

{EXIT_CODES}"""


@with_settings("runner", "scheduler")
def generate(
    settings: Settings,
    model: ModelArgument = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Default: standard input.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", rich_help_panel=PANEL)] = 128,
    temperature: Annotated[
        float | None, typer.Option("--temperature", "-t", help=ADVISED, rich_help_panel=PANEL)
    ] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help=ADVISED, rich_help_panel=PANEL)] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help=f"0 is off. {ADVISED}", rich_help_panel=PANEL)] = None,
    seed: Annotated[int | None, typer.Option("--seed", rich_help_panel=PANEL)] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="May be repeated.", rich_help_panel=PANEL)] = None,
    json: JsonFlag = False,
) -> None:
    """Stream an answer to the terminal, then show where its time went."""
    flags = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    given |= {"max_tokens": max_tokens, "stop": tuple(stop or ())}
    SamplingParams(**given).validate()
    text = _from_stdin() if prompt is None else prompt or _no_prompt()
    model_source.locate(model, settings["load_format"])  # a download shows its own progress, before the spinner
    with talk().status("loading the model"):
        from splittime.llm import LLM  # brings torch

        llm = LLM(model, **(settings.part("runner") | settings.part("scheduler")))
    _stream(llm, text, msgspec.structs.replace(llm.default_sampling, **given), json)


def _from_stdin() -> str:
    text = "" if sys.stdin.isatty() else sys.stdin.read()
    return text or _no_prompt()


def _no_prompt() -> NoReturn:
    raise ConfigError("no prompt", param="prompt", hint="give --prompt TEXT, or pipe one into standard input")


def _stream(llm: "LLM", text: str, sampling: SamplingParams, as_json: bool) -> None:
    output = None
    for piece in llm.stream(text, sampling):
        if not as_json:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        output = piece.output or output
    assert output is not None
    if output.error is not None:
        raise RequestError(output.error.message, hint=output.error.hint)
    if as_json:
        answer = {"text": output.text, "token_ids": output.token_ids, "finish_reason": output.finish_reason}
        sys.stdout.buffer.write(orjson.dumps({**answer, "account": account_json(output.account)}) + b"\n")
        return
    sys.stdout.write("\n")
    sys.stdout.flush()
    from splittime.diagnose.explain import bar

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("\n", bar(output.account), sep="")
