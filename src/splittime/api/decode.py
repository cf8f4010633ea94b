"""From a body's bytes to one of the classes of `schema`, or a refusal that names the field.

All of this holds up whoever waits for the interpreter, so that what may take long is bounded: the objects and lists of
a body, its texts, the names and values of its fields, and its numbers that are no plain whole ones. A body of 4 MB may
have a million of each, which took 0.3 to 4 s. The length of a text is cheap, and so is what stands in it: a long body
is looked at by its bytes before anything is made of it.

What a long JSON text is made of, found in a time that its length bounds and its content does not change.

A parser makes a value of everything that it meets, so that a few MB of quotes and brackets cost it 100 ms. Here each
question is asked of all bytes at once: where quotes are, which of them a backslash escapes, what lies within a text.
The answers are bits, one for each byte, in an array or in one long integer, whose sum carries as `simdjson` has it. 4
MB take 3 ms, or 5 if numbers are looked at, of which the interpreter's lock is held for parts of one.

What is counted is right for JSON. Of anything else it is some number, and `repeated_name` must not be asked.
"""

import difflib
import gc
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from splittime.api.lenient import UNSUPPORTED, WAYS_OUT, Ignored, note_hints, taken, without_effect
from splittime.api.schema import Strict
from splittime.core.errors import RequestError

QUOTE, BACKSLASH, COLON, COMMA = b'"\\:,'
OPENING, CLOSING = ord("{"), ord("}")  # with the bit of lower case set, [ and ] are these
CASE = 0x20
FIRST_OF_NUMBER, NUM_OF_NUMBER = ord("-"), ord("9") - ord("-") + 1  # signs, points and digits, and / between them
POINT, EXPONENT = ord("."), ord("e")
SHORT_NUMBER_BYTES = 19  # without its exponent: its digits are a machine's whole number
PIECE_BYTES = 2**17
Bits = NDArray[np.uint64]  # a bit for each byte of the text, the lowest first
Places = NDArray[np.intp]
FIRST_FACTOR, LAST_FACTOR, OWNER_FACTOR = (
    np.uint64(odd) for odd in (2**61 + 0x9E37, 2**40 + 0x79B9, 0x9E3779B97F4A7C15)
)


