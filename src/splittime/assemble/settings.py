"""Settings with their origins: default < splittime.toml < environment < flag. The only reader of the three.

The structs in `PARTS` declare the settings (`core.settings`). A key that none of them has is a `ConfigError` with "did
you mean", whichever way it came; a value of the wrong type or out of range too, and it says where it was written.
`config show` prints what `Settings` holds.
"""

import difflib
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from splittime.assemble.model_source import locate
from splittime.core.errors import ConfigError
from splittime.core.settings import ENV_PREFIX, Doc, Setting, parse_bytes, settings_of
from splittime.ledger.store import LedgerConfig
from splittime.runner.config import (
    RunnerConfig,  # no torch in it
    speculative_config,
)
from splittime.scheduler.config import SchedulerConfig
from splittime.server.config import ServerConfig

PARTS: dict[str, type[msgspec.Struct]] = {
    "runner": RunnerConfig,
    "scheduler": SchedulerConfig,
    "server": ServerConfig,
    "ledger": LedgerConfig,
}
MODEL = Setting(
    "model", "text", None, Doc("Folder, GGUF file or Hugging Face id; without it, the model in the package.")
)
BY_NAME = {MODEL.name: MODEL} | {setting.name: setting for part in PARTS.values() for setting in settings_of(part)}
SETTINGS = tuple(BY_NAME.values())
ENGINE = {MODEL.name} | {setting.name for part in ("runner", "scheduler") for setting in settings_of(PARTS[part])}
DEFAULT_FILE = "splittime.toml"
_PLENTY_BLOCKS = 2**40
_SWITCH_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}
# Kubernetes adds these to every pod beside a service that is called "splittime"
_SERVICE_LINK = re.compile(rf"{ENV_PREFIX}(SERVICE_(HOST|PORT).*|PORT_\d+_.*)")


class Value(NamedTuple):
    value: Any
    origin: str


class Settings:
    """Every setting's value and where it came from."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = dict(values)

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def part(self, part: str) -> dict[str, Any]:
        """The fields of one component's config."""
        return {setting.name: self[setting.name] for setting in settings_of(PARTS[part])}

    def shown(self) -> list[dict[str, Any]]:
        """`[{name, value, origin}]`, secrets masked."""
        return [
            {"name": s.name, "value": _mask(s, self[s.name]), "origin": self.values[s.name].origin} for s in SETTINGS
        ]


def load(flags: Mapping[str, Any], config: Path | None = None, environ: Mapping[str, str] | None = None) -> Settings:
    """All settings of a command. Flags that were not given are None."""
    values = {setting.name: Value(setting.default, "default") for setting in SETTINGS}
    values |= _from_file(config)
    values |= _from_environment(os.environ if environ is None else environ)
    given = {name: value for name, value in flags.items() if value not in (None, [])}
    values |= {name: _checked(name, value, _flag_origin(name, value)) for name, value in given.items()}
    return Settings(values)


def from_arguments(arguments: Mapping[str, Any]) -> Settings:
    """Settings of `LLM(...)`: arguments over defaults; no file, no environment. The server's are refused, by name."""
    for name in arguments:
        if name in BY_NAME and name not in ENGINE:
            hint = "LLM(...) takes the engine's settings; a ledger file is given as ledger=Ledger(path)"
            raise ConfigError(f"{name} is no setting of the engine (argument)", param=name, hint=hint)
    if arguments.get("enable_lora"):
        hint = "splittime serve --enable-lora"
        raise ConfigError("LLM(...) loads no adapters", param="enable_lora", value=True, hint=hint)
    values = {setting.name: Value(setting.default, "default") for setting in SETTINGS}
    values |= {name: _checked(name, value, "argument") for name, value in arguments.items() if value is not None}
    return Settings(values)


def worker_settings(settings: Settings, model_path: Path) -> bytes:
    """Returns the runner's and the scheduler's configs as one line of JSON, which `assemble.worker` reads; what is None
    is the runner's to decide.

    Raises ConfigError for what either would refuse, before any process is started. Only the runner can say how many
    blocks there are.
    """
    _check_path(model_path)
    runner = RunnerConfig(model_path=str(model_path), **settings.part("runner"))
    drafts = speculative_config(runner.speculative_config)
    if drafts is not None and drafts.model is not None:
        runner = msgspec.structs.replace(runner, draft_model_path=str(locate(drafts.model)))
    scheduler = SchedulerConfig(num_blocks=_PLENTY_BLOCKS, **settings.part("scheduler"))
    runner.validate()
    scheduler.validate()
    if runner.kv_offload_memory_bytes and not scheduler.enable_prefix_caching:
        message = "kv_offload_memory_bytes keeps prefixes for the prefix cache, which is off"
        hint = "--enable-prefix-caching, or leave --kv-offload-memory-bytes out"
        raise ConfigError(message, param="kv_offload_memory_bytes", value=runner.kv_offload_memory_bytes, hint=hint)
    return msgspec.json.encode({"runner": runner, "scheduler": scheduler})


