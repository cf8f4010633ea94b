"""What `quantization_config` says, as one value for all formats; and how each format reads it.

What changes the meaning of a number and is not carried out is refused with its name and value. What only tells how the
checkpoint was made (a dataset, a damping factor, the kernel its maker preferred) is passed over.
"""

import re
from collections.abc import Mapping, Sequence
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from splittime.core.errors import ConfigError
from splittime.models.fields import LIMITS, MAX_NAMES, Fields
from splittime.models.names import ExpertPlace

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


class Tensors(Protocol):
    def __contains__(self, name: str) -> bool: ...

    def is_int8(self, name: str) -> bool:
        """Returns whether there is such a tensor, of int8."""

    def is_float8(self, name: str) -> bool:
        """Returns whether there is such a tensor, of e4m3."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """None where there is no such tensor."""

    def place_of(self, module: str) -> ExpertPlace | None:
        """`LayerNames.place_of`."""

    def take_stored(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> Tensor:
        """The tensor called `name`. Raises `ConfigError` if absent, of another shape, or of none of these dtypes."""


KEY = "quantization_config"
REPETITIONS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
MAX_PATTERN_CHARS = 500
MAX_REPETITIONS = 4
GROUP_UNIT = 32  # columns that the kernels' groups are multiples of
HINT = (
    "take the unquantised model and round it with --quantization int8 or int4, or a checkpoint in awq (gemm), gptq, "
    "fp8 (blocks of 128 x 128), compressed-tensors (int8, int4, fp8) or, of gpt-oss, mxfp4"
)


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How the linear weights of a checkpoint are stored.

    layout: the format's own name for it. bits: 4 or 8. group_size: columns that share a scale; 0: all of a row.
    scales: of e4m3 what has a scale, as `floats` names it, "" for integers; scale_name: of their tensors.
        has_input_scale: activations have one too. rounds_activations: they are meant to be rounded to 8 bits.
    symmetric: zero points are all in the middle. zero_shift: what to add to a stored zero point; carries: to whole
        words, so that a field that overflows adds one to the next (`gptq`).
    act_order: which group a column is in is stored with each weight.
    exceptions: modules that are not quantised, each as the format matches names. only: the ends of the names of those
        that are; of none: all.
    """

    method: str
    layout: str
    bits: int
    group_size: int
    symmetric: bool
    zero_shift: int = 0
    carries: bool = False
    act_order: bool = False
    exceptions: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    scales: str = ""
    scale_name: str = ""
    has_input_scale: bool = False
    rounds_activations: bool = False


def refuse(key: str, value: Any, want: str) -> ConfigError:
    message = f"config.json: {KEY}.{key} is {value!r}, which is not supported; supported: {want}"
    return ConfigError(message, param=f"{KEY}.{key}", value=_plain(value), hint=HINT)


def refuse_others(values: dict[str, Any], method: str, allowed: Mapping[str, Sequence[Any]]) -> None:
    """Each key, if there, has one of these values."""
    for key, choices in allowed.items():
        value = values.get(key)
        if value is not None and not any(value == choice and type(value) is type(choice) for choice in choices):
            raise refuse(key, value, f"{' or '.join(map(repr, choices))} (of {method})")


def an_object(value: Any, key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(key, value, "an object")
    return value


def object_or_none(value: Any, key: str) -> dict[str, Any] | None:
    return None if value is None else an_object(value, key)


def one_of_each(values: dict[str, Any], place: str, allowed: Mapping[str, Sequence[Any]], told: str = "") -> None:
    """Each key is there and has one of these values."""
    for key, choices in allowed.items():
        if values.get(key) not in choices:
            want = " or ".join(map(repr, choices))
            raise refuse(f"{place}.{key}", values.get(key), f"{want}: {told}" if told else want)


def group_size(fields: Fields, *keys: str) -> int:
    """From the first key that is there: -1 or a multiple of `GROUP_UNIT`; -1 gives 0."""
    key = next((key for key in keys if fields.values.get(key) is not None), keys[0])
    value = fields.values.get(key, 128)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if is_int and value == -1:
        return 0
    most = LIMITS["group_size"].most
    if not is_int or not 1 <= value <= most or value % GROUP_UNIT:
        raise refuse(key, value, f"-1, or a multiple of {GROUP_UNIT} such as 32, 64 or 128, at most {most}")
    return int(value)


def names(fields: Fields, key: str) -> tuple[str, ...]:
    """A list of names, or nothing."""
    listed = fields.values.get(key) or []
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise refuse(key, listed, "a list of module names")
    if len(listed) > MAX_NAMES:
        raise refuse(key, f"a list of {len(listed)} names", f"lists of at most {MAX_NAMES}")
    return tuple(listed)


def is_excepted_by_parts(module: str, recipe: Recipe) -> bool:
    """One or more whole parts of the module's name: "gate" is a router, and no "gate_proj"."""
    return any(f".{name}." in f".{module}." for name in recipe.exceptions)


def patterns(fields: Fields, key: str) -> tuple[str, ...]:
    """As `names`; what begins with "re:" is a regular expression, which must be one, and one that ends soon."""
    listed = names(fields, key)
    for name in listed:
        if name.startswith("re:"):
            _check_pattern(name, key)
    return listed


def _check_pattern(name: str, key: str) -> None:
    """A repetition within a repetition can take exponential time (Friedl, Mastering Regular Expressions, chapter 6),
    and each that follows another multiplies the time by a name's length."""
    try:
        parsed = _parser.parse(name[3:])
        depth, number = _repetition_depth(parsed), _repetitions(parsed)
    except (re.error, RecursionError, OverflowError) as error:
        raise refuse(key, name[:200], f"regular expressions after re: ({error})") from None
    if depth > 1 or number > MAX_REPETITIONS or len(name) > MAX_PATTERN_CHARS:
        want = (
            f"expressions of at most {MAX_PATTERN_CHARS} characters and {MAX_REPETITIONS} repetitions, none of them "
            "within another"
        )
        raise refuse(key, name[:200], want)


def _repetition_depth(parsed: Any) -> int:
    """Returns how deeply * + and {..} are nested; `parsed` is of the standard library's own parser."""
    deepest = 0
    for operation, argument in parsed:
        inner = [_repetition_depth(part) for part in _parts(argument)]
        deepest = max(deepest, max(inner, default=0) + (str(operation) in REPETITIONS))
    return deepest


def _repetitions(parsed: Any) -> int:
    """Returns how many * + and {..} there are; a thing that is there or not (?) is none."""
    return sum(
        (str(operation) in REPETITIONS and argument[1] > 1) + sum(_repetitions(part) for part in _parts(argument))
        for operation, argument in parsed
    )


def _parts(argument: Any) -> list[Any]:
    """The expressions within an operation's argument."""
    if isinstance(argument, _parser.SubPattern):
        return [argument]
    return [part for each in argument for part in _parts(each)] if isinstance(argument, tuple | list) else []


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else repr(value)
