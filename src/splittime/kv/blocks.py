"""Blocks of the KV cache and their names: the pool says who holds a block, the prefix index what lies in it.

A block is in exactly one of three states; `BlockPool.check` verifies that nothing leaks or doubles:

    held       reference count > 0; one or more leases use it
    evictable  count 0, but its content is in the prefix index: reusable until evicted, least recently used first
    free       count 0 and no content worth keeping

A full block is named by a chained hash, name_i = H(name_{i-1}, tokens of block i), name_{-1} = H(salt), keyed by the
adapter where there is one: equal names mean equal tokens from the start of the request on, computed by the same adapter
under the same tenant's salt. H is BLAKE2b with 128 bits, so that no
tenant can make two prefixes collide on purpose (a 64-bit non-cryptographic hash would allow it).
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


def root_name(salt: str, adapter: str = "") -> bytes:
    """Returns what is before the first block. adapter: the id of the one that computes the blocks; "": none does."""
    key = blake2b(adapter.encode()).digest() if adapter else b""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES, key=key).digest()


def block_names(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Returns the names of the blocks that these tokens fill, behind the block of that name."""
    words, names = array("I", token_ids), []
    num_bytes, block_bytes = len(words) * words.itemsize, block_size * words.itemsize
    content = words.tobytes()
    for end in range(block_bytes, num_bytes + 1, block_bytes):
        parent = blake2b(parent + content[end - block_bytes : end], digest_size=DIGEST_BYTES).digest()
        names.append(parent)
    return names


class PrefixIndex:
    """A one-to-one map between names and blocks. A name that is already taken keeps its first block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self.holds: Callable[[int], bool] = self._name_of.__contains__  # asked of each block that is given back

    def __len__(self) -> int:
        return len(self._block_of)

    def find(self, name: bytes) -> int | None:
        return self._block_of.get(name)

    def name_of(self, block_id: int) -> bytes:
        return self._name_of[block_id]

    def add(self, names: Sequence[bytes], block_ids: Sequence[int]) -> None:
        """names: those of these blocks, in the same order."""
        for name, block_id in zip(names, block_ids, strict=True):
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


class BlockPool:
    """Blocks 0..num_blocks-1. `on_evict(block_id)` is told before an evictable block is given away."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], object]) -> None:
        self.num_blocks = num_blocks
        self._on_evict = on_evict
        self._num_refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    def num_holders(self, block_id: int) -> int:
        """Returns how many leases hold a block."""
        return self._num_refs[block_id]

    @property
    def num_free(self) -> int:
        """Blocks that `take` can still give: free and evictable ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def take(self, count: int) -> list[int]:
        """Returns blocks with count 1 and no content. The caller has made sure that `num_free` is enough."""
        free, evictable = self._free, self._evictable
        taken = [free.pop() for _ in range(min(count, len(free)))]
        for _ in range(count - len(taken)):
            block_id, _ = evictable.popitem(last=False)
            self._on_evict(block_id)
            taken.append(block_id)
        for block_id in taken:
            self._num_refs[block_id] = 1
        return taken

    def is_held(self, block_id: int) -> bool:
        return self._num_refs[block_id] > 0

    def share(self, block_id: int) -> None:
        """One more holder for a held or evictable block."""
        if self._num_refs[block_id] == 0:
            del self._evictable[block_id]
        self._num_refs[block_id] += 1

    def release(self, block_ids: Iterable[int], is_indexed: Callable[[int], bool]) -> None:
        """One holder less of each. The last one leaves it evictable if the prefix index has its content, else free."""
        num_refs = self._num_refs
        for block_id in block_ids:
            num_refs[block_id] -= 1
            if num_refs[block_id]:
                continue
            if is_indexed(block_id):
                self._evictable[block_id] = None
            else:
                self._free.append(block_id)

    def cool(self, block_id: int) -> None:
        """Have an evictable block given away before all others; one that is held stays as it is."""
        if block_id in self._evictable:
            self._evictable.move_to_end(block_id, last=False)

    def latest_evictable(self) -> Iterator[int]:
        """Returns the evictable blocks, the one that `take` would evict last first."""
        return reversed(self._evictable)

    def discard_evictable(self) -> None:
        """Turn all evictable blocks into free ones; `on_evict` is told of each."""
        while self._evictable:
            block_id, _ = self._evictable.popitem(last=False)
            self._on_evict(block_id)
            self._free.append(block_id)

    def check(self, num_holders: dict[int, int]) -> None:
        """Raise AssertionError unless the counts equal `num_holders` (block_id -> leases that hold it)."""
        for block_id, count in enumerate(self._num_refs):
            assert count == num_holders.get(block_id, 0), (
                f"block {block_id}: count {count}, {num_holders.get(block_id)}"
            )
        idle = [*self._free, *self._evictable]
        held = [block_id for block_id, count in enumerate(self._num_refs) if count]
        assert sorted(idle + held) == list(range(self.num_blocks)), "a block is lost or in two states"