class JsonShape:
    """num_texts, num_parts, num_names, num_commas: of the whole text; names of fields are texts too, and parts are
    objects and lists."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._bytes: NDArray[np.uint8] = np.frombuffer(text, np.uint8)
        self._size = (len(text) + 64) // 64 * 8
        self._has_escapes = b"\\" in text
        quotes = self._where(QUOTE)
        self._quotes = self._unescaped(quotes) if self._has_escapes else quotes
        outside = ~_up_to(self._quotes)
        self._opening, self._closing = self._where(OPENING, CASE) & outside, self._where(CLOSING, CASE) & outside
        self._colons = self._where(COLON) & outside
        self.num_texts, self.num_parts = (_count(self._quotes) + 1) // 2, _count(self._opening)
        self.num_names, self.num_commas = _count(self._colons), _count(self._where(COMMA) & outside)
        self._outside = outside

    @property
    def most_numbers(self) -> int:
        """More numbers there cannot be: a part with several values has a comma between each two."""
        return self.num_commas + 1

    def num_floats(self) -> int:
        """Returns how many numbers have a point."""
        return _count(self._where(POINT) & self._outside)

    def slow_numbers(self) -> tuple[int, int]:
        """Returns how many numbers a parser may read 100 times slower than others, digit by digit: those with an
        exponent, and those longer than short ones; and the bytes of these beyond that. A letter behind a digit is an
        exponent's."""
        numbers = self._found(lambda piece: piece - np.uint8(FIRST_OF_NUMBER) < NUM_OF_NUMBER) & self._outside
        exponents = self._where(EXPONENT, CASE) & _later(numbers, 1)
        beyond = _behind(numbers, SHORT_NUMBER_BYTES)
        return _count(exponents | (_later(beyond, 1) & ~beyond)), _count(beyond)

    def _where(self, wanted: int, also: int = 0) -> Bits:
        """Returns where this byte is, with these bits set or not."""
        return self._found(lambda piece: (piece | also if also else piece) == wanted)

    def _found(self, is_wanted: Callable[[NDArray[np.uint8]], NDArray[np.bool_]]) -> Bits:
        """Looks piece by piece, as new memory for all would take longer than to look."""
        found = np.zeros(self._size, np.uint8)
        for begin in range(0, len(self._bytes), PIECE_BYTES):
            bits = np.packbits(is_wanted(self._bytes[begin : begin + PIECE_BYTES]), bitorder="little")
            found[begin // 8 : begin // 8 + len(bits)] = bits
        return found.view(np.uint64)

    def _unescaped(self, quotes: Bits) -> Bits:
        """Returns those that are not behind an odd number of backslashes. The sum of a run and its first bit carries to
        the place behind it."""
        slashes = _number(self._where(BACKSLASH))
        even = int.from_bytes(b"\x55" * self._size, "little")
        first = slashes & ~(slashes << 1)
        behind_even, behind_odd = (slashes + (first & even)) & ~slashes, (slashes + (first & ~even)) & ~slashes
        escaped = (behind_even & ~even) | (behind_odd & even)
        return quotes & ~np.frombuffer(escaped.to_bytes(self._size, "little"), np.uint64)

    def repeated_name(self) -> str | None:
        """Returns a name that stands twice in one object of this JSON; None if there is none."""
        begins, ends, owners = self._names()
        spelled = [self._text[begin:end] for begin, end in _pairs(begins, ends)] if self._has_escapes else []
        if any(b"\\" in name for name in spelled):
            resolved = [msgspec.json.decode(b'"%b"' % name, type=str).encode() for name in spelled]
            return _repeated(owners, resolved)
        alike = _alike(self._marks(begins, ends) ^ owners.astype(np.uint64) * OWNER_FACTOR)
        return _repeated(owners[alike], [self._text[begin:end] for begin, end in _pairs(begins[alike], ends[alike])])

    def _names(self) -> tuple[Places, Places, Places]:
        """Returns where each field's name begins and ends, and the number of the object that has it."""
        at = _places(self._quotes | self._opening | self._closing | self._colons)
        kinds = self._bytes[at]
        is_name = np.zeros(len(at), bool)  # whether here a text ends that has a colon behind it
        is_name[:-1] = (kinds[:-1] == QUOTE) & (kinds[1:] == COLON)
        last = np.flatnonzero(is_name)
        return at[last - 1] + 1, at[last], _owners(kinds | np.uint8(CASE), is_name)

    def _marks(self, begins: Places, ends: Places) -> Bits:
        """Returns a number for each name that is the same where names are: of its length, its first and last bytes."""
        wide, lengths = np.arange(8), ends - begins
        firsts = self._bytes[np.minimum(begins[:, None] + wide, ends[:, None])].view(np.uint64)[:, 0]
        lasts = self._bytes[np.maximum(ends[:, None] - wide, begins[:, None])].view(np.uint64)[:, 0]
        marks: Bits = firsts * FIRST_FACTOR ^ lasts * LAST_FACTOR ^ lengths.astype(np.uint64)
        return marks


def _pairs(begins: Places, ends: Places) -> Iterable[tuple[int, int]]:
    return zip(begins.tolist(), ends.tolist(), strict=True)


def _alike(marks: Bits) -> Places:
    """Returns the places of those that are there more than once."""
    order = np.argsort(marks)
    is_same = marks[order][:-1] == marks[order][1:]
    found: Places = np.unique(np.concatenate((order[:-1][is_same], order[1:][is_same])))
    return found


def _repeated(owners: Places, names: list[bytes]) -> str | None:
    """Returns the first name that its owner has had before."""
    seen = set()
    for each in zip(owners.tolist(), names, strict=True):
        if each in seen:
            return each[1].decode("utf-8", "replace")
        seen.add(each)
    return None


def _owners(kinds: NDArray[np.uint8], is_name: NDArray[np.bool_]) -> Places:
    """Returns for each name the number of its object: the last that was opened before it, of those as deep."""
    is_opening = kinds == OPENING
    depth = np.cumsum(is_opening.astype(np.int32) - (kinds == CLOSING))
    at = np.flatnonzero(is_opening | is_name)
    order = np.argsort(depth[at], kind="stable")
    owners = np.empty(len(at), np.intp)
    owners[order] = np.cumsum(is_opening[at][order])
    return owners[is_name[at]]


def exponents_at_most(text: bytes) -> int:
    """Returns how many exponents this JSON has at the most: those that stand in its texts count too. Takes 8 us for a
    text of 16 KiB, its shape 50."""
    codes: NDArray[np.uint8] = np.frombuffer(text, np.uint8)
    is_behind = codes[:-1] - np.uint8(FIRST_OF_NUMBER) < NUM_OF_NUMBER
    return int(np.count_nonzero(((codes[1:] | CASE) == EXPONENT) & is_behind))


def _later(bits: Bits, places: int) -> Bits:
    """Returns the bits, each so many places later, fewer than 64."""
    moved = bits << np.uint64(places)
    moved[1:] |= bits[:-1] >> np.uint64(64 - places)
    return moved


def _behind(bits: Bits, length: int) -> Bits:
    """Returns the bits with so many set before them without a gap."""
    run, so_far = bits, 1
    while so_far <= length:
        places = min(so_far, length + 1 - so_far)
        run, so_far = run & _later(run, places), so_far + places
    return run


def _number(bits: Bits) -> int:
    return int.from_bytes(bits.tobytes(), "little")


def _count(bits: Bits) -> int:
    return int(np.bitwise_count(bits).sum(dtype=np.int64))


def _places(bits: Bits) -> Places:
    """Returns where bits are set; few of them are."""
    packed = bits.view(np.uint8)
    some = np.flatnonzero(packed)
    which, bit = np.nonzero(np.unpackbits(packed[some][:, None], axis=1, bitorder="little"))
    return some[which] * 8 + bit


def _up_to(quotes: Bits) -> Bits:
    """Returns where the number of quotes, from the beginning up to there, is odd: in a text, with its first quote."""
    within = quotes.copy()
    for shift in (1, 2, 4, 8, 16, 32):
        within ^= within << np.uint64(shift)
    turned = np.bitwise_xor.accumulate(within >> np.uint64(63))
    within[1:] ^= np.uint64(0) - turned[:-1]
    return within


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
