"""How a model's outputs become an embedding, by the files that come with it: `core.facts.Pooling`.

    modules.json              sentence-transformers' list: a transformer, a pooling, perhaps a normalisation
    1_Pooling/config.json     which pooling; the folder has the name that modules.json gives it
    2_Dense/config.json, ..   layers behind the pooling, of an encoder (`dense_layers`)
    config.json               is_matryoshka, matryoshka_dimensions: may an embedding be cut; as vLLM reads them
    ARCHITECTURE.pooling_type   of a GGUF file, as llama.cpp reads it; its embeddings are normalised

What these ask for and is not implemented (another kind of pooling, a dense layer of a decoder) refuses embeddings by
name, and nothing else: the model may generate all the same. Files that cannot be meant are refused at the start.
"""

from pathlib import Path

import msgspec

from splittime.core.errors import ConfigError
from splittime.core.facts import Pooling
from splittime.models.fields import LIMITS, MAX_CONFIG_BYTES, Bounds, Fields, read_bounded, read_json

MODULES = "modules.json"
MODES = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}
GIVEN = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
ANY_MODE = "pooling_mode_"
DENSE, SIZES = "Dense", ("in_features", "out_features")
GGUF_KINDS = ("", "mean", "cls", "last", "")  # none, ..., rank


class _Module(msgspec.Struct):
    type: str
    path: str = ""

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


def read_pooling(folder: Path, values: dict[str, object], size: int, has_dense: bool = False) -> Pooling:
    """values: of the folder's config.json. size: of the model's outputs. has_dense: layers behind the pooling are
    computed. Raises `ConfigError` for files that cannot be meant."""
    own, modules = Fields(values), _modules(folder / MODULES) if (folder / MODULES).exists() else []
    dense = [module for module in modules if has_dense and module.kind == DENSE]
    if dense:
        size = _config(folder, dense[-1]).count("out_features")
    cuts = own.ints("matryoshka_dimensions", Bounds(1, size))
    plain = Pooling(size=size, sizes=cuts, may_be_cut=own.flag("is_matryoshka", True) or bool(cuts))
    if not modules:
        return plain
    said = msgspec.structs.replace(plain, named_by=MODULES, is_normalised=modules[-1].kind == "Normalize")
    kinds = [module.kind for module in modules]
    wanted = ["Transformer", "Pooling", *[DENSE] * len(dense), "Normalize"][: max(2 + len(dense), len(kinds))]
    if kinds != wanted:
        refusal = f"{MODULES} asks for {', '.join(kinds)}; Transformer, Pooling and Normalize are what there is"
        return msgspec.structs.replace(said, refusal=refusal)
    return _of_kind(said, *_kind(folder, modules[1]))


def _of_kind(said: Pooling, kind: str, asked: str) -> Pooling:
    if kind:
        return msgspec.structs.replace(said, kind=kind)
    return msgspec.structs.replace(said, refusal=f"pooling by {asked} is not implemented; cls, mean and lasttoken are")


def _modules(path: Path) -> list[_Module]:
    try:
        modules = msgspec.json.decode(read_bounded(path, MAX_CONFIG_BYTES), type=list[_Module])
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", param="model_path", value=str(path)) from error
    if not modules:
        raise ConfigError(f"{path} names no module", param="model_path", value=str(path))
    return modules


def _kind(folder: Path, module: _Module) -> tuple[str, str]:
    """Returns the pooling that a module's folder names, "" for one that is not there, and what it is called."""
    fields = _config(folder, module)
    if (given := fields.text("pooling_mode", "")) != "":
        return GIVEN.get(given, ""), given
    asked = [name for name in fields.values if name.startswith(ANY_MODE) and fields.flag(name, False)]
    names = " and ".join(name.removeprefix(ANY_MODE) for name in asked) or "nothing"
    return MODES.get(asked[0], "") if len(asked) == 1 else "", names


def dense_layers(folder: Path) -> list[tuple[Path, Fields]]:
    """Returns the folder and the config of each layer behind the pooling, in order."""
    modules = _modules(folder / MODULES) if (folder / MODULES).exists() else []
    return [(folder / each.path, _config(folder, each)) for each in modules if each.kind == DENSE]


def _config(folder: Path, module: _Module) -> Fields:
    """Returns what a module's folder says of it."""
    if Path(module.path).name != module.path or module.path in ("", ".."):
        said = f"{MODULES} names the folder {module.path!r}, must be the plain name of one beside it"
        raise ConfigError(said, param="path", value=module.path)
    said = f"{module.path}/config.json"
    return Fields(read_json(folder / said), file=said, limits=LIMITS | dict.fromkeys(SIZES, LIMITS["hidden_size"]))


def gguf_pooling(kind: int | None, key: str, size: int) -> Pooling:
    """kind: what the file has under this key; None and 0: nothing."""
    if not kind:
        return Pooling(size=size)
    return _of_kind(Pooling(size=size, named_by=key), GGUF_KINDS[kind], f"{key} {kind}")
