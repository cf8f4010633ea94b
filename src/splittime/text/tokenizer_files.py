"""What a model's folder says of its tokenizer: `tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`,
and the chat template, which may stand in a file of its own (`chat_template.jinja` or `.json`).

Of a list of named templates only the one called "default" is used and looked at. Special tokens are those of
`tokenizer_config.json`; `special_tokens_map.json` says what that leaves out, and, as for Hugging Face, has the last
word for older folders, whose config has no `added_tokens_decoder`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from splittime.core.errors import ConfigError

MAX_TOKENIZER_BYTES = 128 << 20  # four times the largest published; reading one takes ten times as much


class TokenizerFiles(NamedTuple):
    """config: `bos_token`, `eos_token`, ..., `add_bos_token`. chat_template: the default one, in Jinja."""

    backend: tokenizers.Tokenizer
    config: dict[str, Any]
    chat_template: str | None


def read_folder(folder: Path, chat_template: str | None = None) -> TokenizerFiles:
    """chat_template: instead of the folder's own, which is not looked at then. Raises `ConfigError` naming the file
    that is missing or cannot be understood."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"no tokenizer.json in {folder.name}", hint="only tokenizers of that form are supported")
    config = _read_json(folder / "tokenizer_config.json")
    listed = special_tokens(_read_json(folder / "special_tokens_map.json"))
    is_old = "added_tokens_decoder" not in config
    found = {**listed, **config, **(listed if is_old else {})}
    return TokenizerFiles(_backend(path), found, chat_template or _template(folder, config))


def read_template(path: str | Path) -> str:
    """The text of a template file that a user named."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError, ValueError) as error:
        message = f"cannot read the chat template: {error}"
        raise ConfigError(message, param="chat_template", value=str(path)) from None


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... whether written as text or as an object with a `content`."""
    found = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """A file of its own comes first, then the config's, which is one text or a named list."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_template(path)
    declared = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if declared is None or isinstance(declared, str):
        return declared
    named = [entry for entry in declared if isinstance(entry, dict)] if isinstance(declared, list) else []
    if not named:
        raise ConfigError("chat_template is neither a text nor a list of {name, template}", param="model")
    texts = [entry.get("template") for entry in named if entry.get("name") == "default"]
    if texts and not isinstance(texts[0], str):
        raise ConfigError("the default chat_template is no text", param="model")
    return texts[0] if texts else None


def _backend(path: Path) -> tokenizers.Tokenizer:
    size = path.stat().st_size
    if size > MAX_TOKENIZER_BYTES:
        said = f"{path.name} has {size} bytes, more than the {MAX_TOKENIZER_BYTES} that are read"
        raise ConfigError(said, param="model", value=size, limit=MAX_TOKENIZER_BYTES)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{path.name} is no tokenizer: {error}", param="model") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The file's object, or an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path.name} is not JSON: {error}", param="model") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path.name} holds no JSON object", param="model")
    return found
