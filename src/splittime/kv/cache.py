"""The one door to KV memory: match, reserve, commit, trim, free, check. It moves block ids; the runner moves the bytes.

A lease is what one request holds. Blocks come to it in two ways: found by prefix (`match`) or taken from the pool
(`reserve`). After a step, `commit` puts the blocks that became full into the prefix index, so that later requests (and
this one after a preemption) find them. Freed blocks keep their content until somebody needs the room.

    token_ids    [ t0 t1 t2 t3 | t4 t5 t6 t7 | t8 ]      block_size = 4
    block_ids    [     7       |      3      |  9 ]
    names        [     n0      |      n1     ]           only full blocks have a name

With `num_host_slots` there is a second tier: a block that is given away while its content could be reused is copied
there first; `match` goes on there where the device's index ends, and `reserve` takes a block for each hit, into which
it is copied back. A block that another server has sent (`Imports`) gets a block by `adopt`. Both are in the index as
soon as that is planned: whoever finds them runs later. Until its content is there, a block may not be sent on:

    adopt ──▶ planned ──take──▶ handed out ──when two more plans were made──▶ like any other block
                 └──given away meanwhile: the content is not wanted any more

Plans are carried out in order, with one in flight at most while the next is made (ADR 9): when a plan is made, the last
but one has been carried out.

A slot of the second tier is pinned, while a copy out of it is planned and not sent; kept, least recently used first; or
free (`kv.blocks`). A name is in one slot at most, and a slot has one name. What is copied back to the device stays
here, so that its next eviction from there costs no copy.

`take_moves` hands the moves out for the next plan that is sent, which makes all its offloads (block to slot), then all
its restores (slot to block), then runs its rows. So much has to be kept for that, and `check` verifies it:

* a slot is pinned from the match until its restore is handed out: no offload before that can take it;
* a block whose restore is not handed out yet has no content: given away, it loses the restore and is not offloaded;
* an offload that is not handed out is forgotten when its slot goes to another block.

With `num_state_slots` each lease has a state too (`kv.states`).
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

from splittime.core.step import RowState
from splittime.kv.blocks import BlockPool, PrefixIndex, block_names, root_name
from splittime.kv.states import LeasedState, StateSlots

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


NO_BLOCK = -1
"""In the place of a block that was found in host memory, until `reserve` takes one for it."""


class Lease:
    """The blocks of one request, in order, and the names of its full ones (kept over preemptions)."""

    __slots__ = ("block_ids", "in_host", "names", "num_indexed", "num_sent", "root", "state")

    def __init__(self, salt: str = "", adapter: str = "") -> None:
        self.root = root_name(salt, adapter)
        self.block_ids: list[int] = []
        self.names: list[bytes] = []
        self.num_indexed = 0  # blocks [0, num_indexed) have been offered to the index
        self.num_sent = 0  # blocks [0, num_sent) have been named in a row, so the runner knows them
        self.in_host: list[tuple[int, int]] = []  # found, not reserved: (place in block_ids, slot)
        self.state = LeasedState()

    def unsent(self) -> tuple[int, ...]:
        """The blocks that no row has named yet; they count as sent from now on."""
        new_block_ids = tuple(self.block_ids[self.num_sent :])
        self.num_sent = len(self.block_ids)
        return new_block_ids


class KVCache:
    """`block_size` tokens a block. With prefix caching off, `match` finds nothing and nothing stays behind."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_host_slots: int = 0,
        num_state_slots: int = 0,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._index = PrefixIndex()
        self.host = HostTier(num_host_slots) if num_host_slots else None  # to look at
        self.states = StateSlots(num_state_slots, block_size) if num_state_slots else None
        self._imports = Imports()
        self._pool = BlockPool(num_blocks, partial(self._evict, self.host) if self.host else self._index.forget)

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
            self._name_blocks(lease, i + 1, token_ids)
            name = lease.names[i]
            block_id = self._index.find(name)
            if block_id is not None:
                self._pool.share(block_id)
            elif self.host is not None and (slot := self.host.pin(name)) is not None:
                lease.in_host.append((i, slot))
                block_id = NO_BLOCK
            else:
                break
            lease.block_ids.append(block_id)
        if self.states is not None:
            self._cut(lease, self.states.find(lease.state, lease.names[: len(lease.block_ids)]))
        lease.num_indexed = len(lease.block_ids)
        return len(lease.block_ids) * self.block_size

    def num_new(self, lease: Lease, num_tokens: int) -> int:
        """Returns how many blocks the lease needs to hold so many tokens, besides those that it has."""
        return self.blocks_for(num_tokens) - len(lease.block_ids) + len(lease.in_host)

    def num_holders(self, block_id: int) -> int:
        """Returns how many leases hold a block."""
        return self._pool.num_holders(block_id)

    def part_of(self, lease: Lease) -> float:
        """Returns how many blocks it holds, of one that several hold its part. These are the first ones, the more of
        them the earlier: so whole runs are counted, in O(log blocks)."""
        block_ids, begin, part = lease.block_ids, 0, 0.0
        while begin < len(block_ids) and (num_holders := self.num_holders(block_ids[begin])) > 1:
            end = bisect_right(block_ids, -num_holders, begin, key=lambda block_id: -self.num_holders(block_id))
            part += (end - begin) / num_holders
            begin = end
        return part + len(block_ids) - begin

    def has_room(self, lease: Lease, num_tokens: int, keep_free: int = 0) -> bool:
        """Returns whether the lease can hold `num_tokens`, and `keep_free` blocks stay free."""
        return self._pool.num_free - self.num_new(lease, num_tokens) >= keep_free

    def reserve(self, lease: Lease, num_tokens: int) -> bool:
        """Let the lease hold `num_tokens`; False, with nothing changed, if there are too few blocks, or no state."""
        if not self.has_room(lease, num_tokens) or not (self.states is None or self.states.take(lease.state)):
            return False
        if lease.in_host and self.host is not None:
            self._plan_restores(lease, self.host)
        num_new = self.blocks_for(num_tokens) - len(lease.block_ids)
        if num_new > 0:
            lease.block_ids += self._take(num_new)
        return True

    def commit(self, lease: Lease, token_ids: Sequence[int], num_computed: int) -> None:
        """Index the blocks that the first `num_computed` tokens fill."""
        if not self.enable_prefix_caching:
            return
        begin, end = lease.num_indexed, num_computed // self.block_size
        if begin < end:
            self._name_blocks(lease, end, token_ids)
            self._index.add(lease.names[begin:end], lease.block_ids[begin:end])
            lease.num_indexed = end
            if self.states is not None:
                self.states.commit(lease.state, lease.names, num_computed)

    def trim(self, lease: Lease, num_tokens: int) -> None:
        """Take the blocks back that the first `num_tokens` do not need. Drafts had them; none is in the index."""
        keep = self.blocks_for(num_tokens)
        assert lease.num_indexed <= keep, "a block of the index would be taken back"
        self._cut(lease, keep)
        lease.num_sent = min(lease.num_sent, keep)

    def free(self, lease: Lease) -> None:
        """Take all blocks back, last first, so that the tail of a prefix is evicted before its head."""
        self._cut(lease, 0)
        lease.num_indexed = lease.num_sent = 0
        if self.states is not None:
            self.states.free(lease.state)

    def set_prefix_caching(self, enabled: bool) -> None:
        """Switch on a live cache. Off forgets what nobody holds, in host memory too; what is held is forgotten when it
        is given away."""
        self.enable_prefix_caching = enabled
        if not enabled:
            self._pool.discard_evictable()
            if self.states is not None:
                self.states.clear()
            if self.host is not None:
                self.host.clear()

    def state_of(self, lease: Lease, start: int, num_tokens: int) -> RowState | None:
        """Returns where a row that is planned now has its state; None where there are no states."""
        if self.states is None:
            return None
        return self.states.plan(lease.state, start, num_tokens, self.enable_prefix_caching)

    def take_moves(self) -> tuple[Moves, Moves]:
        """Offloads (block, slot) and restores (slot, block), once each, for the plan that is sent next."""
        return ((), ()) if self.host is None else self.host.take_moves()

    def num_known(self, names: Sequence[bytes]) -> int:
        """Returns how many of these blocks, from the first on, are in the index now. Any thread may ask."""
        return next((place for place, name in enumerate(names) if self._index.find(name) is None), len(names))

    def adopt(self, names: Sequence[bytes], numbers: Sequence[int]) -> list[int]:
        """Take a block for each of these contents, which the runner keeps by number, for the next plan to copy there.
        Returns the numbers of what is not wanted (any more): it is here already, or no block is free. Not with host
        memory for evicted blocks, where a block might be copied out before its content has come in."""
        assert self.host is None, "imports go to no cache with a second tier"
        for name, number in zip(names, numbers, strict=True):
            if self.enable_prefix_caching and self._index.find(name) is None and self._pool.num_free:
                (block_id,) = self._take(1)
                self._index.add((name,), (block_id,))
                self._imports.plan(block_id, number)
                self._pool.release((block_id,), self._index.holds)
            else:
                self._imports.unwanted.append(number)
        return self._imports.take_unwanted()

    def take_imports(self) -> Moves:
        """Imports (number, block), once each, for the plan that is sent next."""
        return self._imports.take()

    def take_unwanted(self) -> list[int]:
        """Returns the numbers of contents that lost their blocks, once."""
        return self._imports.take_unwanted()

    def exportable(self, names: Sequence[bytes] | None, skip: int, most: int) -> list[tuple[bytes, int]]:
        """Returns the named blocks that are in the index and whose content is there: name and block. None: of all that
        nobody holds, those that were used latest. skip: so many of the first are left out."""
        index, on_their_way = self._index, self._imports.on_their_way
        if names is None:
            latest = ((index.name_of(block_id), block_id) for block_id in self._pool.latest_evictable())
        else:
            latest = ((name, block_id) for name in names if (block_id := index.find(name)) is not None)
        return list(islice((each for each in latest if each[1] not in on_their_way), skip, skip + most))

    def check(self, leases: Iterable[Lease]) -> None:
        """Raise AssertionError if a block or a slot leaked or doubled, or an index disagrees with its pool."""
        leases = list(leases)
        num_holders: dict[int, int] = {}
        for lease in leases:
            held = [block_id for block_id in lease.block_ids if block_id != NO_BLOCK]
            assert len(set(held)) == len(held), "a lease holds a block twice"
            for block_id in held:
                num_holders[block_id] = num_holders.get(block_id, 0) + 1
        self._pool.check(num_holders)
        self._index.check()
        if self.states is not None:
            self.states.check(lease.state for lease in leases)
        if self.host is not None:
            self.host.check(slot for lease in leases for _, slot in lease.in_host)

    def _take(self, count: int) -> list[int]:
        if self.host is None:
            taken = self._pool.take(count)
            self._imports.forget(taken)
            return taken
        taken = []
        for _ in range(count):  # one by one: a restore that is forgotten may leave a slot for the next one's content
            taken += self._pool.take(1)
            self.host.forget_restore(taken[-1])
        return taken

    def _cut(self, lease: Lease, keep: int) -> None:
        """Take the lease's blocks behind its first `keep` back, last first."""
        if self.host is not None:
            for place, slot in reversed(lease.in_host):
                if place >= keep:
                    self.host.unpin(slot)
            lease.in_host = [each for each in lease.in_host if each[0] < keep]
        self._pool.release((each for each in reversed(lease.block_ids[keep:]) if each != NO_BLOCK), self._index.holds)
        del lease.block_ids[keep:]

    def _evict(self, host: HostTier, block_id: int) -> None:
        """The pool gives it away; its content may go to host memory."""
        name = self._index.forget(block_id)
        if self.enable_prefix_caching:
            host.offload(name, block_id)

    def _plan_restores(self, lease: Lease, host: HostTier) -> None:
        """A block for each of the lease's hits in host memory."""
        for place, slot in lease.in_host:
            (block_id,) = self._take(1)
            lease.block_ids[place] = block_id
            host.restore(slot, block_id)
            self._index.add((lease.names[place],), (block_id,))
        lease.in_host.clear()

    def _name_blocks(self, lease: Lease, count: int, token_ids: Sequence[int]) -> None:
        """Name the lease's first `count` blocks; the chain is computed once and kept."""
        names = lease.names
        if len(names) < count:
            parent = names[-1] if names else lease.root
            begin, end = len(names) * self.block_size, count * self.block_size
            names += block_names(parent, token_ids[begin:end], self.block_size)


