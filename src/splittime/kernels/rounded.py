"""Weights that come as integers (`RoundedRows`): what of them can be packed, and cutting them for the packers.

    int4    groups of a multiple of 32 columns; zero points, minima, both or neither
    int8    one scale a row (group 0), or groups of a multiple of 16 columns; no zero points; minima with groups only
    fp8     e4m3 in the place of integers; one scale a row (group 0), or groups of 128 columns; nothing besides

A group that spans the whole row is `in_features` rounded up to a multiple of these. Scales and minima of groups of
integers are kept as float16 (tests/models/product_bounds.py says what that costs), so they must lie within its range;
those of fp8 stay float32. Three schemes, those of GGUF's K types, have scales and minima in `steps` (`STEPPED`).
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.kernels.api import LinearShape, RoundedRows, WeightScheme

UNITS = {"int8": 16, "int4": 32, "fp8": 128}  # columns of a group: a multiple of these
RANGES = {4: (0, 15), 5: (-16, 15), 6: (-32, 31)}  # by bits
FLOAT8 = torch.float8_e4m3fn
LARGEST_HALF = 65504.0
INT4_ZERO = 8
STEPPED = {("int4", 32, True, 4), ("int8", 32, True, 5), ("int8", 16, False, 6)}  # name, group, minima, bits
STEP_COLUMNS = 256


def check_scheme(scheme: WeightScheme) -> None:
    """Raises `ConfigError` for a scheme in which rounded rows cannot be packed."""
    unit = UNITS.get(scheme.name)
    if unit is None:
        raise _refusal(f"integers cannot be kept as {scheme.name}", scheme.name, list(UNITS))
    if scheme.group % unit or scheme.group < 0 or (scheme.group == 0 and scheme.name == "int4"):
        hint = "a last group may be filled up: one of the whole row is in_features rounded up to such a multiple"
        raise _refusal(f"{scheme.name} in groups of {scheme.group} columns", scheme.group, f"multiples of {unit}", hint)
    if scheme.name == "fp8" and (scheme.group > unit or scheme.has_zeros or scheme.has_minima):
        raise _refusal(f"fp8 as {scheme}", scheme, f"whole rows or groups of {unit}, no zero points, no minima")
    if scheme.name == "int8" and scheme.has_zeros:
        hint = "minima = scales * (zeros - 128), of the integers less 128, say the same"
        raise _refusal("int8 with zero points", True, "zero points of int4", hint)
    kept = (scheme.name, scheme.group, scheme.has_minima, scheme.bits)
    if scheme.bits and (scheme.has_zeros or scheme.is_turned or kept not in STEPPED):
        raise _refusal(f"scales in steps beside {scheme}", scheme, sorted(STEPPED))
    if scheme.has_minima and scheme.group == 0:
        raise _refusal("int8 with minima but no groups", 0, "groups", "give the number of columns as the group")


def num_groups(in_features: int, scheme: WeightScheme) -> int:
    return -(-in_features // scheme.group) if scheme.group else 1


def checked(parts: Iterable[RoundedRows], shape: LinearShape) -> Iterator[RoundedRows]:
    """The parts, one after another, each looked at when it is asked for. Raises `ConfigError`."""
    check_scheme(shape.scheme)
    rows, out_features = 0, shape.out_features
    for part in parts:
        _check_part(part, shape.in_features, shape.scheme)
        rows += len(part.integers)
        if rows > out_features:
            break
        yield part
    if rows != out_features:
        raise _refusal(f"a weight of {out_features} rows came with {rows}", rows, out_features)


def check_columns(columns: Tensor | None, in_features: int) -> None:
    """Raises `ConfigError` unless `columns` are places in a row, one for each column."""
    if columns is None:
        return
    if columns.shape != (in_features,) or columns.dtype != torch.int64:
        raise _refusal("the order of columns has another shape", list(columns.shape), [in_features])
    if in_features and not 0 <= int(columns.min()) <= int(columns.max()) < in_features:
        raise _refusal("the order of columns names a column that is not there", int(columns.max()), in_features - 1)


def in_panels(parts: Iterable[RoundedRows], panel_rows: int) -> Iterator[RoundedRows]:
    """Cut the rows anew: every piece but the last is of a multiple of `panel_rows`."""
    kept: RoundedRows | None = None
    for part in parts:
        kept = part if kept is None else joined([kept, part])
        whole = len(kept.integers) // panel_rows * panel_rows
        if whole:
            yield rows_of(kept, 0, whole)
            kept = rows_of(kept, whole, len(kept.integers))
    if kept is not None and len(kept.integers):
        yield kept


def joined(parts: Iterable[RoundedRows]) -> RoundedRows:
    """These rows, one below the other."""
    columns = zip(*((part.integers, part.scales, part.zeros, part.minima, part.steps) for part in parts), strict=True)
    return RoundedRows(*(None if some[0] is None else torch.cat(some) for some in columns))  # type: ignore[arg-type]


def rows_of(part: RoundedRows, begin: int, end: int) -> RoundedRows:
    kept = (part.integers, part.scales, part.zeros, part.minima, part.steps)
    return RoundedRows(*(None if one is None else one[begin:end] for one in kept))  # type: ignore[arg-type]


def as_packed(part: RoundedRows, scheme: WeightScheme) -> RoundedRows:
    """With minima in the place of zero points where there are both, which a packed weight has no room for:
    s (q - z) - m = s (q - 8) - (m + s (z - 8))."""
    if not (scheme.has_zeros and scheme.has_minima):
        return part
    assert part.zeros is not None
    assert part.minima is not None
    return RoundedRows(part.integers, part.scales, None, part.minima + part.scales * (part.zeros.float() - INT4_ZERO))


def _check_part(part: RoundedRows, in_features: int, scheme: WeightScheme) -> None:
    rows, groups = len(part.integers), num_groups(in_features, scheme)
    steps = (rows, 1 + scheme.has_minima, -(-in_features // STEP_COLUMNS))
    wanted = {
        "integers": (part.integers, True, (rows, in_features), FLOAT8 if scheme.name == "fp8" else torch.int8),
        "scales": (part.scales, True, (rows, groups), torch.float32),
        "zeros": (part.zeros, scheme.has_zeros, (rows, groups), torch.uint8),
        "minima": (part.minima, scheme.has_minima, (rows, groups), torch.float32),
        "steps": (part.steps, scheme.bits > 0, steps, torch.float32),
    }
    for name, (tensor, is_there, shape, dtype) in wanted.items():
        if (tensor is not None) != is_there:
            raise _refusal(f"{name} of rounded rows are {'missing' if is_there else 'not in the scheme'}", name, scheme)
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype):
            found = f"{tensor.dtype} {list(tensor.shape)}"
            raise _refusal(f"{name} of rounded rows are {found}", found, f"{dtype} {list(shape)}")
    _check_values(part, scheme)


def _check_values(part: RoundedRows, scheme: WeightScheme) -> None:
    if scheme.name == "fp8":
        return
    if (scheme.name == "int4" or scheme.bits) and part.integers.numel():
        low, high = RANGES[scheme.bits or 4]
        for name, values in (("integers", part.integers), ("zeros", part.zeros)):
            if values is not None and (int(values.min()) < low or int(values.max()) > high):
                found = [int(values.min()), int(values.max())]
                raise _refusal(f"{name} of {scheme.name} rows are in {found[0]} to {found[1]}", found, [low, high])
    if not scheme.group:
        return
    for name, numbers in (("scales", part.scales), ("minima", part.minima)):
        most = 0.0 if numbers is None or not numbers.numel() else float(numbers.abs().max())
        if most > LARGEST_HALF and most != float("inf"):
            raise _refusal(f"{name} of groups reach {most:g}", most, LARGEST_HALF, "they are kept as float16")


def _refusal(what: str, value: object, limit: object, hint: str | None = None) -> ConfigError:
    return ConfigError(f"{what}; possible: {limit}", param="weights", value=str(value), limit=str(limit), hint=hint)
