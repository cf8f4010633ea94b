"""Blocks that another server has sent: found under their names, with their content, by nobody of another salt, whatever
happens between their coming and the plan that copies them; and what is sent on is what its name says.

A content is the name of what was computed; `plan` is a plan that is made, `run` carries the oldest one out.
"""

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.kv.blocks import block_names, root_name
from splittime.kv.cache import KVCache, Lease

SIZE = 2


class Pair:
    """A cache with its memory, and plans of which one may be in flight while the next is made."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = KVCache(num_blocks, SIZE)
        self.blocks: dict[int, bytes] = {}
        self.received: dict[int, bytes] = {}
        self.in_flight: deque = deque()

    def plan(self, lease: Lease, tokens: list[int], num_found: int) -> None:
        if len(self.in_flight) == 2:
            self.run()
        self.in_flight.append((self.cache.take_imports(), lease, tuple(lease.block_ids), tokens, num_found))

    def run(self) -> None:
        imports, lease, block_ids, tokens, num_found = self.in_flight.popleft()
        self.blocks |= {block: self.received.pop(number) for number, block in imports}
        names = block_names(lease.root, tokens, SIZE)
        for place, block_id in enumerate(block_ids):
            if place < num_found // SIZE:
                assert self.blocks[block_id] == names[place], f"block {block_id} does not hold its prefix"
            else:
                self.blocks[block_id] = names[place] if place < len(names) else b"part"
        if lease.block_ids:  # else it was aborted meanwhile
            self.cache.commit(lease, tokens, len(tokens))
            self.cache.free(lease)

    def ask(self, tokens: list[int], salt: str, is_aborted: bool) -> None:
        lease = Lease(salt)
        num_found = self.cache.match(lease, tokens)
        if not self.cache.reserve(lease, len(tokens)):
            self.cache.free(lease)
            return
        self.plan(lease, tokens, num_found)
        if is_aborted:
            self.cache.free(lease)

    def give(self, names) -> dict[bytes, bytes]:
        found = {name: self.blocks[block_id] for name, block_id in self.cache.exportable(names, 0, 100)}
        assert all(name == content for name, content in found.items()), "what is sent is not what its name says"
        return found

    def take_in(self, contents: dict[bytes, bytes]) -> None:
        first = max(self.received, default=0) + 1
        numbers = range(first, first + len(contents))
        self.received |= dict(zip(numbers, contents.values(), strict=True))
        for number in self.cache.adopt(list(contents), numbers):
            del self.received[number]


tokens_of = st.lists(st.integers(0, 1), min_size=1, max_size=8)
asked = st.tuples(st.just("ask"), st.integers(0, 1), tokens_of, st.sampled_from(("", "a")), st.booleans())
given_ = st.tuples(st.just("give"), st.integers(0, 1), st.none() | tokens_of, st.sampled_from(("", "a")))
ran = st.tuples(st.just("run"), st.integers(0, 1))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(asked, given_, ran), max_size=40), st.integers(4, 9))
def test_what_is_found_is_what_its_name_says(moves, num_blocks) -> None:
    pairs = Pair(num_blocks), Pair(num_blocks)
    for kind, place, *told in moves:
        here, there = pairs[place], pairs[1 - place]
        if kind == "ask":
            here.ask(*told)
        elif kind == "give":
            tokens, salt = told
            names = None if tokens is None else block_names(root_name(salt), tokens, SIZE)
            there.take_in(here.give(names))
        elif here.in_flight:
            here.run()
        waiting = [lease for _, lease, *_ in here.in_flight if lease.block_ids]
        here.cache.check(waiting)
    for pair in pairs:
        while pair.in_flight:
            pair.run()


TOKENS = list(range(9))
NAMES = block_names(root_name("a"), TOKENS, SIZE)


def sent(num_blocks: int = 8) -> Pair:
    receiver = Pair(num_blocks)
    receiver.take_in({name: name for name in NAMES[:3]})
    return receiver


def test_a_prefix_that_came_is_cached_for_its_salt_alone() -> None:
    cache = sent().cache
    assert cache.num_known(NAMES) == 3
    assert cache.match(Lease("a"), TOKENS) == 3 * SIZE
    assert cache.match(Lease("b"), TOKENS) == cache.match(Lease(), TOKENS) == 0


def test_it_is_not_sent_on_before_it_has_been_copied() -> None:
    receiver = sent()
    for num_plans in range(4):
        there = [name for name, _ in receiver.cache.exportable(NAMES, 0, 9)]
        assert there == (NAMES[:3] if num_plans == 3 else [])
        receiver.cache.take_imports()
    assert receiver.cache.take_imports() == ()
    assert [name for name, _ in receiver.cache.exportable(None, 0, 2)] == [NAMES[2], NAMES[1]]  # used latest first
    assert [name for name, _ in receiver.cache.exportable(None, 1, 2)] == [NAMES[1], NAMES[0]]


def test_what_finds_no_room_is_here_already_or_is_not_cached_is_not_wanted() -> None:
    receiver = sent(num_blocks=4)
    lease = Lease()
    assert receiver.cache.reserve(lease, 3 * SIZE)  # takes the free one and two of those that came
    assert receiver.cache.adopt(NAMES[3:4] * 2, [7, 8]) == [1, 2, 3, 8]  # the third lost its block to the fourth
    assert [number for number, _ in receiver.cache.take_imports()] == [7]
    assert receiver.cache.reserve(lease, 4 * SIZE)
    assert receiver.cache.adopt(NAMES[:1], [8]) == [8]
    receiver.cache.free(lease)
    receiver.cache.set_prefix_caching(False)
    assert receiver.cache.adopt(NAMES[:1], [9]) == [9]
