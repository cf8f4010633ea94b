"""The command that starts vLLM with books: vLLM's own, with two flags more."""

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from splittime.attach.ledger_files import environment_of
from splittime.attach.mail import FOLDER, new_folder
from splittime.attach.versions import require_known
from splittime.core.errors import ConfigError
from splittime.ledger.store import LedgerConfig

SCHEDULER = "splittime.attach.vllm_scheduler.scheduler"
MIDDLEWARE = "splittime.attach.middleware.WithBooks"
VLLM_COMMAND = "splittime.attach.vllm_command"


class Command(NamedTuple):
    """arguments: with the program first. environment: the whole of it."""

    arguments: list[str]
    environment: dict[str, str]


def command_of(asked: Sequence[str], environment: Mapping[str, str], ledger: LedgerConfig | None = None) -> Command:
    """Returns how to start vLLM with books. asked: what would stand behind `vllm`: `serve MODEL ...`. ledger: its
    file; None: as the environment has it.

    Raises `ConfigError` for another command of vLLM's, for a scheduler of somebody else's, and where there is no vLLM
    that is known.
    """
    require_known()
    if not asked or asked[0] != "serve":
        hint = "splittime attach vllm -- serve MODEL [vLLM's flags]"
        raise ConfigError("books are kept of `vllm serve`", param="attach", value=" ".join(asked[:1]), hint=hint)
    if any(each.split("=")[0] in ("--scheduler-cls", "--scheduler_cls") for each in asked):
        hint = "leave it out: the books need to be told by the scheduler that decides"
        raise ConfigError("--scheduler-cls names another scheduler", param="scheduler_cls", hint=hint)
    more = {FOLDER: new_folder()}  # also where another server's is inherited
    if ledger is not None:
        more |= environment_of(ledger)
    flags = ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
    return Command([sys.executable, "-m", VLLM_COMMAND, *asked, *flags], {**environment, **more})
