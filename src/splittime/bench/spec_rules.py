"""What a `LoadSpec` may be: the range of each field, and which fields contradict each other. `check` is all of it.

Every refusal names the field, its value, the limit, and the way out. A field that would have no effect is refused too.
"""

import math
from typing import Any

import msgspec

from splittime.bench.distributions import parse_distribution
from splittime.bench.spec import LoadSpec, choices_of
from splittime.core.errors import ConfigError

DEFAULT_DURATION_S = 60.0
MAX_REQUESTS = 1_000_000
_PLAIN = LoadSpec()

_RANGES = (
    ("cv", 0.0, 100.0),
    ("num_requests", 1, MAX_REQUESTS),
    ("concurrency", 1, 100_000),
    ("warm_up_s", 0.0, 86_400.0),
    ("warm_up_requests", 0, MAX_REQUESTS),
    ("cool_down_s", 0.0, 86_400.0),
    ("cool_down_requests", 0, MAX_REQUESTS),
    ("seed", 0, 2**63 - 1),
    ("prefix_share", 0.0, 1.0),
    ("prefix_groups", 1, MAX_REQUESTS),
    ("expected_ttft_ms", 0.0, math.inf),
    ("expected_tpot_ms", 0.0, math.inf),
    ("cancel_probability", 0.0, 1.0),
    ("slow_reader_share", 0.0, 1.0),
    ("slow_reader_delay_ms", 0.0, 3_600_000.0),
)
_POSITIVE = ("rate", "rate_end", "ramp_s", "duration_s", "speed_up", "length_scale")
_DISTRIBUTIONS = (
    ("input_tokens", 1),
    ("output_tokens", 1),
    ("turn_input_tokens", 1),
    ("turns", 1),
    ("think_s", 0),
    ("cancel_after_s", 0),
)


def check(spec: LoadSpec) -> None:
    """Raises `ConfigError` for the first thing that cannot be."""
    _check_types(spec)
    for name, low, high in _RANGES:
        _check_range(name, getattr(spec, name), low, high)
    for name in _POSITIVE:
        _check_positive(name, getattr(spec, name))
    for name, least in _DISTRIBUTIONS:
        if getattr(spec, name) is not None:
            parse_distribution(getattr(spec, name), name, least)
    for rule in (_check_loop, _check_ramp, _check_phases, _check_files, _check_lengths, _check_sessions):
        rule(spec)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check_types(spec: LoadSpec) -> None:
    try:
        msgspec.convert(msgspec.to_builtins(spec), LoadSpec)
    except msgspec.ValidationError as error:
        why, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        value, choices = getattr(spec, name), choices_of(name)
        hint = f"It is one of {', '.join(choices)}." if choices else "See --help."
        raise ConfigError(f"{name} is {value!r}: {why}", param=name, value=value, limit=choices, hint=hint) from error


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        limit = f"{low} to {high}" if high < math.inf else f"at least {low}"
        raise ConfigError(f"{name} is {value}; it must be {limit}", param=name, value=value, limit=limit)


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        limit = "greater than 0, and finite"
        raise ConfigError(f"{name} is {value}; it must be {limit}", param=name, value=value, limit=limit)


def _refuse(spec: LoadSpec, name: str, why: str, hint: str) -> None:
    """If the field is not as by default, it was asked for and cannot be had."""
    value = getattr(spec, name)
    if value != getattr(_PLAIN, name):
        raise ConfigError(f"{flag(name)} {value} {why}", param=name, value=value, hint=hint)


def _check_loop(spec: LoadSpec) -> None:
    if spec.is_closed:
        for name in ("rate", "rate_end", "ramp_s", "arrivals", "cv", "warm_up_s", "cool_down_s"):
            hint = "Leave out --concurrency for an open loop, or give warm-up and cool-down by number of requests."
            _refuse(spec, name, "has no meaning with --concurrency: there, the answers say when requests start", hint)
        return
    _refuse(spec, "cool_down_requests", "is for a closed loop", "Give --cool-down-s.")
    if spec.arrival_kind == "trace":
        _refuse(spec, "rate", "contradicts --arrivals trace: the trace says when", "Scale its times with --speed-up.")
        if spec.trace is None:
            raise ConfigError("--arrivals trace needs a file", param="trace", hint="Give one with --trace.")
    elif spec.rate is None:
        hint = "Give --rate, --concurrency or --trace."
        raise ConfigError("nothing says how much load to make", param="rate", hint=hint)
    if spec.arrival_kind == "gamma" and not spec.cv:
        raise ConfigError("gamma arrivals need a --cv above 0", param="cv", value=spec.cv, hint="1 is Poisson.")
    if spec.arrival_kind != "gamma":
        _refuse(spec, "cv", f"has no meaning for {spec.arrival_kind} arrivals", "Add --arrivals gamma.")


