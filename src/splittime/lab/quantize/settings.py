"""What is asked of `quantize`, checked before anything is read.

A flag that the chosen scheme has no use for is refused rather than ignored. `--scheme` and `--prune` exclude each
other: the kernels skip no zeros, so a pruned checkpoint stays dense, and one that is both would only be worse.
"""

from typing import Any

import msgspec

from splittime.core.errors import ConfigError

SCHEMES = ("int8", "fp8", "w8a8", "w4a16", "awq", "gptq")
PATTERNS = ("2:4", "unstructured")
METRICS = ("magnitude", "wanda")
GROUPED = ("w4a16", "awq", "gptq")
DEFAULT_GROUP = 128
GROUP_UNIT = 32  # what this server and others have kernels for
DEFAULT_SMOOTH = 0.5
DEFAULT_SAMPLES = 128
WHOLE_ROW = -1  # as a group size, in the published configurations


class QuantizeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """None: not given. What stands here decides the result, to the last bit, and is compared when a run goes on.

    samples, length: windows of calibration text, and their tokens (None: 512, or the model's context).
    """

    scheme: str | None = None
    group_size: int | None = None
    bits: int | None = None
    act_order: bool = False
    static_groups: bool = False
    smooth: float | None = None
    prune: str | None = None
    sparsity: float | None = None
    metric: str | None = None
    samples: int = DEFAULT_SAMPLES
    length: int | None = None
    seed: int = 0

    def resolved(self) -> "QuantizeSettings":
        """With the defaults of the scheme filled in. Raises `ConfigError` naming what does not belong to it."""
        if (self.scheme is None) == (self.prune is None):
            raise _bad("scheme", self.scheme, f"give either --scheme {'|'.join(SCHEMES)}, or --prune 2:4|unstructured")
        for name, least in (("samples", 1), ("length", 2), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and not least <= value < 1 << 31:
                raise _bad(name, value, f"give a whole number from {least} on", least)
        return _resolve_pruning(self) if self.scheme is None else _resolve_scheme(self, self.scheme)

    @property
    def needs_text(self) -> bool:
        """Returns whether there is no result without calibration text (of resolved settings)."""
        return self.scheme in ("awq", "gptq") or self.metric == "wanda" or bool(self.smooth)


def settings_from(fields: dict[str, Any], *, has_text: bool) -> QuantizeSettings:
    """Returns the settings of what was given, by name; None means not given. Raises `ConfigError` if it cannot be."""
    settings = QuantizeSettings(**{name: value for name, value in fields.items() if value is not None})
    settings.resolved()  # to check it; the job fills in the scheme's defaults
    for name in ("samples", "length", "seed"):
        value = fields[name]
        if value is not None and not has_text:
            raise ConfigError(f"--{name} {value}: it belongs to --calibrate FILE, and there is none", param="calibrate")
    return settings


def _resolve_scheme(settings: QuantizeSettings, scheme: str) -> QuantizeSettings:
    if scheme not in SCHEMES:
        raise _bad("scheme", scheme, f"one of {', '.join(SCHEMES)}", list(SCHEMES))
    for name in ("sparsity", "metric"):
        _refuse_foreign(settings, name, getattr(settings, name) is not None, "--prune")
    _refuse_foreign(settings, "act_order", settings.act_order and scheme != "gptq", "--scheme gptq")
    _refuse_foreign(settings, "static_groups", settings.static_groups and not settings.act_order, "--act-order")
    _refuse_foreign(settings, "smooth", settings.smooth is not None and scheme != "w8a8", "--scheme w8a8")
    _refuse_foreign(
        settings,
        "group_size",
        settings.group_size not in (None, WHOLE_ROW) and scheme not in GROUPED,  # whole rows are what they have
        f"--scheme {'|'.join(GROUPED)}",
    )
    return msgspec.structs.replace(
        settings,
        bits=_bits(settings, scheme),
        group_size=_group_size(settings, scheme),
        smooth=_smooth(settings, scheme),
    )


def _bits(settings: QuantizeSettings, scheme: str) -> int:
    usual = 8 if scheme in ("int8", "fp8", "w8a8") else 4
    allowed = (4, 8) if scheme == "gptq" else (usual,)
    bits = settings.bits or usual
    if bits not in allowed:
        raise _bad("bits", bits, f"{scheme} has {' or '.join(map(str, allowed))}", list(allowed))
    return bits


def _group_size(settings: QuantizeSettings, scheme: str) -> int:
    if scheme not in GROUPED:
        return WHOLE_ROW
    size = DEFAULT_GROUP if settings.group_size is None else settings.group_size
    if size != WHOLE_ROW and (size < GROUP_UNIT or size % GROUP_UNIT):
        raise _bad("group_size", size, f"a multiple of {GROUP_UNIT}, or -1 for whole rows", GROUP_UNIT)
    return size


def _smooth(settings: QuantizeSettings, scheme: str) -> float | None:
    if scheme != "w8a8":
        return None
    smooth = DEFAULT_SMOOTH if settings.smooth is None else settings.smooth
    if not 0 <= smooth <= 1:
        raise _bad("smooth", smooth, "from 0 (off) to 1 (all of the difficulty goes into the weights)", [0, 1])
    return smooth


def _resolve_pruning(settings: QuantizeSettings) -> QuantizeSettings:
    for name, value in (("group_size", settings.group_size), ("bits", settings.bits), ("smooth", settings.smooth)):
        _refuse_foreign(settings, name, value is not None, "--scheme")
    _refuse_foreign(settings, "act_order", settings.act_order, "--scheme gptq")
    _refuse_foreign(settings, "static_groups", settings.static_groups, "--scheme gptq --act-order")
    if settings.prune not in PATTERNS:
        raise _bad("prune", settings.prune, f"one of {', '.join(PATTERNS)}", list(PATTERNS))
    metric = settings.metric or "magnitude"
    if metric not in METRICS:
        raise _bad("metric", metric, f"one of {', '.join(METRICS)}", list(METRICS))
    sparsity = 0.5 if settings.sparsity is None and settings.prune == "2:4" else settings.sparsity
    if sparsity is None:
        raise _bad("sparsity", sparsity, "--prune unstructured needs --sparsity, as in --sparsity 0.5")
    if settings.prune == "2:4" and sparsity != 0.5:
        raise _bad("sparsity", sparsity, "2:4 is a sparsity of 0.5 by definition", 0.5)
    if not 0 < sparsity < 1:
        raise _bad("sparsity", sparsity, "a share above 0 and below 1", [0, 1])
    return msgspec.structs.replace(settings, metric=metric, sparsity=sparsity)


def _refuse_foreign(settings: QuantizeSettings, name: str, is_given: bool, owner: str) -> None:
    if is_given:
        raise _bad(name, getattr(settings, name), f"it belongs to {owner}")


def _bad(name: str, value: object, want: str, limit: object = None) -> ConfigError:
    flag = "--" + name.replace("_", "-")
    given = flag if value is None or value is True else f"{flag} {value}"
    return ConfigError(f"{given}: {want}", param=name, value=value, limit=limit)
