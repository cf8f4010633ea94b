"""Putting the new checkpoint together in the work folder: weights in shards, config.json, and the files beside it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from splittime.models.weights.shard_files import INDEX_NAME, SINGLE_NAME
from splittime.quantize import tensor_file
from splittime.quantize.config_note import noted
from splittime.quantize.settings import Settings
from splittime.quantize.source import Source
from splittime.quantize.tensor_file import Entry
from splittime.quantize.work import Work

SHARD_BYTES = 4 << 30
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
COPIED_PATTERNS = ("LICENSE*", "NOTICE*")


def assemble(source: Source, work: Work, settings: Settings, shard_bytes: int = SHARD_BYTES) -> None:
    """Fill the folder that `Work.finish` renames; raises `ConfigError` where it cannot be written."""
    try:
        folder = work.begin_result()
        _write_weights(source, work, folder, shard_bytes)
        tensor_file.write_json(folder / "config.json", noted(source.values, source.config, settings))
        for path in _beside(source.folder):
            shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise tensor_file.unwritable(work.folder, error) from error


def _write_weights(source: Source, work: Work, folder: Path, shard_bytes: int) -> None:
    entries = list(source.outer_entries())
    for index in range(source.config.num_layers):
        entries += work.layer_entries(index)
    shards = list(_shards(entries, shard_bytes))
    if len(shards) == 1:
        tensor_file.write(folder / SINGLE_NAME, shards[0])
        return
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        tensor_file.write(folder / name, shard)
    places = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(entry.num_bytes for entry in entries)
    tensor_file.write_json(
        folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    )


def _shards(entries: list[Entry], limit: int) -> Iterator[list[Entry]]:
    """As many tensors in a file as stay within the limit, at least one."""
    shard: list[Entry] = []
    taken_bytes = 0
    for entry in entries:
        if shard and taken_bytes + entry.num_bytes > limit:
            yield shard
            shard, taken_bytes = [], 0
        shard.append(entry)
        taken_bytes += entry.num_bytes
    yield shard


def _beside(folder: Path) -> Iterator[Path]:
    for pattern in (*COPIED, *COPIED_PATTERNS):
        yield from sorted(path for path in folder.glob(pattern) if path.is_file())