def _check_ramp(spec: LoadSpec) -> None:
    if spec.rate_end is None:
        _refuse(spec, "ramp_s", "says how long, but not to which rate", "Add --rate-end.")
        return
    if spec.arrival_kind == "trace":
        _refuse(spec, "rate_end", "contradicts --arrivals trace", "Leave one out.")
    _refuse(spec, "warm_up_requests", "cannot be had before a ramp", "Give --warm-up-s: the ramp begins after it.")
    if spec.num_requests is not None and spec.ramp_s is None:
        raise ConfigError("a ramp over a number of requests has no length", param="ramp_s", hint="Give --ramp-s.")


def _check_phases(spec: LoadSpec) -> None:
    if spec.warm_up_s and spec.warm_up_requests:
        hint = "Give one of --warm-up-s and --warm-up-requests."
        raise ConfigError("the warm-up is given twice", param="warm_up_requests", hint=hint)
    if not spec.is_closed and spec.num_requests is not None and spec.duration_s is not None:
        hint = "Give one of --num-requests and --duration-s."
        raise ConfigError("the measured window is given twice", param="num_requests", hint=hint)
    seconds = spec.warm_up_s + (spec.duration_s or DEFAULT_DURATION_S) + spec.cool_down_s
    highest = max(spec.rate or 0.0, spec.rate_end or 0.0)
    if spec.num_requests is None and highest * seconds > MAX_REQUESTS:
        raise ConfigError(
            f"{highest:g} requests/s for {seconds:g} s are too many to be drawn beforehand",
            param="rate",
            value=highest * seconds,
            limit=MAX_REQUESTS,
            hint="Make --duration-s shorter.",
        )


def _check_files(spec: LoadSpec) -> None:
    kind, replays_times = spec.workload_kind, spec.arrival_kind == "trace" and not spec.is_closed
    needs = {"sharegpt": "dataset", "jsonl": "dataset", "trace": "trace"}.get(kind)
    if needs is not None and getattr(spec, needs) is None:
        raise ConfigError(f"workload {kind} needs a file", param=needs, hint=f"Give one with {flag(needs)}.")
    if needs != "dataset":
        _refuse(spec, "dataset", f"is not read by workload {kind}", "Give --workload sharegpt or jsonl.")
    if kind != "trace" and not replays_times:
        _refuse(spec, "trace", "is used neither for times nor for lengths", "Give --workload or --arrivals trace.")
    if spec.trace is None and spec.lengths_file is None:
        for name in ("speed_up", "length_scale", "time_column", "time_unit", "input_column", "output_column"):
            _refuse(spec, name, "has no file to act on", "Give --trace or --lengths-file.")
    if not replays_times:
        _refuse(spec, "speed_up", "has no times to act on", "Leave out --rate or --concurrency, and --arrivals.")
    if kind != "trace" and spec.lengths_file is None:
        _refuse(spec, "length_scale", "has no lengths to act on", "Leave out --workload, or give --lengths-file.")
    if kind == "sharegpt" and spec.prompt_form == "ids":
        raise ConfigError("conversations hold no token ids", param="prompt_form", hint="Use chat or text.")


def _check_lengths(spec: LoadSpec) -> None:
    kind = spec.workload_kind
    if kind != "synthetic":
        for name in ("input_tokens", "lengths_file", "prefix_share", "prefix_groups", "turn_input_tokens"):
            _refuse(spec, name, f"has no meaning for workload {kind}: its file says", "Give --workload synthetic.")
    if kind == "trace":
        _refuse(spec, "output_tokens", "contradicts the trace, which says", "Scale lengths with --length-scale.")
    if spec.lengths_file is not None:
        for name in ("input_tokens", "output_tokens"):
            _refuse(spec, name, "contradicts --lengths-file", "Leave one out.")


def _check_sessions(spec: LoadSpec) -> None:
    if spec.has_sessions:
        if spec.workload_kind not in ("synthetic", "sharegpt"):
            _refuse(spec, "turns", f"has no meaning for workload {spec.workload_kind}", "Use synthetic or sharegpt.")
        return
    for name in ("turn_input_tokens", "think_s", "expected_ttft_ms", "expected_tpot_ms"):
        _refuse(spec, name, "has no meaning without sessions", "Give --turns, more than 1.")
