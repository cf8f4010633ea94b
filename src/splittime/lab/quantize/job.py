"""Quantising a checkpoint: layer by layer, in bounded memory, so that it can be killed and goes on.

    for each layer: finished before?  else read it -> treat it -> write it to the work folder
                    then, while layers are left, the calibration text's hidden states one layer on
    at the end:     put the checkpoint together from the layers' files and rename it into place

In memory at a time: one layer in float32 as it was and as it becomes, at most `treat.GRAM_BYTES` of gram matrices (or
one, if that is larger) and what its factorisation needs, and the hidden states (`forward.begin_states`). The result
depends on the checkpoint, the settings, the windows of text and the number of threads, which the manifest keeps:
nothing else, so a run that was killed and one that was not end in the same bytes.

Putting the new checkpoint together in the work folder: weights in shards, config.json, and the files beside it.

`config.json` gets the fields that transformers, vLLM and others read: compressed-tensors' `QuantizationConfig`,
GPTQModel's and AutoAWQ's quantization_config. `desc_act` says that columns must be put in another order at run time,
which static groups need not; vLLM 0.32 refuses it. The head and the routers of experts stay as they are and are named
where the format has a place for it. A pruned checkpoint is an ordinary dense one: its note tells people, no loader
needs it.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from splittime import __version__
from splittime.core.errors import ConfigError
from splittime.lab.quantize import layer_map, rounding, tensor_file, treat
from splittime.lab.quantize.calibration import Calibration
from splittime.lab.quantize.forward import IN_MEMORY_BYTES, Moments, Sequences, begin_states
from splittime.lab.quantize.layer_map import QuantizeSource
from splittime.lab.quantize.rounding import LAYOUTS, SUFFIXES, unpack
from splittime.lab.quantize.settings import WHOLE_ROW, QuantizeSettings
from splittime.lab.quantize.tensor_file import TensorEntry, Work
from splittime.lab.quantize.treat import Treatment
from splittime.models.config import ModelConfig
from splittime.models.weights.shard_files import INDEX_NAME, SINGLE_NAME

SHARD_BYTES = 4 << 30
COPIED = (
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    "chat_template.json",
)
SPARSITY_KEY = "splittime_sparsity"
COPIED_PATTERNS = ("LICENSE*", "NOTICE*")


def assemble(source: QuantizeSource, work: Work, settings: QuantizeSettings, shard_bytes: int = SHARD_BYTES) -> None:
    """Fill the folder that `Work.finish` renames; raises `ConfigError` where it cannot be written."""
    try:
        folder = work.begin_result()
        _write_weights(source, work, folder, shard_bytes)
        tensor_file.write_json(folder / "config.json", _with_note(source.values, source.config, settings))
        for path in _beside(source.folder):
            shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise tensor_file.unwritable(work.folder, error) from error


def _write_weights(source: QuantizeSource, work: Work, folder: Path, shard_bytes: int) -> None:
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


def _shards(entries: list[TensorEntry], limit: int) -> Iterator[list[TensorEntry]]:
    """As many tensors in a file as stay within the limit, at least one."""
    shard: list[TensorEntry] = []
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


def _with_note(values: dict[str, Any], config: ModelConfig, settings: QuantizeSettings) -> dict[str, Any]:
    """Returns the values of the old config.json with a note of the resolved settings."""
    if settings.scheme is None:
        note = {"pattern": settings.prune, "sparsity": settings.sparsity, "metric": settings.metric, "layout": "dense"}
        return {**values, SPARSITY_KEY: note}
    return {**values, "quantization_config": _quantization(config, settings, settings.scheme)}


def _quantization(config: ModelConfig, settings: QuantizeSettings, scheme: str) -> dict[str, Any]:
    routers = _routers(config)
    if scheme == "gptq":
        return {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "bits": settings.bits,
            "group_size": settings.group_size,
            "desc_act": settings.act_order and not settings.static_groups,
            "static_groups": settings.static_groups,
            "sym": True,
            "true_sequential": True,
            "damp_percent": rounding.DAMPING,
            "lm_head": False,
            "meta": {"quantizer": [f"splittime:{__version__}"]},
        }
    if scheme == "awq":
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": settings.bits,
            "group_size": settings.group_size,
            "zero_point": True,
            "modules_to_not_convert": routers or None,
        }
    return {
        "quant_method": "compressed-tensors",
        "format": LAYOUTS[scheme],
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head", *routers],
        "config_groups": {"group_0": _scheme(settings, scheme)},
    }


def _scheme(settings: QuantizeSettings, scheme: str) -> dict[str, Any]:
    is_whole = settings.group_size == WHOLE_ROW
    kind = "float" if scheme == "fp8" else "int"
    weights = _arguments(settings.bits or 0, kind, "channel" if is_whole else "group", is_dynamic=False)
    weights["group_size"] = None if is_whole else settings.group_size
    activations = _arguments(8, kind, "token", is_dynamic=True) if scheme in ("w8a8", "fp8") else None
    return {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}


def _arguments(bits: int, kind: str, strategy: str, is_dynamic: bool) -> dict[str, Any]:
    """compressed-tensors' `QuantizationArgs`."""
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "dynamic": is_dynamic,
        "actorder": None,
        "block_structure": None,
        "observer": None if is_dynamic else "minmax",
        "observer_kwargs": {},
    }


