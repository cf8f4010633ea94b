"""Walks a mapped GGUF file from its beginning, believing nothing: no read leaves the file, no count is allocated before
the bytes that it announces are known to be there, and every error names the field that was being read. What is walked
over in all is bounded too, in bytes and in values: a file of many gigabytes may be full of either.

A tensor's type says how many values are a block, in how many bytes. Which of them are served is `SERVED`; the others
are known by name, to be refused by it.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from splittime.core.errors import ConfigError
from splittime.models.fields import MAX_METADATA_BYTES, MAX_METADATA_VALUES

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    0: ("u1", struct.Struct("<B")),
    1: ("i1", struct.Struct("<b")),
    2: ("<u2", struct.Struct("<H")),
    3: ("<i2", struct.Struct("<h")),
    4: ("<u4", struct.Struct("<I")),
    5: ("<i4", struct.Struct("<i")),
    6: ("<f4", struct.Struct("<f")),
    7: ("u1", struct.Struct("<B")),
    10: ("<u8", struct.Struct("<Q")),
    11: ("<i8", struct.Struct("<q")),
    12: ("<f8", struct.Struct("<d")),
}
"""By a metadata value's type: numpy's name for it, and how one is read."""

NUM_METADATA_TYPES = 13


@dataclass(frozen=True)
class TensorType:
    """`values` neighbours of a row are kept in `num_bytes` bytes. has_integers: not floats."""

    name: str
    values: int
    num_bytes: int

    @property
    def has_integers(self) -> bool:
        return self.values > 1


SERVED = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
"""By the number that a file gives a tensor's type."""

OTHERS = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS"},
    **{18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16"},
    **{26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}


MAX_NESTED = 4
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GgufCursor:
    """at: the next byte. Fields are named as the format's own description names them."""

    def __init__(self, content: Any, path: str) -> None:
        self.content = content
        self.path = path
        self.size = len(content)
        self.at = 0
        self.num_values = 0

    def broken(self, field: str, said: str, value: Any = None, limit: Any = None) -> ConfigError:
        return ConfigError(f"{self.path}: {field} {said}", param="model_path", value=value, limit=limit)

    def number(self, form: struct.Struct, field: str) -> Any:
        self.need(form.size, field)
        (value,) = form.unpack_from(self.content, self.at)
        self.at += form.size
        return value

    def u32(self, field: str) -> int:
        return self.number(_U32, field)

    def u64(self, field: str) -> int:
        return self.number(_U64, field)

    def need(self, num_bytes: int, field: str) -> None:
        """Raises `ConfigError` unless the file still has so many bytes."""
        if num_bytes > self.size - self.at:
            left = self.size - self.at
            raise self.broken(field, f"needs {num_bytes} bytes at byte {self.at}, the file has {left} more", num_bytes)
        if self.at + num_bytes > MAX_METADATA_BYTES:
            said = f"ends at byte {self.at + num_bytes}; {MAX_METADATA_BYTES} bytes of metadata are read"
            raise self.broken(field, said, num_bytes, MAX_METADATA_BYTES)

    def count(self, field: str, least_bytes: int, are_objects: bool = True) -> int:
        """A number of things of at least so many bytes each. are_objects: each becomes a Python object."""
        value = self.u64(field)
        room = (self.size - self.at) // least_bytes
        if value > room:
            raise self.broken(field, f"is {value}, of which the rest of the file holds {room} at most", value)
        self.num_values += value if are_objects else 1
        if self.num_values > MAX_METADATA_VALUES:
            said = f"is {value}: with what comes before more than the {MAX_METADATA_VALUES} values that are read"
            raise self.broken(field, said, value, MAX_METADATA_VALUES)
        return value

    def text(self, field: str) -> str:
        num_bytes = self.u64(f"{field}: length")
        self.need(num_bytes, field)
        raw = self.content[self.at : self.at + num_bytes]
        self.at += num_bytes
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.broken(field, f"is not UTF-8: {error}") from None

    def value(self, field: str) -> Any:
        """One metadata value, its type first: int, float, bool, str, a numpy array, or a list of texts or of lists."""
        kind = self.u32(f"{field}: type")
        return self._array(field, 1) if kind == ARRAY else self._one(kind, field)

    def _one(self, kind: int, field: str) -> Any:
        if kind == STRING:
            return self.text(field)
        value = self.number(SCALARS[self._known(kind, field)][1], field)
        if kind != BOOL:
            return value
        if value > 1:
            raise self.broken(field, f"is {value}, which is no truth value (0 or 1)", value)
        return bool(value)

    def _array(self, field: str, depth: int) -> Any:
        kind = self._known(self.u32(f"{field}: element type"), field)
        if kind == STRING:
            return self._texts(field)
        if kind == ARRAY:
            if depth == MAX_NESTED:
                raise self.broken(field, f"has arrays nested more than {MAX_NESTED} deep")
            return [self._array(field, depth + 1) for _ in range(self.count(f"{field}: count", 12))]
        name, form = SCALARS[kind]
        count = self.count(f"{field}: count", form.size, are_objects=False)
        self.need(count * form.size, field)
        values = np.frombuffer(self.content, np.dtype(name), count, self.at).copy()
        self.at += count * form.size
        if kind != BOOL:
            return values
        if (values > 1).any():
            raise self.broken(field, "has elements that are no truth values (0 or 1)")
        return values.astype(bool)

    def _texts(self, field: str) -> list[str]:
        """A vocabulary has hundreds of thousands: one loop, without a call for each."""
        count = self.count(f"{field}: count", 8)
        found, content, length, end = [], self.content, _U64.unpack_from, self.at
        for number in range(count):
            begin = end + 8
            end = begin + length(content, end)[0] if begin <= self.size else self.size + 1
            if end > self.size:
                self.at = begin
                raise self.broken(f"{field}: text {number}", f"leaves the file, which ends at byte {self.size}")
            if end > MAX_METADATA_BYTES:
                said = f"ends at byte {end}; {MAX_METADATA_BYTES} bytes of metadata are read"
                raise self.broken(f"{field}: text {number}", said, end, MAX_METADATA_BYTES)
            found.append(content[begin:end])
        self.at = end
        try:
            return [raw.decode() for raw in found]
        except UnicodeDecodeError as error:
            raise self.broken(field, f"has a text that is not UTF-8: {error}") from None

    def _known(self, kind: int, field: str) -> int:
        if kind >= NUM_METADATA_TYPES:
            raise self.broken(field, f"is of type {kind}; types are 0 to {NUM_METADATA_TYPES - 1}", kind)
        return kind
