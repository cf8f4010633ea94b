"""The prefix index: which block holds the KV of which tokens after which prefix.

A full block is named by a chained hash, name_i = H(name_{i-1}, tokens of block i), name_{-1} = H(salt): equal names
mean equal tokens from the start of the request on, under the same tenant's salt. H is BLAKE2b with 128 bits, so that no
tenant can make two prefixes collide on purpose (a 64-bit non-cryptographic hash would allow it).
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def root_name(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()


def block_name(parent: bytes, token_ids: Sequence[int]) -> bytes:
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=DIGEST_BYTES).digest()


class PrefixIndex:
    """A one-to-one map between names and blocks. A name that is already taken keeps its first block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, name: bytes) -> int | None:
        return self._block_of.get(name)

    def holds(self, block_id: int) -> bool:
        return block_id in self._name_of

    def add(self, name: bytes, block_id: int) -> None:
        if name not in self._block_of:
            self._block_of[name] = block_id
            self._name_of[block_id] = name

    def forget(self, block_id: int) -> bytes:
        """Returns the name that the block had."""
        name = self._name_of.pop(block_id)
        del self._block_of[name]
        return name

    def clear(self) -> None:
        self._block_of.clear()
        self._name_of.clear()

    def check(self) -> None:
        assert {name: block for block, name in self._name_of.items()} == self._block_of, "the index is not one-to-one"