def _routers(config: ModelConfig) -> list[str]:
    found = ((index, layer_map.router(config, index)) for index in range(config.num_layers))
    return [layer_map.layer_prefix(index) + name for index, name in found if name is not None]


PRUNED = "No kernel here skips zeros: the pruned checkpoint is as large and as slow as the one it was made of."


class KindError(msgspec.Struct, frozen=True):
    """Relative errors of all weights of a kind (q_proj, ...): root mean square of the change over that of the whole."""

    kind: str
    weights: int
    mean: float
    worst: float
    worst_weight: str


class QuantizeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """error_of: "outputs", of the linears on the calibration text, or "weights" where there was none. hidden_bytes: the
    hidden states kept between layers. resumed_layers: finished by an earlier run. honest: what one might expect and
    will not get."""

    out: str
    settings: QuantizeSettings
    layers: int
    resumed_layers: int
    bytes_before: int
    bytes_after: int
    error_of: str
    errors: tuple[KindError, ...]
    calibration_tokens: int
    hidden_bytes: int
    seconds: float
    honest: str | None


def summarise(
    source: QuantizeSource,
    out: Path,
    settings: QuantizeSettings,
    calibration: Calibration | None,
    errors: Sequence[Mapping[str, float]],
    resumed_layers: int,
    taken_ns: int,
) -> QuantizeSummary:
    tokens = 0 if calibration is None else calibration.windows.numel()
    return QuantizeSummary(
        out=str(out),
        settings=settings,
        layers=len(errors),
        resumed_layers=resumed_layers,
        bytes_before=source.num_bytes,
        bytes_after=sum(path.stat().st_size for path in out.glob("*.safetensors")),
        error_of="weights" if calibration is None else "outputs",
        errors=_by_kind(errors),
        calibration_tokens=tokens,
        hidden_bytes=4 * tokens * source.config.hidden_size,
        seconds=round(taken_ns / 1e9, 3),
        honest=PRUNED if settings.scheme is None else None,
    )


def _by_kind(errors: Sequence[Mapping[str, float]]) -> tuple[KindError, ...]:
    found: dict[str, list[tuple[float, str]]] = {}
    for index, layer in enumerate(errors):
        for name, error in layer.items():
            entry = (error, layer_map.layer_prefix(index) + name)
            found.setdefault(layer_map.kind_of(name), []).append(entry)
    return tuple(
        KindError(kind, len(seen), sum(error for error, _ in seen) / len(seen), *max(seen))
        for kind, seen in found.items()
    )


SMALL_LAYER_ELEMENTS = 4 << 20
FORMAT = 1  # raise with any change to what a layer's file holds
OnLayer = Callable[[int, int], None]


def quantize(
    model: Path,
    out: Path,
    settings: QuantizeSettings,
    calibration: Calibration | None = None,
    *,
    on_layer: OnLayer = lambda done, total: None,
    on_step: treat.OnStep = lambda text: None,
    in_memory_bytes: int = IN_MEMORY_BYTES,
    shard_bytes: int = SHARD_BYTES,
) -> QuantizeSummary:
    """Write `model` to `out` as `settings` say. on_layer(done, of) is called when a layer is on the disk.

    Raises `ConfigError` for what cannot be done, before work begins where that can be known.
    """
    settings = settings.resolved()
    if calibration is None and settings.needs_text:
        raise _no_text(settings)
    source = QuantizeSource(model)
    layer_map.check_fit(source.config, settings)
    work = Work(out)
    previous = torch.get_num_threads()
    try:
        threads = work.adopt(_identity(source, settings, calibration, work.folder), _num_threads(source, previous))
        torch.set_num_threads(threads)
        job = _Job(source, work, settings, calibration, in_memory_bytes, on_step)
        with torch.inference_mode():
            return job.run(on_layer, shard_bytes)
    finally:
        torch.set_num_threads(previous)
        work.close()


def _no_text(settings: QuantizeSettings) -> ConfigError:
    what = settings.scheme or "wanda"
    other = {"w8a8": "--smooth 0, plain rounding", "wanda": "--metric magnitude"}.get(what, "--scheme w4a16")
    return ConfigError(
        f"{what} looks at what the model's layers see in text, and there is none",
        param="calibrate",
        hint=f"give --calibrate FILE with text like what the model will be asked, or use {other}",
    )


def _identity(
    source: QuantizeSource, settings: QuantizeSettings, calibration: Calibration | None, folder: Path
) -> dict[str, object]:
    """Returns what the result depends on; plain data, as JSON gives it back."""
    return {
        "format": FORMAT,
        "splittime": __version__,
        "torch": torch.__version__,
        "checkpoint": source.identity(folder),
        "calibration": None if calibration is None else calibration.digest,
        **msgspec.to_builtins(settings),
    }


