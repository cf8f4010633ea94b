"""The command that starts vLLM with books: vLLM's own, with two flags more.

The ledgers of an attached server: which file each has, and how much that keeps. Their settings are those of our own
server's file (`ledger.store.LedgerConfig`), by the same variables of the environment: so `splittime attach` hands them
to vLLM's processes, and so they are set where vLLM is started by its own command.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from splittime.attach.mail import FOLDER, new_folder
from splittime.attach.versions import require_known
from splittime.core.errors import ConfigError
from splittime.core.settings import Setting, check, parse_bytes, settings_of
from splittime.ledger.store import Ledger, LedgerConfig

SCHEDULER = "splittime.attach.vllm_scheduler.scheduler"
MIDDLEWARE = "splittime.attach.middleware.WithBooks"
VLLM_COMMAND = "splittime.attach.vllm_command"


def config_of(environment: Mapping[str, str]) -> LedgerConfig:
    """Raises ConfigError for what a setting cannot be."""
    found: dict[str, Any] = {}
    for setting in settings_of(LedgerConfig):
        if environment.get(setting.env):
            found[setting.name] = _value(setting, environment[setting.env])
    config = LedgerConfig(**found)
    check(config)
    return config


def _value(setting: Setting, text: str) -> str | int:
    if setting.kind == "text":
        return text
    try:
        return parse_bytes(text) if setting.kind == "bytes" else int(text)
    except (ValueError, OverflowError):
        raise ConfigError(f"{setting.env} is {text!r}", param=setting.name, value=text, hint=setting.doc.help) from None


def environment_of(config: LedgerConfig) -> dict[str, str]:
    """Returns what `config_of` reads, in whatever folder that is."""
    values = msgspec.to_builtins(config)
    if config.ledger_file is not None:
        values["ledger_file"] = os.path.abspath(config.ledger_file)
    return {each.env: str(values[each.name]) for each in settings_of(LedgerConfig) if values[each.name] is not None}


def ledger_of(client: int, engine: int) -> Ledger:
    """Returns the ledger of this API process for an engine."""
    given = msgspec.structs.asdict(config_of(os.environ))
    path = given.pop("ledger_file")
    return Ledger(None if path is None else _name(path, client, engine), **given)


def _name(path: str, client: int, engine: int) -> str:
    """Returns the file's name. The first engine's of the first process is the one that was given; `.1` is the second
    process's, `.engine1` the second engine's."""
    return path + (f".{client}" if client else "") + (f".engine{engine}" if engine else "")


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
