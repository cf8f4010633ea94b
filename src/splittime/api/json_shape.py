"""What a long JSON text is made of, found in a time that its length bounds and its content does not change.

A parser makes a value of everything that it meets, so that a few MB of quotes and brackets cost it 100 ms. Here each
question is asked of all bytes at once: where quotes are, which of them a backslash escapes, what lies within a text.
The answers are bits, one for each byte, in an array or in one long integer, whose sum carries as `simdjson` has it. 4
MB take 3 ms, or 5 if numbers are looked at, of which the interpreter's lock is held for parts of one.

What is counted is right for JSON. Of anything else it is some number, and `repeated_name` must not be asked.
"""

from collections.abc import Callable, Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

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
        numbers = self._where_within(FIRST_OF_NUMBER, NUM_OF_NUMBER) & self._outside
        exponents = self._where(EXPONENT, CASE) & _later(numbers, 1)
        beyond = _behind(numbers, SHORT_NUMBER_BYTES)
        return _count(exponents | (_later(beyond, 1) & ~beyond)), _count(beyond)

    def _where(self, wanted: int, also: int = 0) -> Bits:
        """Returns where this byte is, with these bits set or not."""
        return self._found(lambda piece: (piece | also if also else piece) == wanted)

    def _where_within(self, first: int, count: int) -> Bits:
        """Returns where one of so many bytes is, from this one on."""
        return self._found(lambda piece: piece - np.uint8(first) < count)

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
            return _repeated(owners, list(map(_resolved, spelled)))
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


def _resolved(name: bytes) -> bytes:
    """Returns the name with its escapes resolved."""
    return msgspec.json.decode(b'"%b"' % name, type=str).encode() if b"\\" in name else name


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
