"""What came of a run: bytes, the error of each kind of weight, time."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from splittime.lab.quantize import layer_map
from splittime.lab.quantize.calibration import Calibration
from splittime.lab.quantize.settings import QuantizeSettings
from splittime.lab.quantize.source import QuantizeSource

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
