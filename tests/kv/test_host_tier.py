"""The second tier: what is evicted from the device is found in host memory, and is the right content when it is back.

`Memory` moves contents as a runner would: a block holds the name of what was computed into it.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.kv.blocks import block_names
from splittime.kv.cache import HostTier, KVCache, Lease


class Memory:
    """Blocks and slots with their contents; `send` is a plan that is carried out."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.blocks: dict[int, bytes] = {}
        self.slots: dict[int, bytes] = {}

    def send(self) -> tuple[int, int]:
        """Each kind at once, as the runner does: first all reads, then all writes."""
        offloads, restores = self.cache.take_moves()
        for moves in (offloads, restores):
            assert len({target for _, target in moves}) == len(moves)
        assert len({block for block, _ in offloads}) == len(offloads)
        self.slots |= {slot: self.blocks[block] for block, slot in offloads}
        self.blocks |= {block: self.slots[slot] for slot, block in restores}
        return len(offloads), len(restores)

    def open(self, tokens: list[int], salt: str = "") -> tuple[Lease, int] | None:
        """A lease of all tokens, what was not found computed; and how many were found. None: no room."""
        lease = Lease(salt)
        num_found = self.cache.match(lease, tokens)
        if not self.cache.reserve(lease, len(tokens)):
            self.cache.free(lease)
            return None
        self.send()
        self.compute(lease, tokens, num_found)
        return lease, num_found

    def compute(self, lease: Lease, tokens: list[int], num_found: int) -> None:
        """After a plan was sent: the row's blocks hold its prefix; the rest is computed and committed."""
        size = self.cache.block_size
        names = block_names(lease.root, tokens, size)
        for i, block_id in enumerate(lease.block_ids):
            if i < num_found // size:
                assert self.blocks[block_id] == names[i], f"block {block_id} does not hold its prefix"
            else:
                self.blocks[block_id] = names[i] if i < len(names) else b"part"
        self.cache.commit(lease, tokens, len(tokens))


def made(num_blocks: int = 4, num_slots: int = 4, block_size: int = 4) -> Memory:
    return Memory(KVCache(num_blocks, block_size, num_host_slots=num_slots))


def opened(memory: Memory, tokens: list[int]) -> tuple[Lease, int]:
    found = memory.open(tokens)
    assert found is not None
    memory.cache.check([found[0]])
    return found


FIRST, OTHER = list(range(16)), list(range(100, 116))


def test_what_was_evicted_is_found_in_host_memory() -> None:
    memory = made()
    cache = memory.cache
    for tokens in (FIRST, OTHER):
        lease, num_found = opened(memory, tokens)
        assert num_found == 0
        cache.free(lease)
    assert cache.host is not None
    assert (cache.host.num_held, cache.host.num_offloaded, cache.host.num_restored) == (4, 4, 0)
    lease, num_found = opened(memory, FIRST)
    assert num_found == 12
    assert (cache.host.num_restored, cache.num_used) == (3, 4)


def test_a_block_that_is_kept_already_is_not_copied_again() -> None:
    memory = made(num_slots=8)
    for _ in range(3):
        for tokens in (FIRST, OTHER):
            memory.cache.free(opened(memory, tokens)[0])
    assert memory.cache.host is not None
    assert memory.cache.host.num_offloaded == 8


def test_of_a_prefix_in_both_tiers_each_block_comes_from_where_it_is() -> None:
    memory = made(num_blocks=5, num_slots=8)
    memory.cache.free(opened(memory, FIRST)[0])
    small, _ = opened(memory, [200, 201, 202, 203, 204, 205, 206, 207])  # takes the free block and the prefix's tail
    memory.cache.free(small)
    lease = Lease()
    assert memory.cache.match(lease, [*FIRST, 1]) == 16
    assert [place for place, _ in lease.in_host] == [3]
    memory.cache.check([lease])
    assert memory.cache.reserve(lease, 17)
    assert memory.send() == (2, 1)
    memory.compute(lease, [*FIRST, 1], 16)
    memory.cache.check([lease])