def _check_path(model_path: Path) -> None:
    shown = _printable(str(model_path))
    if shown != str(model_path):
        message = f"the model's path {shown} is not in UTF-8"
        raise ConfigError(message, param="model", value=shown, hint="give the folder a name in UTF-8")


def _from_file(config: Path | None) -> dict[str, Value]:
    path = config or Path(DEFAULT_FILE)
    if config is None and not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read settings from {path}: {error}", param="config", value=str(path)) from error
    return dict(_file_value(path, text, key, value) for key, value in table.items())


def _file_value(path: Path, text: str, key: str, value: Any) -> tuple[str, Value]:
    line = next(
        (n for n, row in enumerate(text.splitlines(), 1) if re.match(rf'\s*"?{re.escape(key)}"?\s*=', row)), None
    )
    name = key.replace("-", "_")
    return name, _checked(name, value, f"{path}:{line}" if line else str(path))


def _from_environment(environ: Mapping[str, str]) -> dict[str, Value]:
    names = sorted(name for name in environ if name.startswith(ENV_PREFIX) and not _SERVICE_LINK.fullmatch(name))
    return dict(_environment_value(name, environ[name]) for name in names)


def _environment_value(name: str, text: str) -> tuple[str, Value]:
    """Spaces part the texts of a list; a secret may have some of its own."""
    key = name.removeprefix(ENV_PREFIX).lower()
    setting = BY_NAME.get(key)
    is_list = setting is not None and setting.kind == "texts" and not setting.doc.is_secret
    return key, _checked(key, text.split() if is_list else text, f"env {name}")


def _flag_origin(name: str, value: Any) -> str:
    if name == "model":
        return "argument MODEL"
    setting = BY_NAME.get(name)
    return f"flag {setting.flag if value is not False else '--no-' + setting.flag[2:]}" if setting else "flag"


def _checked(name: str, value: Any, origin: str) -> Value:
    """The value, typed and within its range, or a `ConfigError` that says where it was written."""
    setting = BY_NAME.get(name)
    if setting is None:
        raise ConfigError(f"unknown setting {name!r} ({origin})", param=name, hint=did_you_mean(name, BY_NAME))
    try:
        typed = _typed(setting, value)
    except (ValueError, TypeError, KeyError, OverflowError):
        shown = _mask(setting, _printable(value))
        raise _bad(setting, shown, f"is not {_KIND_WORDS[setting.kind]}", origin) from None
    fault = setting.fault(typed)
    if fault is not None:
        raise _bad(setting, typed, fault, origin, setting.limit)
    return Value(typed, origin)


def _bad(setting: Setting, value: Any, why: str, origin: str, limit: Any = None) -> ConfigError:
    return ConfigError(
        f"{setting.name} = {value!r} {why} ({origin})",
        param=setting.name,
        value=value,
        limit=limit,
        hint=setting.doc.help,
    )


_KIND_WORDS = {
    "text": "text in UTF-8",
    "texts": "a list of texts in UTF-8",
    "whole": "a whole number",
    "number": "a finite number",
    "switch": "true or false",
    "bytes": "a size like 1048576, 512MiB or 4GiB",
}


def _typed(setting: Setting, value: Any) -> Any:
    if setting.kind == "switch":
        return value if isinstance(value, bool) else _SWITCH_WORDS[_text(value).lower()]
    if isinstance(value, bool):
        raise ValueError("a switch where none is")
    if setting.kind == "bytes":
        return value if isinstance(value, int) else parse_bytes(_text(value))
    if setting.kind == "whole":
        return int(value) if isinstance(value, int | str) else _refuse()
    if setting.kind == "number":
        return _refuse() if math.isinf(float(value)) else float(value)
    if setting.kind == "texts":
        return tuple(_text(text) for text in ([value] if isinstance(value, str) else value))
    is_table = isinstance(value, dict) and setting.name == "speculative_config"
    return msgspec.json.encode(value).decode() if is_table else _text(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "`splittime config show` lists all settings"


def _text(value: Any) -> str:
    """One that UTF-8 can hold, as all that is written out must: the bytes of an argument may be any."""
    if not isinstance(value, str):
        raise ValueError
    value.encode()
    return value


def _printable(value: Any) -> Any:
    """Returns what can be written out in its place."""
    if isinstance(value, list | tuple):
        return [_printable(one) for one in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def _refuse() -> Any:
    raise ValueError


def _mask(setting: Setting, value: Any) -> Any:
    return "***" if setting.doc.is_secret and value not in (None, ()) else value
