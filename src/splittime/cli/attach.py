"""`splittime attach vllm -- serve MODEL ...`: vLLM's own server, with our books."""

import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from splittime.cli.options import EXIT_CODES, JsonFlag, argument, fails_clearly, flag, switch, talk
from splittime.core.files import check_writable
from splittime.core.settings import ENV_PREFIX

if TYPE_CHECKING:
    from splittime.ledger.store import LedgerConfig

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
    engine: ForeignEngine = argument(None, "Whose server: vllm.", ...),
    command: list[str] = argument("-- serve MODEL ...", "vLLM's own command line, from `serve` on.", ...),
    ledger_file: Path | None = flag("FILE", "SQLite file for all accounts and steps."),
    max_file_accounts: int | None = flag("N", "Accounts kept in it."),
    max_file_steps: int | None = flag("N", "Steps kept in it."),
    max_file_bytes: str | None = flag("SIZE", "Bytes kept in it; the oldest go. Default: 2GiB."),
    dry_run: bool = switch("--dry-run", "Print the command; start nothing."),
    json: JsonFlag = False,
) -> None:
    """Start vLLM's own server with exact accounts, stated causes and the page. It decides as it would without."""
    from splittime.attach.versions import command_of
    from splittime.ledger.sqlite import require_free

    ledger = _ledger_config(
        ledger_file=None if ledger_file is None else str(ledger_file),
        max_file_accounts=max_file_accounts,
        max_file_steps=max_file_steps,
        max_file_bytes=max_file_bytes,
    )
    if ledger.ledger_file is not None:
        check_writable(Path(ledger.ledger_file), replaces=False)
        require_free(Path(ledger.ledger_file))
    started = command_of(command, os.environ, ledger)
    if dry_run:
        text = orjson.dumps(started.arguments).decode() if json else shlex.join(started.arguments)
        sys.stdout.write(f"{text}\n")
        return
    talk().print("starting vLLM with splittime's books")
    os.execve(started.arguments[0], started.arguments, started.environment)


def _ledger_config(**flags: str | int | None) -> "LedgerConfig":
    """Returns the settings of the file: flags over the environment, which vLLM's own command reads too."""
    from splittime.attach.versions import config_of

    given = {ENV_PREFIX + name.upper(): str(value) for name, value in flags.items() if value is not None}
    return config_of({**os.environ, **given})