def test_a_slot_that_is_to_be_restored_from_is_not_taken_for_an_offload() -> None:
    """One slot, one block: to bring the one back, the other must go, and there is no room for it."""
    memory = made(num_blocks=2, num_slots=1)
    memory.cache.free(opened(memory, FIRST[:4])[0])
    memory.cache.free(opened(memory, OTHER[:8])[0])  # the first's block went to host memory
    lease, num_found = opened(memory, FIRST[:5])
    assert num_found == 4
    memory.cache.check([lease])


def wanted_back() -> tuple[Memory, Lease]:
    """Returns a memory that both prompts went through, and a lease that the first is to be restored for."""
    memory = made(num_slots=8)
    for tokens in (FIRST, OTHER):
        memory.cache.free(opened(memory, tokens)[0])
    lease = Lease()
    memory.cache.match(lease, FIRST)
    assert memory.cache.reserve(lease, 16)
    return memory, lease


def test_a_match_that_comes_to_nothing_leaves_nothing_behind() -> None:
    memory = made()
    for tokens in (FIRST, OTHER):
        memory.cache.free(opened(memory, tokens)[0])
    lease = Lease()
    assert memory.cache.match(lease, FIRST) == 12
    assert not memory.cache.reserve(lease, 40)
    memory.cache.check([lease])
    memory.cache.free(lease)
    memory.cache.check([])
    assert memory.send() == (0, 0)


def test_a_block_given_away_before_its_restore_was_sent_has_nothing_to_keep() -> None:
    """Restored for one who went away at once, taken by another: the copy would come from a block never written."""
    memory, lease = wanted_back()
    memory.cache.free(lease)
    memory.cache.check([])
    other = Lease()
    assert memory.cache.reserve(other, 16)
    memory.cache.check([other])
    offloads, restores = memory.send()
    assert (offloads, restores) == (4, 0)  # OTHER's, and nothing of what was never there
    memory.compute(other, list(range(200, 216)), 0)
    memory.cache.free(other)
    assert opened(memory, FIRST)[1] == 12


def test_off_empties_it_but_for_what_is_on_its_way() -> None:
    memory, lease = wanted_back()
    memory.cache.set_prefix_caching(False)
    memory.cache.check([lease])
    assert memory.cache.host is not None
    assert memory.cache.host.num_held == 0
    memory.send()
    memory.compute(lease, FIRST, 12)
    memory.cache.free(lease)
    memory.cache.check([])
    memory.cache.set_prefix_caching(True)
    assert opened(memory, OTHER)[1] == 0


def test_the_tail_of_a_prefix_leaves_host_memory_before_its_head() -> None:
    memory = made(num_blocks=4, num_slots=5)
    for tokens in (FIRST, OTHER):
        memory.cache.free(opened(memory, tokens)[0])
    memory.cache.free(opened(memory, list(range(200, 216)))[0])  # eight blocks have passed through five slots
    lease = Lease()
    assert memory.cache.match(lease, [*FIRST, 1]) == 4


def test_off_keeps_an_offload_whose_slot_is_to_be_restored_from() -> None:
    """Evicted for one who left, and wanted again, before any plan was sent: out and back in the same plan."""
    memory = made(num_slots=8)
    memory.cache.free(opened(memory, FIRST)[0])
    other = Lease()
    assert memory.cache.reserve(other, 16)
    memory.cache.free(other)
    lease = Lease()
    assert memory.cache.match(lease, FIRST) == 12
    assert memory.cache.reserve(lease, 16)
    memory.cache.set_prefix_caching(False)
    memory.cache.check([lease])
    assert memory.send() == (3, 3)
    memory.compute(lease, FIRST, 12)


