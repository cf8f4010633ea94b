"""From a body's bytes to one of the classes of `schema`, or a refusal that names the field.

All of this holds up whoever waits for the interpreter, so that what may take long is bounded: the objects and lists of
a body, its texts, the names and values of its fields, and its numbers that are no plain whole ones. A body of 4 MB may
have a million of each, which took 0.3 to 4 s. The length of a text is cheap, and so is what stands in it: a long body
is looked at by `json_shape` before anything is made of it.
"""

import difflib
import gc
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from splittime.api.foreign import UNSUPPORTED, WAYS_OUT
from splittime.api.json_shape import SHORT_NUMBER_BYTES, JsonShape, exponents_at_most
from splittime.api.lenient import Ignored, note_hints, taken, without_effect
from splittime.api.schema import Strict
from splittime.core.errors import RequestError

MAX_NAME_CHARS = 64
MAX_PARTS = 2**14  # objects and lists of one body
MAX_TEXTS = 5 * 2**14  # names of fields are texts too
MAX_NAMES = 2**15
MAX_COMMAS = 2**20  # as many values as that, roughly: a million whole numbers take 10 ms
MAX_FLOATS = 2**16
MAX_SLOW_NUMBERS = 2**9  # 10 us each, and a short body is read on the event loop
MAX_SLOW_BYTES = 2**16
LONG_BYTES = 2**14  # of a shorter body all is within bounds
SOME_BYTES = 2**12  # and of this, but for numbers with an exponent
MAX_WHOLE = 2**63

Body = TypeVar("Body", bound=Strict)
Kind = TypeVar("Kind")

_UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`(?: - at `\$(.*)`)?$", re.DOTALL)
_MISSING_FIELD = re.compile(r"missing required field `(.*?)`(?: - at `\$(.*)`)?$", re.DOTALL)
_TOO_LONG = re.compile(r"Expected `array` of length <= (\d+)")
_TOO_LONG_TEXT = re.compile(r"Expected `str` of length <= (\d+)")
_PLACE = re.compile(r"(?: - at `\$([^`]*)`)?$")
_AT_PATH = re.compile(r"(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)


def decode_body(body: bytes, kind: type[Body], ignored: Ignored | None = None) -> Body:
    """The body as a value, or a `RequestError` that names the field. ignored: notes the fields that have no effect;
    None: they are refused, so that nobody believes in one that it does not have."""
    return _effective(_decoded(body, kind, ignored), ignored)


def convert_part(value: Any, kind: type[Body], at: str, ignored: Ignored | None = None) -> Body:
    """Returns a part of a body, which has been read as plain values, as a value of its class. at: its place in the
    body; "" for the whole. Raises `RequestError` as `decode_body` does."""
    try:
        try:
            part = msgspec.convert(value, kind)
        except msgspec.ValidationError:
            if ignored is None:
                raise
            part = msgspec.convert(taken(value, kind, ignored, at), kind)
    except msgspec.ValidationError as error:
        place = f".{at}" if at else ""
        said = _PLACE.sub(lambda found: f" - at `${place}{found[1] or ''}`", str(error), count=1)
        raise _refusal(said, kind) from error
    return _effective(part, ignored, at)


def _effective(value: Body, ignored: Ignored | None, at: str = "") -> Body:
    if ignored is not None:
        note_hints(value, ignored, at)
    elif (path := without_effect(value, at)) is not None:
        said, hint = f"{path} has no effect here", "leave it out, or start the server without --strict"
        raise RequestError(said, code="unsupported_field", param=path, hint=hint)
    return value


def _decoded(body: bytes, kind: type[Body], ignored: Ignored | None) -> Body:
    """To JSON 2.0 and 2 are one number, and a client's language may have but floats: one that stands where a whole
    number belongs is read as that."""
    try:
        try:
            return decode_once(body, kind)
        except msgspec.ValidationError as error:
            if ignored is None and "got `float`" not in str(error):
                raise
        plain = _with_whole_numbers(body)
        return msgspec.convert(plain if ignored is None else taken(plain, kind, ignored), kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error


def _with_whole_numbers(body: bytes) -> Any:
    """The value, with 2.0 as 2. It has been read before, so that its parts, texts and numbers are counted."""

    def number(written: str) -> float:
        value = float(written)
        if math.isinf(value):
            raise ValueError("Number out of range")
        return whole(value)

    with _no_collection():
        value = msgspec.json.Decoder(float_hook=number).decode(body)
        _check_names(body)
    return value


def whole(value: Any) -> Any:
    """A float as the whole number that it is, if it is one that a message can hold; anything else as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < MAX_WHOLE else value


def decode_once(body: bytes, kind: type[Kind]) -> Kind:
    """The value, where no name stands twice in one object; msgspec would take the last, another reader the first.

    Raises `RequestError` for one that does, else what msgspec raises. The names are read apart: 2 us for a small body,
    4 ms for one of 4 MB.
    """
    shape = JsonShape(body) if _may_take_long(body) else None
    if shape is not None:
        _check_bounds(shape, len(body))
    with _no_collection():
        value = msgspec.json.decode(body, type=kind)
        _check_names(body, shape)
    return value


def _may_take_long(body: bytes) -> bool:
    is_long = len(body) > LONG_BYTES
    return is_long or (len(body) > SOME_BYTES and exponents_at_most(body) > MAX_SLOW_NUMBERS)


@contextmanager
def _no_collection() -> Iterator[None]:
    """For making a great many values at once, none of which is garbage: looking at them again and again while they are
    made takes most of the time (0.6 of 0.8 s for a million lists)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_bounds(shape: JsonShape, num_bytes: int) -> None:
    """Raises `RequestError` for a body of too many texts, names, values, or objects and lists. What is counted is right
    for JSON; of anything else little is decoded."""
    _require_at_most(
        (shape.num_texts, MAX_TEXTS, "texts (names of fields are texts too)"),
        (shape.num_parts, MAX_PARTS, "objects and lists (messages, parts of them, prompts)"),
        (shape.num_names, MAX_NAMES, "names of fields"),
        (shape.num_commas, MAX_COMMAS, "values"),
    )
    if shape.most_numbers > MAX_SLOW_NUMBERS or num_bytes > MAX_SLOW_BYTES:
        num_slow, num_slow_bytes = shape.slow_numbers()
        _require_at_most(
            (num_slow, MAX_SLOW_NUMBERS, f"numbers with an exponent or of more than {SHORT_NUMBER_BYTES} characters"),
            (num_slow_bytes, MAX_SLOW_BYTES, "digits in long numbers"),
            (shape.num_floats(), MAX_FLOATS, "numbers with a point"),
        )


def _require_at_most(*bounds: tuple[int, int, str]) -> None:
    for count, limit, what in bounds:
        if count > limit:
            raise _too_complex(limit, what)


def _too_complex(limit: int, what: str) -> RequestError:
    said, hint = f"the body has more than {limit} {what}", "send fewer, or several requests; a text may be long"
    return RequestError(said, code="body_too_complex", limit=limit, hint=hint)


def _check_names(body: bytes, shape: JsonShape | None = None) -> None:
    """Raises `RequestError` if a name stands twice in one object of a body that is JSON."""
    if shape is None and len(body) <= LONG_BYTES:
        _NAMES.decode(body.decode())
    elif (twice := (shape or JsonShape(body)).repeated_name()) is not None:
        raise _stands_twice(twice)


def _refuse_twice(pairs: list[tuple[str, Any]]) -> None:
    """Check the names of one object. Nothing of it is kept."""
    if len(dict(pairs)) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise _stands_twice(next(name for name, count in counts.items() if count > 1))


def _stands_twice(name: str) -> RequestError:
    twice = name[:MAX_NAME_CHARS]
    said, hint = f"{twice}: stands twice in one object", "give each field once"
    return RequestError(said, code="duplicate_field", param=twice, hint=hint)


_NAMES = json.JSONDecoder(object_pairs_hook=_refuse_twice, parse_int=len, parse_float=len, strict=False)


def _refusal(message: str, kind: type[Strict]) -> RequestError:
    """Say which field, and whether it is unknown, unsupported, missing or of a wrong type."""
    unknown = _UNKNOWN_FIELD.search(message)
    if unknown:
        name = _join(unknown[2], unknown[1][:MAX_NAME_CHARS])
        hint = None if unknown[2] else WAYS_OUT.get(name) or _meant(name, kind)
        return RequestError(f"{name}: no such field, or not supported", code="unknown_field", param=name, hint=hint)
    missing = _MISSING_FIELD.search(message)
    if missing:
        name = _join(missing[2], missing[1])
        return RequestError(f"{name} is missing", code="missing_field", param=name)
    located = _AT_PATH.match(message)
    param = located[2] if located else None
    refusals: Mapping[str, str] = getattr(kind, "refusals", UNSUPPORTED)
    for name in re.findall(r"[a-z_]+", param or ""):
        if name in refusals:
            why = f"{param}: {refusals[name]}"
            return RequestError(why, code="unsupported_field", param=param, hint="leave it out")
    too_long = _TOO_LONG.search(message)
    if too_long:
        limit = int(too_long[1])
        said = f"{param} has more than {limit} entries"
        return RequestError(said, param=param, limit=limit, hint=f"send at most {limit} in one request")
    if too_long_text := _TOO_LONG_TEXT.match(message):
        limit = int(too_long_text[1])
        said, hint = f"{param} has more than {limit} characters", f"send at most {limit}, or a hash of what is longer"
        return RequestError(said, code="string_above_max_length", param=param, limit=limit, hint=hint)
    what: str = located[1] if located else message
    return RequestError(f"{param}: {what}" if param else what, code="invalid_type", param=param)


def _meant(name: str, kind: type[Strict]) -> str:
    near = difflib.get_close_matches(name, kind.__struct_fields__, n=1)
    return f"did you mean {near[0]}? All fields: GET /docs" if near else "leave it out; GET /docs lists all fields"


def _join(path: str | None, name: str) -> str:
    return f"{path.lstrip('.')}.{name}" if path else name
