"""The types of GGUF: of metadata values, and of tensors, each a block of so many values in so many bytes.

Which tensor types are served is `SERVED`; the others are known by name, to be refused by it.
"""

import struct
from dataclasses import dataclass

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
}
"""By the number that a file gives a tensor's type."""

OTHERS = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS"},
    **{18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16"},
    **{26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}
