"""The KV cache's door: prefixes found, blocks counted, evicted from the tail, salted by tenant."""

from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.kv.blocks import block_names, root_name
from splittime.kv.cache import KVCache, Lease


def lease_for(cache: KVCache, tokens: list[int], salt: str = "") -> tuple[Lease, int]:
    """A lease that holds all of `tokens`, computed and indexed; and how many were found in the cache."""
    lease = Lease(salt)
    num_cached = cache.match(lease, tokens)
    assert cache.reserve(lease, len(tokens))
    cache.commit(lease, tokens, len(tokens))
    return lease, num_cached


def test_prefix_is_found_up_to_the_last_full_block_but_never_whole() -> None:
    cache = KVCache(num_blocks=16, block_size=4)
    tokens = list(range(12))
    first, num_cached = lease_for(cache, tokens)
    assert num_cached == 0
    second, num_cached = lease_for(cache, tokens)
    assert num_cached == 8  # the last block holds the token whose logits are wanted
    assert second.block_ids[:2] == first.block_ids[:2]
    third, num_cached = lease_for(cache, [*tokens, 99])
    assert num_cached == 12
    cache.check([first, second, third])


def test_freed_blocks_are_still_found_and_the_tail_is_evicted_first() -> None:
    cache = KVCache(num_blocks=4, block_size=4)
    tokens = list(range(16))
    lease, _ = lease_for(cache, tokens)
    cache.free(lease)
    assert cache.num_used == 0
    assert cache.num_cached == 4
    other, _ = lease_for(cache, [77, 78])
    again = Lease()
    assert cache.match(again, [*tokens, 1]) == 12
    cache.check([other, again])


def test_tenants_with_other_salts_share_nothing() -> None:
    cache = KVCache(num_blocks=16, block_size=2)
    lease_for(cache, [1, 2, 3, 4], salt="a")
    assert lease_for(cache, [1, 2, 3, 4], salt="b")[1] == 0
    assert lease_for(cache, [1, 2, 3, 4], salt="a")[1] == 2


def test_reserve_refuses_with_nothing_changed() -> None:
    cache = KVCache(num_blocks=4, block_size=4)
    lease = Lease()
    assert not cache.reserve(lease, 17)
    assert lease.block_ids == []
    assert cache.reserve(lease, 16)


def test_trim_takes_back_what_so_many_tokens_do_not_need() -> None:
    cache = KVCache(num_blocks=8, block_size=4)
    lease = Lease()
    cache.reserve(lease, 6)
    cache.commit(lease, list(range(6)), 6)
    assert len(lease.unsent()) == 2
    cache.reserve(lease, 15)
    kept, dropped = lease.block_ids[:2], lease.block_ids[2:]
    assert lease.unsent() == tuple(dropped)
    for num_tokens in (8, 5):
        cache.trim(lease, num_tokens)
        assert (lease.block_ids, cache.num_used, cache.num_cached) == (kept, 2, 0)
        cache.check([lease])
    cache.reserve(lease, 9)
    assert lease.unsent() == (lease.block_ids[2],)
    cache.check([lease])


def test_switching_prefix_caching_off_forgets_what_nobody_holds() -> None:
    cache = KVCache(num_blocks=8, block_size=4)
    lease, _ = lease_for(cache, list(range(8)))
    cache.free(lease)
    cache.set_prefix_caching(False)
    assert cache.num_cached == 0
    assert lease_for(cache, list(range(8)))[1] == 0


def test_switched_off_it_does_not_even_find_what_is_held() -> None:
    cache = KVCache(num_blocks=8, block_size=4)
    held, _ = lease_for(cache, list(range(8)))
    cache.set_prefix_caching(False)
    other = Lease()
    assert cache.match(other, [*range(8), 9]) == 0
    cache.check([held, other])


def test_names_depend_on_every_token_before() -> None:
    root = root_name("")
    first, second = block_names(root, [1, 2, 5, 6], 2)
    assert (first, second) == (*block_names(root, [1, 2, 9], 2), *block_names(first, [5, 6], 2))
    assert not {first, second} & set(block_names(root, [1, 3, 5, 6], 2))
    assert len({block_names(root_name(salt), [1], 1)[0] for salt in ("", "a", "b")}) == 3


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 1), min_size=1, max_size=12)), max_size=40),
)
def test_blocks_neither_leak_nor_double(block_size: int, caching: bool, script: list) -> None:
    """Six clients open and close leases at random; the books hold after each move, and all comes back at the end."""
    cache = KVCache(num_blocks=14, block_size=block_size, enable_prefix_caching=caching)
    leases: dict[int, Lease] = {}
    for client, tokens in script:
        if client in leases:
            cache.free(leases.pop(client))
        else:
            lease = Lease()
            num_cached = cache.match(lease, tokens)
            assert num_cached < len(tokens)
            if cache.reserve(lease, len(tokens)):
                cache.commit(lease, tokens, len(tokens))
                leases[client] = lease
            else:
                cache.free(lease)
        cache.check(leases.values())
    for lease in leases.values():
        cache.free(lease)
    assert cache.num_used == 0


def test_a_block_is_found_once_all_its_tokens_are_computed_and_not_before() -> None:
    cache = KVCache(num_blocks=16, block_size=4)
    tokens = list(range(12))
    lease = Lease()
    assert cache.reserve(lease, len(tokens))
    for num_computed in range(1, 13):
        cache.commit(lease, tokens, num_computed)
        other = Lease()
        assert cache.match(other, [*tokens, 99]) == num_computed // 4 * 4
        cache.free(other)


def test_so_many_blocks_stay_free_as_were_asked_for() -> None:
    cache = KVCache(num_blocks=8, block_size=4)
    for num_tokens, keep_free, has_room in (
        (32, 0, True),
        (29, 1, False),
        (28, 1, True),
        (25, 1, True),
        (24, 3, False),
    ):
        assert cache.has_room(Lease(), num_tokens, keep_free) is has_room


def test_the_least_recently_used_goes_first_and_a_shared_block_stays() -> None:
    cache = KVCache(num_blocks=3, block_size=2)
    a, b, c = ([10, 11], [20, 21], [30, 31])
    for tokens in (a, b, c):
        cache.free(lease_for(cache, tokens)[0])
    held, num_cached = lease_for(cache, [*a, 1])  # uses a again, and takes b, the oldest, for its second block
    assert num_cached == 2
    assert cache.match(Lease(), [*b, 1]) == 0
    again = Lease()
    assert cache.match(again, [*c, 1]) == 2
    shared = Lease()
    assert cache.match(shared, [*a, 9]) == 2
    cache.free(held)
    assert cache.num_used == 2  # a by `shared`, c by `again`
    cache.check([shared, again])