def num_in_common(found: Sequence[int], block_ids: Sequence[int]) -> int:
    """Returns how many blocks two leases have in common, which are their first ones."""
    most = min(len(found), len(block_ids))
    return bisect_left(range(most), True, key=lambda place: found[place] != block_ids[place])


class Imports:
    """unwanted: numbers of contents that found no block or lost it, until `take_unwanted`."""

    def __init__(self) -> None:
        self._planned: dict[int, int] = {}  # by block, the number of its content
        self._handed_out: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())  # the latest plan's last
        self.unwanted: list[int] = []

    def plan(self, block_id: int, number: int) -> None:
        self._planned[block_id] = number

    def forget(self, block_ids: Iterable[int]) -> None:
        """These go to somebody else."""
        if self._planned:
            self.unwanted += [self._planned.pop(each) for each in block_ids if each in self._planned]

    def take(self) -> Moves:
        """Content (by number) and block, for the plan that is sent next."""
        if not self._planned and not self._handed_out[1] and not self._handed_out[0]:
            return ()
        moves = tuple((number, block_id) for block_id, number in self._planned.items())
        self._handed_out = self._handed_out[1], frozenset(self._planned)
        self._planned = {}
        return moves

    def take_unwanted(self) -> list[int]:
        """Returns the numbers of contents that nobody wants, once."""
        unwanted, self.unwanted = self.unwanted, []
        return unwanted

    @property
    def on_their_way(self) -> set[int]:
        """Blocks in the index whose content may not be there yet."""
        return {*self._planned, *self._handed_out[0], *self._handed_out[1]}
