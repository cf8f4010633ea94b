"""The adapters that clients may name as models: which there are, and how they come and go.

`--lora-modules` names some that are there from the start, from any folder. Others are loaded and unloaded while
requests run (`routes_engine`), from below `--lora-root` alone. A name is served from when the engine has read the
adapter until it is unloaded; loaded again, it is another adapter, of which no cache knows anything.
"""

import asyncio
import itertools
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from splittime.api.limits import LoadedAdapter, ModelInfo
from splittime.core.errors import ConfigError, Conflict, NotFound, RequestError
from splittime.core.request import adapter_id
from splittime.drive.client import EngineClient
from splittime.server.config import ADAPTER_NAME, ServerConfig, lora_modules
from splittime.server.service import Service

FILES = ("adapter_config.json", "adapter_model.safetensors")
NO_ROOT = "adapters are not loaded by requests: the server was started without --lora-root"
_numbers = itertools.count(1)


async def load_modules(client: EngineClient, config: ServerConfig) -> Mapping[str, LoadedAdapter]:
    """Has the engine read all of `lora_modules`. Raises what keeps one from being loaded."""
    return {name: await read(client, name, Path(folder)) for name, folder in lora_modules(config.lora_modules).items()}


async def read(client: EngineClient, name: str, folder: Path) -> LoadedAdapter:
    """Has the engine read an adapter. Raises what keeps it from being loaded."""
    loaded = LoadedAdapter(adapter_id(name, next(_numbers)), int(time.time()))
    try:
        await client.load_adapter(loaded.adapter_id, str(folder.absolute()))
    except ConfigError as error:
        info = error.info
        said = f"adapter {name}: {info.message}"
        raise ConfigError(said, param="lora_path", value=info.value, limit=info.limit, hint=info.hint) from error
    return loaded


def folder_below(root: str | None, given: str) -> Path:
    """Returns the folder that a request names, relative to the root or by its whole path. Raises `NotFound` where it,
    or a file in it, lies elsewhere or is not there: which of these is nobody's business."""
    if root is None:
        raise RequestError(NO_ROOT, code="lora_root", status=403, param="lora_path", hint="--lora-modules NAME=FOLDER")
    real_root = Path(root).resolve()
    try:
        folder = (real_root / given).resolve(strict=True)
        inside = [folder, *((folder / name).resolve(strict=True) for name in FILES)]
    except (OSError, ValueError, RuntimeError):
        inside = []
    if not inside or not all(path.is_relative_to(real_root) for path in inside):
        message = (
            f"there is no adapter {given[:200]!r} below the server's lora_root: a folder with {' and '.join(FILES)}"
        )
        raise NotFound(message, code="adapter_not_found", param="lora_path", value=given[:200])
    return inside[0]


def check_new(name: str, model: ModelInfo) -> None:
    """Raises `RequestError` for a name that is taken, or that no adapter may have."""
    if not ADAPTER_NAME.fullmatch(name):
        said = "lora_name must be letters, digits and . _ / : -, and begin with one of the first two"
        raise RequestError(said, param="lora_name", value=name[:200], limit=ADAPTER_NAME.pattern)
    if name in model.served_names:
        hint = "unload it first, or choose another name" if name in model.adapters else "choose another name"
        raise RequestError(f"{name} is served already", code="adapter_exists", param="lora_name", value=name, hint=hint)


async def load(service: Service, name: str, given: str) -> None:
    """Has the adapter read and served. Raises `RequestError` with nothing changed."""
    check_new(name, service.require_ready())
    folder = await asyncio.to_thread(folder_below, service.config.lora_root, given)
    try:
        loaded = await read(service.client, name, folder)
    except ConfigError as error:  # a setting's error there, and the request's fault here
        raise RequestError(
            error.info.message, param="lora_path", limit=error.info.limit, hint=error.info.hint
        ) from error
    model = service.require_model()
    try:
        check_new(name, model)  # once more: another request may have been faster
    except RequestError:
        service.client.unload_adapter(loaded.adapter_id)
        raise
    service.model = replace(model, adapters={**model.adapters, name: loaded})


def unload(service: Service, name: str) -> None:
    """Ends the adapter's service. Raises `NotFound` for a name that is none, and `Conflict` while requests use it."""
    model = service.require_ready()
    loaded = model.adapters.get(name)
    if loaded is None:
        raise NotFound(f"no adapter {name[:200]!r} is loaded", code="adapter_not_found", param="lora_name")
    choices = [choice for group in service.groups.values() for choice in group.choices]
    num_users = sum(choice.request.adapter == loaded.adapter_id for choice in choices)
    if num_users:
        hint = "ask again when they have ended, or end them"
        said = f"{num_users} requests use the adapter {name}"
        raise Conflict(said, code="adapter_in_use", param="lora_name", value=num_users, hint=hint)
    service.model = replace(model, adapters={key: one for key, one in model.adapters.items() if key != name})
    service.client.unload_adapter(loaded.adapter_id)
