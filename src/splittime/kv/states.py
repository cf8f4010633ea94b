"""States of sequences, for models whose layers keep one in place of keys and values: slots, beside the blocks.

A state is what such layers made of all tokens so far. It has a fixed size, and it cannot be cut back to fewer tokens.
So a request has a slot of its own, in which its rows go on; and on the way copies are left behind in other slots,
*checkpoints*, every `CHECKPOINT_TOKENS` tokens at a block's end. A checkpoint has that block's name (`kv.blocks`), so
that a prompt with the same beginning goes on from it: of its cached blocks it gets those before the last checkpoint.

    tokens       [ 0 .. 63 | 64 .. 127 | 128 .. 150 ]
    blocks       [ n0      | n1        |            ]      64 tokens a block
    checkpoints       behind n0   behind n1
    own slot                                 behind 150

A slot is held, kept (it can be found, and is taken back least recently used first) or free, as blocks are. What holds
one: a request its own; a request the checkpoint that it was found by, until its second step is planned; and a step the
checkpoints that it writes, until it is committed, which is when they can be found. Rows of one step so never write what
another one reads. Steps run in order, so what a later step writes may be given away before.

Where there are few slots, a step leaves its last checkpoints, which the next turn of a conversation needs. Once a
request has left a later one, its earlier one is given away before others': a long prompt pushes out its own.
"""

import math
from collections.abc import Iterable, Sequence

from splittime.core.step import CHECKPOINT_TOKENS, NO_STATE, SPARE_STATES, RowState
from splittime.kv.blocks import BlockPool, PrefixIndex


class LeasedState:
    """own: the slot of a request; begins_from: what its first row reads; has_begun: that row was planned. found: the
    checkpoint that it goes on from, while it holds that. kept: checkpoints of steps that are not committed, as (tokens,
    slot). latest: the last one that it has left, its name and slot. `NO_STATE` stands for no slot."""

    __slots__ = ("begins_from", "found", "has_begun", "kept", "latest", "own")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Hold nothing."""
        self.own = self.begins_from = self.found = NO_STATE
        self.has_begun = False
        self.kept: list[tuple[int, int]] = []
        self.latest: tuple[bytes, int] | None = None

    def held(self) -> list[int]:
        """Returns the slots that it holds."""
        return [*(slot for slot in (self.own, self.found) if slot != NO_STATE), *(slot for _, slot in self.kept)]


class StateSlots:
    """block_size: of the KV cache, in tokens."""

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._every = math.lcm(CHECKPOINT_TOKENS, block_size)
        self._block_size = block_size
        self._index = PrefixIndex()
        self._pool = BlockPool(num_slots, self._index.forget)

    @property
    def num_free(self) -> int:
        """Returns how many slots nobody holds."""
        return self._pool.num_free

    @property
    def num_kept(self) -> int:
        """Returns how many checkpoints can be found and are held by nobody."""
        return self._pool.num_evictable

    @property
    def has_room(self) -> bool:
        """Returns whether a newcomer finds a slot."""
        return self._pool.num_free >= SPARE_STATES

    def find(self, state: LeasedState, names: Sequence[bytes]) -> int:
        """Hold the last checkpoint within the blocks of these names. Returns how many of them lie before it."""
        step = self._every // self._block_size
        for count in range(len(names) // step * step, 0, -step):
            slot = self._index.find(names[count - 1])
            if slot is not None:
                self._pool.share(slot)
                state.found = state.begins_from = slot
                return count
        return 0

    def take(self, state: LeasedState) -> bool:
        """Give it a slot of its own, unless it has one; False if there is none."""
        if state.own == NO_STATE:
            if not self._pool.num_free:
                return False
            (state.own,) = self._pool.take(1)
        return True

    def plan(self, state: LeasedState, start: int, num_tokens: int, keeps: bool) -> RowState:
        """Returns what a row of so many tokens reads and writes. keeps: with checkpoints, while there are slots."""
        read = state.own if state.has_begun else state.begins_from
        if state.has_begun:  # who reads it is in an earlier step
            self._let_go_of_found(state)
        state.has_begun = True
        if not keeps:
            self._let_go_of_kept(state)
            return RowState(read, state.own)
        ends = range(start // self._every * self._every + self._every, start + num_tokens + 1, self._every)
        room = max(0, self._pool.num_free - SPARE_STATES)
        ends = ends[max(0, len(ends) - room) :]
        slots = self._pool.take(len(ends))
        state.kept += zip(ends, slots, strict=True)
        return RowState(read, state.own, tuple((end - start, slot) for end, slot in zip(ends, slots, strict=True)))

    def commit(self, state: LeasedState, names: Sequence[bytes], num_computed: int) -> None:
        """Make the checkpoints of so many computed tokens known. names: of the blocks that they fill."""
        while state.kept and state.kept[0][0] <= num_computed:
            end, slot = state.kept.pop(0)
            name = names[end // self._block_size - 1]
            self._index.add((name,), (slot,))
            self._release(slot)
            if state.latest is not None and self._index.find(state.latest[0]) == state.latest[1]:
                self._pool.cool(state.latest[1])
            state.latest = name, slot

    def free(self, state: LeasedState) -> None:
        """Take all its slots back."""
        for slot in state.held():
            self._release(slot)
        state.reset()

    def clear(self) -> None:
        """Forget the checkpoints that nobody holds."""
        self._pool.discard_evictable()

    def check(self, states: Iterable[LeasedState]) -> None:
        """Raise AssertionError if a slot leaked or doubled, one is written by two, or the index disagrees."""
        holders: dict[int, list[LeasedState]] = {}
        for state in states:
            for slot in state.held():
                holders.setdefault(slot, []).append(state)
        for slot, held_by in holders.items():
            reads = sum(state.found == slot for state in held_by)
            assert reads == len(held_by) or (reads, len(held_by)) == (0, 1), f"state {slot} is written and held twice"
        self._pool.check({slot: len(held_by) for slot, held_by in holders.items()})
        self._index.check()

    def _let_go_of_found(self, state: LeasedState) -> None:
        if state.found != NO_STATE:
            self._release(state.found)
            state.found = NO_STATE

    def _let_go_of_kept(self, state: LeasedState) -> None:
        """Nobody is to find them."""
        while state.kept:
            self._release(state.kept.pop()[1])

    def _release(self, slot: int) -> None:
        self._pool.release((slot,), self._index.holds)
