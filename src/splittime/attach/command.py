"""The command that starts vLLM with books: vLLM's own, with two flags more."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from splittime.attach.mail import FOLDER, LEDGER_FILE, new_folder
from splittime.attach.versions import require_known
from splittime.core.errors import ConfigError

SCHEDULER = "splittime.attach.vllm_scheduler.scheduler"
MIDDLEWARE = "splittime.attach.middleware.WithBooks"
VLLM_COMMAND = "splittime.attach.vllm_command"


class Command(NamedTuple):
    """arguments: with the program first. environment: the whole of it."""

    arguments: list[str]
    environment: dict[str, str]


def command_of(asked: Sequence[str], environment: Mapping[str, str], ledger_file: str | None = None) -> Command:
    """Returns how to start vLLM with books. asked: what would stand behind `vllm`: `serve MODEL ...`.

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
    if ledger_file is not None:
        more[LEDGER_FILE] = os.path.abspath(ledger_file)
    flags = ["--scheduler-cls", SCHEDULER, "--middleware", MIDDLEWARE]
    return Command([sys.executable, "-m", VLLM_COMMAND, *asked, *flags], {**environment, **more})
