"""The second tier of the prefix cache: blocks of host memory (slots) that keep what the device had no room for.

A slot is in one of a block's three states (`kv.blocks`): pinned, while a copy out of it is planned and not sent; kept,
least recently used first; or free. A name is in one slot at most, and a slot has one name. What is copied back to the
device stays here, so that its next eviction from there costs no copy.

Only names and numbers: the bytes are moved by the runner (`runner.kv_store`). `take_moves` hands the moves out for
the next plan that is sent, which makes all its offloads (block to slot), then all its restores (slot to block), then
runs its rows; plans are carried out in order. So much has to be kept for that, and `check` verifies it:

* a slot is pinned from the match until its restore is handed out: no offload before that can take it;
* a block whose restore is not handed out yet has no content: given away, it loses the restore and is not offloaded;
* an offload that is not handed out is forgotten when its slot goes to another block.
"""

from collections import Counter
from collections.abc import Iterable

from splittime.kv.blocks import BlockPool, PrefixIndex

Moves = tuple[tuple[int, int], ...]


class HostTier:
    def __init__(self, num_slots: int) -> None:
        self._index = PrefixIndex()
        self._pool = BlockPool(num_slots, self._index.forget)
        self._offloads: dict[int, int] = {}  # by slot, the block that is copied there
        self._restores: dict[int, int] = {}  # by block, the slot that it is copied from
        self.num_offloaded = 0  # blocks handed out by `take_moves`
        self.num_restored = 0

    @property
    def num_slots(self) -> int:
        return self._pool.num_blocks

    @property
    def num_held(self) -> int:
        """Slots whose content can be found."""
        return len(self._index)

    def pin(self, name: bytes) -> int | None:
        """The slot of this name, which stays as it is until it is unpinned as often; None: it is not here."""
        slot = self._index.find(name)
        if slot is not None:
            self._pool.share(slot)
        return slot

    def unpin(self, slot: int) -> None:
        self._pool.release((slot,), self._index.holds)

    def offload(self, name: bytes, block_id: int) -> None:
        """Plan to keep a block that is given away; nothing to do if its content is here, or was never there."""
        if block_id in self._restores:
            return
        slot = self._index.find(name)
        if slot is not None:
            self._pool.share(slot)
        elif self._pool.num_free:
            (slot,) = self._pool.take(1)
            self._index.add((name,), (slot,))
            self._offloads[slot] = block_id
        else:
            return
        self._pool.release((slot,), self._index.holds)  # used most recently

    def restore(self, slot: int, block_id: int) -> None:
        """Plan to copy a pinned slot back; the pin is the plan's from now on."""
        self._restores[block_id] = slot

    def forget_restore(self, block_id: int) -> None:
        """The block goes to somebody else."""
        slot = self._restores.pop(block_id, None)
        if slot is not None:
            self.unpin(slot)

    def take_moves(self) -> tuple[Moves, Moves]:
        """Offloads (block, slot) and restores (slot, block) for the plan that is sent next."""
        offloads = tuple((block_id, slot) for slot, block_id in self._offloads.items())
        restores = tuple((slot, block_id) for block_id, slot in self._restores.items())
        for slot, _ in reversed(restores):  # the tail of a prefix is evicted before its head
            self.unpin(slot)
        self._offloads, self._restores = {}, {}
        self.num_offloaded += len(offloads)
        self.num_restored += len(restores)
        return offloads, restores

    def clear(self) -> None:
        """Forget every name. What is pinned stays where it is until it is unpinned, and so do copies to there."""
        self._pool.discard_evictable()
        self._index.clear()
        self._offloads = {slot: block_id for slot, block_id in self._offloads.items() if self._pool.is_held(slot)}

    def check(self, pinned: Iterable[int]) -> None:
        """Raise AssertionError if a slot leaked or doubled, or may be overwritten too early. pinned: those of matches
        that no restore was planned for yet, as often as they are pinned."""
        num_pins = Counter([*pinned, *self._restores.values()])
        self._pool.check(num_pins)
        self._index.check()
        num_named = self._pool.num_evictable + sum(self._index.holds(slot) for slot in num_pins)
        assert num_named == len(self._index), "a slot that is kept has no name, or one that is free has one"
        assert len(set(self._offloads.values())) == len(self._offloads), "a block is offloaded twice"
        for slot in self._offloads:
            assert self._index.holds(slot) or slot in num_pins, f"an offload to slot {slot}, which keeps nothing"