def _num_threads(source: QuantizeSource, usual: int) -> int:
    """One for small layers: dividing their many short operations costs more than it saves, on a busy machine 10 times
    as much (704 x 256 by GPTQ: 0.2 s with one thread, 2 s with two beside another process)."""
    elements = sum(rows * columns for rows, columns in layer_map.linear_shapes(source.config, 0).values())
    return usual if elements >= SMALL_LAYER_ELEMENTS else 1


class _Job:
    def __init__(
        self,
        source: QuantizeSource,
        work: Work,
        settings: QuantizeSettings,
        calibration: Calibration | None,
        in_memory_bytes: int,
        on_step: treat.OnStep,
    ) -> None:
        self.source = source
        self.work = work
        self.settings = settings
        self.calibration = calibration
        self.on_step = on_step
        self.in_memory_bytes = in_memory_bytes
        dtype = getattr(torch, source.config.checkpoint_dtype)
        self.grid = None if settings.scheme is None else treat.grid_of(settings, dtype)
        self.states: Tensor | None = None
        self.sequences: Sequences | None = None

    def run(self, on_layer: OnLayer, shard_bytes: int) -> QuantizeSummary:
        begin_ns = time.monotonic_ns()
        total = self.source.config.num_layers
        finished = [self.work.is_done or self.work.layer_path(index).exists() for index in range(total)]
        if self.calibration is not None and not all(finished):
            self._begin_states(self.calibration)
        for index in range(total):
            carried = None if finished[index] else self._make(index)
            on_layer(index + 1, total)
            if not all(finished[index + 1 :]):
                self._carry(index, carried)
        self.states = None
        errors = [self.work.errors(index) for index in range(total)]
        if not self.work.is_done:
            self.on_step("writing the checkpoint")
            assemble(self.source, self.work, self.settings, shard_bytes)
        self.work.finish()
        return summarise(
            self.source,
            self.work.out,
            self.settings,
            self.calibration,
            errors,
            sum(finished),
            time.monotonic_ns() - begin_ns,
        )

    def _begin_states(self, calibration: Calibration) -> None:
        windows, config = calibration.windows, self.source.config
        largest = int(windows.max())
        if largest >= config.vocab_size:
            raise ConfigError(
                f"the calibration text has token id {largest}, the model has {config.vocab_size} tokens",
                param="calibrate",
                value=largest,
                limit=config.vocab_size,
                hint="the folder's tokenizer.json is of another model",
            )
        self.on_step("reading the calibration text")
        embedding = self.source.embedding()
        self.states = begin_states(
            windows,
            embedding,
            self.source.config.embedding_factor,
            self.work.folder / "hidden.f32",
            self.in_memory_bytes,
        )
        self.source.checkpoint.release(embedding)
        self.sequences = Sequences(config, windows.shape[1])

    def _make(self, index: int) -> Mapping[str, Tensor]:
        """Treat the layer and write it; -> the weights that the text goes on through."""
        original = self.source.layer(index)
        gather = self._gather(index) if self.states is not None else None
        treatment = Treatment(
            self.settings, self.grid, self.source.config, index, original, self.source.dtypes, gather, self.on_step
        )
        treatment.run()
        self.work.keep_layer(index, treatment.tensors(), treatment.errors_in_order())
        return treatment.weights if treat.is_sequential(self.settings) else original

    def _gather(self, index: int) -> treat.Gather:
        def gather(weights: Mapping[str, Tensor], widths: Mapping[str, int]) -> dict[str, Moments | None]:
            assert self.sequences is not None
            assert self.states is not None
            found = self.sequences.gather(index, weights, self.states, widths)
            return {tap: gatherer.moments() for tap, gatherer in found.items()}

        return gather

    def _carry(self, index: int, weights: Mapping[str, Tensor] | None) -> None:
        """The text one layer on; of a layer that an earlier run finished, the weights are read again."""
        if self.states is None or self.sequences is None:
            return
        self.on_step("text through the layer")
        self.sequences.run(index, weights or self._finished_weights(index), self.states, self.states)

    def _finished_weights(self, index: int) -> Mapping[str, Tensor]:
        original = self.source.layer(index)
        if not treat.is_sequential(self.settings):
            return original
        prefix = layer_map.layer_prefix(index)
        stored = self.work.layer_tensors(index)
        linears = layer_map.linear_shapes(self.source.config, index) if self.grid is not None else {}
        found = {name: stored[prefix + name].float() for name in original if prefix + name in stored}
        for name in linears:
            assert self.grid is not None
            layout = LAYOUTS[self.settings.scheme or ""]
            parts = {suffix: stored[f"{prefix}{name}.{suffix}"] for suffix in SUFFIXES[layout]}
            found[f"{name}.weight"] = unpack(layout, parts, self.grid).values()
        return found
