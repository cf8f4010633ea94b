"""From what the user calls a model to a folder on this machine.

nothing                  the model that ships in the package
an existing folder       that folder
owner/name               a Hugging Face repository: its config, safetensors and tokenizer, fetched once and kept in
                         the Hub's own cache; no code and no pickles are ever fetched
"""

import re
from importlib.resources import files
from pathlib import Path

from splittime.core.errors import ConfigError

PACKAGED_NAME = "code"
HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate(model: str | None) -> Path:
    """The model's folder. Raises `ConfigError` that says what was looked for."""
    if model is None:
        return _packaged()
    try:
        folder = Path(model).expanduser()
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be entered, ~nobody
        raise ConfigError(f"cannot look for the model {model[:200]!r}: {error}", param="model") from None
    if is_folder:
        return _complete(folder)
    if is_file:
        raise ConfigError(f"{model} is a file; name the folder that holds config.json", param="model", value=model)
    if _HUB_ID.fullmatch(model):
        return _from_hub(model)
    raise ConfigError(
        f"no folder {model!r}, and it is not a Hugging Face id (owner/name) either", param="model", value=model
    )


def default_name(model: str | None, folder: Path) -> str:
    """What the API calls it: the id as given, or the folder's name."""
    if model is None:
        return f"splittime-{PACKAGED_NAME}"
    return folder.name if Path(model).expanduser().is_dir() else model


def _packaged() -> Path:
    folder = Path(str(files("splittime") / "packaged" / PACKAGED_NAME))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "this installation has no packaged model",
            param="model",
            value=str(folder),
            hint="name a folder or a Hugging Face id, or train it: see training/",
        )
    return folder


def _complete(folder: Path) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(f"{folder} lacks {', '.join(missing)}", param="model", value=str(folder))
    return folder


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download  # half a second to import, for this branch only
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return _complete(Path(snapshot_download(model, allow_patterns=list(HUB_PATTERNS))))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"no folder {model!r} here, and the Hugging Face Hub did not give it: {reason}",
            param="model",
            value=model,
            hint="check the name; for gated models set HF_TOKEN; offline, name a folder",
        ) from None
