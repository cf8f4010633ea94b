"""Whether a model's weights fit the layout that was asked for: refused before any work, with what would fit."""

from collections.abc import Iterator

from splittime.core.errors import ConfigError
from splittime.models.config import ModelConfig
from splittime.quantize import layer_map
from splittime.quantize.settings import WHOLE_ROW, Settings

USUAL_GROUPS = (128, 64, 32)


def check(config: ModelConfig, settings: Settings) -> None:
    """Raises `ConfigError` naming the weight, its width and what it must be a multiple of."""
    for name, (out_features, in_features) in _linears(config):
        if settings.prune == "2:4":
            _need(name, "columns", in_features, 4, "use --prune unstructured --sparsity 0.5")
        if settings.group_size not in (None, WHOLE_ROW):
            _need(name, "columns", in_features, settings.group_size or 1, _fitting_group(config))
        per_word = 32 // (settings.bits or 32)
        hint = "use --scheme w4a16 or int8, which fill the last word of a row up"
        if settings.scheme == "gptq":
            _need(name, "columns", in_features, per_word, hint)
        if settings.scheme in ("awq", "gptq"):
            _need(name, "rows", out_features, per_word, hint)


def _linears(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int]]]:
    for index in range(config.num_layers):
        for name, shape in layer_map.linear_shapes(config, index).items():
            yield layer_map.layer_prefix(index) + name, shape


def _need(name: str, what: str, count: int, unit: int, hint: str) -> None:
    if count % unit:
        message = f"{name} has {count} {what}, not a multiple of {unit}"
        raise ConfigError(message, param=name, value=count, limit=unit, hint=hint)


def _fitting_group(config: ModelConfig) -> str:
    widths = {shape[1] for _, shape in _linears(config)}
    for group in USUAL_GROUPS:
        if all(width % group == 0 for width in widths):
            return f"--group-size {group} fits this model"
    return "--group-size -1, one scale for each row, fits every model"