def test_switched_off_and_on_again_a_block_that_waits_for_its_content_is_not_kept() -> None:
    memory, lease = wanted_back()
    memory.cache.set_prefix_caching(False)
    memory.cache.set_prefix_caching(True)
    memory.cache.free(lease)
    other = Lease()
    assert memory.cache.reserve(other, 16)
    memory.cache.check([other])
    assert memory.send() == (0, 0)


def test_while_it_is_off_nothing_is_copied() -> None:
    memory = made(num_slots=8)
    lease, _ = opened(memory, FIRST)
    memory.cache.set_prefix_caching(False)
    memory.cache.free(lease)
    assert memory.cache.reserve(Lease(), 16)
    assert memory.send() == (0, 0)


def test_what_came_back_leaves_host_memory_from_its_tail_too() -> None:
    tier = HostTier(3)
    for block_id, name in enumerate((b"tail", b"middle", b"head")):
        tier.offload(name, block_id)
    for block_id, name in enumerate((b"head", b"middle", b"tail")):
        slot = tier.pin(name)
        assert slot is not None
        tier.restore(slot, block_id)
    tier.take_moves()
    tier.offload(b"another", 5)
    assert [tier.pin(name) is None for name in (b"head", b"middle", b"tail")] == [False, False, True]


def test_what_was_found_for_nothing_leaves_host_memory_from_its_tail() -> None:
    """A match touches what it finds: of a prefix that nobody reserved blocks for, the head is to stay the longest."""
    memory = made(num_slots=4)
    for tokens in (FIRST, OTHER):
        memory.cache.free(opened(memory, tokens)[0])
    lease = Lease()
    assert memory.cache.match(lease, [*FIRST, 1]) == 16
    memory.cache.free(lease)
    third, _ = opened(memory, [200, 201, 202, 203])
    memory.cache.free(third)
    assert memory.cache.match(Lease(), [*FIRST, 1]) == 12


def test_a_slot_that_nobody_unpinned_is_noticed() -> None:
    tier = HostTier(2)
    tier.offload(b"a", 0)
    tier.pin(b"a")
    with pytest.raises(AssertionError, match="count 1"):
        tier.check([])
    tier.check([slot for slot in (tier.pin(b"a"),) if slot is not None] * 2)


LENGTHS = st.integers(1, 15)
MOVES = st.one_of(
    st.tuples(st.just("open"), st.integers(0, 5), st.integers(0, 3), LENGTHS),
    st.tuples(st.just("open"), st.integers(0, 5), st.integers(0, 3), LENGTHS),
    st.tuples(st.just("free"), st.integers(0, 5)),
    st.tuples(st.just("send")),
    st.tuples(st.just("caching"), st.booleans()),
)


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 3), st.integers(4, 16), st.integers(1, 12), st.lists(MOVES, max_size=60))
def test_every_prefix_is_where_it_is_said_to_be(block_size: int, num_blocks: int, num_slots: int, script: list) -> None:
    """Six clients come and go, between plans too, and plans are sent when it pleases. What a lease found holds its
    content in each plan that it has a row in, and the books agree after each move."""
    memory = made(num_blocks, num_slots, block_size)
    cache, leases, found = memory.cache, dict[int, Lease](), dict[int, tuple[list[int], int]]()
    unsent: set[int] = set()
    for move in script:
        match move:
            case ("open", client, group, length) if client not in leases:
                tokens = [i // (group + 1) for i in range(length)]
                lease = Lease()
                num_found = cache.match(lease, tokens)
                if cache.reserve(lease, len(tokens)):
                    leases[client], found[client] = lease, (tokens, num_found)
                    unsent.add(client)
                else:
                    cache.free(lease)
            case ("free", client) if client in leases:
                cache.free(leases.pop(client))
                unsent.discard(client)
            case ("send",):
                memory.send()
                for client in sorted(unsent):
                    memory.compute(leases[client], *found[client])
                unsent.clear()
            case ("caching", enabled):
                cache.set_prefix_caching(enabled)
        cache.check(leases.values())
    for lease in leases.values():
        cache.free(lease)
    cache.check([])
    assert cache.num_used == 0
