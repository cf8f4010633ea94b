"""The one door to KV memory: match, reserve, commit, free, check. It moves block ids; the runner moves the bytes.

A lease is what one request holds. Blocks come to it in two ways: found by prefix (`match`) or taken from the pool
(`reserve`). After a step, `commit` puts the blocks that became full into the prefix index, so that later requests (and
this one after a preemption) find them. Freed blocks keep their content until somebody needs the room.

    token_ids    [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 ]      block_size = 4
    block_ids    [     7       |      3      |  9 ]
    names        [     n0      |      n1     ]           only full blocks have a name
"""

from collections.abc import Iterable, Sequence

from splittime.kv.blocks import BlockPool
from splittime.kv.prefix import PrefixIndex, block_name, root_name


class Lease:
    """The blocks of one request, in order, and the names of its full ones (kept over preemptions)."""

    __slots__ = ("block_ids", "names", "num_indexed", "num_sent", "salt")

    def __init__(self, salt: str = "") -> None:
        self.salt = salt
        self.block_ids: list[int] = []
        self.names: list[bytes] = []
        self.num_indexed = 0  # blocks [0, num_indexed) have been offered to the index
        self.num_sent = 0  # blocks [0, num_sent) have been named in a row, so the runner knows them

    def unsent(self) -> tuple[int, ...]:
        """The blocks that no row has named yet; they count as sent from now on."""
        new_block_ids = tuple(self.block_ids[self.num_sent :])
        self.num_sent = len(self.block_ids)
        return new_block_ids


class KVCache:
    """`block_size` tokens a block. With prefix caching off, `match` finds nothing and nothing stays behind."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._index = PrefixIndex()
        self._pool = BlockPool(num_blocks, self._index.forget)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_used(self) -> int:
        return self._pool.num_used

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can still be reused."""
        return self._pool.num_evictable

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, lease: Lease, token_ids: Sequence[int]) -> int:
        """Give an empty lease the longest cached prefix; returns its number of tokens, less than `len(token_ids)`,
        since the last token must be computed for its logits."""
        assert not lease.block_ids, "match is for an empty lease"
        if not self.enable_prefix_caching:
            return 0
        for i in range((len(token_ids) - 1) // self.block_size):
            block_id = self._index.find(self._name(lease, i, token_ids))
            if block_id is None:
                break
            self._pool.share(block_id)
            lease.block_ids.append(block_id)
        lease.num_indexed = len(lease.block_ids)
        return len(lease.block_ids) * self.block_size

    def reserve(self, lease: Lease, num_tokens: int, keep_free: int = 0) -> bool:
        """Let the lease hold `num_tokens`; False, with nothing changed, if fewer than `keep_free` would stay free."""
        num_new = self.blocks_for(num_tokens) - len(lease.block_ids)
        if num_new <= 0:
            return True
        if self._pool.num_free - num_new < keep_free:
            return False
        lease.block_ids.extend(self._pool.take() for _ in range(num_new))
        return True

    def commit(self, lease: Lease, token_ids: Sequence[int], num_computed: int) -> None:
        """Index the blocks that the first `num_computed` tokens fill."""
        if not self.enable_prefix_caching:
            return
        while lease.num_indexed < num_computed // self.block_size:
            i = lease.num_indexed
            self._index.add(self._name(lease, i, token_ids), lease.block_ids[i])
            lease.num_indexed += 1

    def free(self, lease: Lease) -> None:
        """Take all blocks back, last first, so that the tail of a prefix is evicted before its head."""
        for block_id in reversed(lease.block_ids):
            self._pool.release(block_id, self._index.holds(block_id))
        lease.block_ids = []
        lease.num_indexed = lease.num_sent = 0

    def set_prefix_caching(self, enabled: bool) -> None:
        """Switch on a live cache. Off forgets what nobody holds; what is held is forgotten when it is given away."""
        self.enable_prefix_caching = enabled
        if not enabled:
            self._pool.discard_evictable()

    def check(self, leases: Iterable[Lease]) -> None:
        """Raise AssertionError if a block leaked, doubled, or the index disagrees with the pool."""
        num_holders: dict[int, int] = {}
        for lease in leases:
            assert len(set(lease.block_ids)) == len(lease.block_ids), "a lease holds a block twice"
            for block_id in lease.block_ids:
                num_holders[block_id] = num_holders.get(block_id, 0) + 1
        self._pool.check(num_holders)
        self._index.check()

    def _name(self, lease: Lease, i: int, token_ids: Sequence[int]) -> bytes:
        """Name of the lease's block i; the chain is computed once and kept."""
        while len(lease.names) <= i:
            start = len(lease.names) * self.block_size
            parent = lease.names[-1] if lease.names else root_name(lease.salt)
            lease.names.append(block_name(parent, token_ids[start : start + self.block_size]))
        return lease.names[i]
