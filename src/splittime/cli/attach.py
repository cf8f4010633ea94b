"""`splittime attach vllm -- serve MODEL ...`: vLLM's own server, with our books."""

import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import orjson
import typer

from splittime.cli.options import EXIT_CODES, JsonFlag, fails_clearly, talk
from splittime.core.whole_file import check_writable

EXAMPLES = f"""\b
Examples:
  splittime attach vllm -- serve Qwen/Qwen3-0.6B --max-num-seqs 64
  splittime attach vllm --ledger-file run.sqlite -- serve ./model --port 9000
  splittime attach vllm --dry-run -- serve ./model   the command, without running it

\b
The page is at / on vLLM's own port, and these commands work as on our servers:
  splittime explain --slowest 3 --url http://127.0.0.1:8000
  splittime doctor http://127.0.0.1:8000

\b
The same with vLLM's own command:
  vllm serve MODEL --scheduler-cls splittime.attach.vllm_scheduler.scheduler
      --middleware splittime.attach.middleware.WithBooks

Once vLLM is started, the exit code is its own. {EXIT_CODES}"""


class ForeignEngine(StrEnum):
    """Engines whose books can be kept."""

    VLLM = "vllm"


@fails_clearly
def attach(
    engine: Annotated[ForeignEngine, typer.Argument(help="Whose server: vllm.")],
    command: Annotated[
        list[str], typer.Argument(metavar="-- serve MODEL ...", help="vLLM's own command line, from `serve` on.")
    ],
    ledger_file: Annotated[
        Path | None, typer.Option("--ledger-file", metavar="FILE", help="SQLite file for all accounts and steps.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command; start nothing.")] = False,
    json: JsonFlag = False,
) -> None:
    """Start vLLM's own server with exact accounts, stated causes and the page. It decides as it would without."""
    from splittime.attach.command import command_of
    from splittime.ledger.sqlite_open import require_free

    if ledger_file is not None:
        check_writable(ledger_file, replaces=False)
        require_free(ledger_file)
    started = command_of(command, os.environ, None if ledger_file is None else str(ledger_file))
    if dry_run:
        text = orjson.dumps(started.arguments).decode() if json else shlex.join(started.arguments)
        sys.stdout.write(f"{text}\n")
        return
    talk().print("starting vLLM with splittime's books")
    os.execve(started.arguments[0], started.arguments, started.environment)
