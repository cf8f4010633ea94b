"""The ledgers of an attached server: which file each has, and how much that keeps.

The settings are those of our own server's file (`ledger.store.LedgerConfig`), by the same variables of the environment:
so `splittime attach` hands them to vLLM's processes, and so they are set where vLLM is started by its own command.
"""

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.settings import Setting, check, parse_bytes, settings_of
from splittime.ledger.store import Ledger, LedgerConfig


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
