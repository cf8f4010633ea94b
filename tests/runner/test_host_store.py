"""Copies of blocks to host memory and back: every byte of every layer, whatever the dtype, many at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.core.errors import ConfigError, EngineError
from splittime.core.step import StepPlan
from splittime.kernels.layer import KvGroup
from splittime.runner import kv_store
from splittime.runner.config import RunnerConfig
from splittime.runner.kv_store import KvStore, bytes_per_block

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)
NUM_BLOCKS, NUM_LAYERS = 9, 3


def groups_of(head_dim: int) -> list[KvGroup]:
    return [KvGroup(tuple(range(NUM_LAYERS)), 3, head_dim, None)]


MIXED = [KvGroup((0, 3), 2, 4, None), KvGroup((1,), 3, 6, 8), KvGroup((2,), 3, 6, None)]


def made(dtype: torch.dtype, num_slots: int, groups: list[KvGroup]) -> KvStore:
    """Every byte of the cache random."""
    store = KvStore(groups, NUM_BLOCKS, 2, dtype, DEVICE, num_slots)
    for layer in store.layers:
        for tensor in (layer.data, layer.scales):
            if tensor is not None:
                raw = tensor.view(torch.uint8)
                raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return store


def blocks_of(store: KvStore) -> list[bytes]:
    """Each block's bytes over all layers."""
    kinds = [tensor for layer in store.layers for tensor in (layer.data, layer.scales) if tensor is not None]
    raw = [tensor.view(torch.uint8).cpu() for tensor in kinds]
    return [b"".join(one[block].numpy().tobytes() for one in raw) for block in range(NUM_BLOCKS)]


def plan(offloads: tuple = (), restores: tuple = ()) -> StepPlan:
    return StepPlan(1, (), offloads=offloads, restores=restores)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("groups", [groups_of(3), groups_of(6), groups_of(16), MIXED], ids=["3", "6", "16", "mixed"])
def test_what_comes_back_is_what_went(dtype: torch.dtype, groups: list[KvGroup]) -> None:
    store = made(dtype, 5, groups)
    before = blocks_of(store)
    assert store.move(plan(offloads=((3, 4), (0, 1), (8, 2)))) is not None
    for layer in store.layers:
        layer.data.view(torch.uint8).zero_()
        if layer.scales is not None:
            layer.scales.zero_()
    store.move(plan(restores=((1, 7), (4, 3), (2, 0))))
    after = blocks_of(store)
    assert [after[7], after[3], after[0]] == [before[0], before[3], before[8]]
    assert not any(any(after[block]) for block in (1, 2, 4, 5, 6, 8))


def test_kinds_are_made_in_the_order_of_the_plan() -> None:
    """A block is offloaded before it is restored into, a slot copied from after it was copied to."""
    store = made(torch.float32, 3, MIXED)
    before = blocks_of(store)
    store.move(plan(offloads=((5, 1),)))
    store.move(plan(offloads=((2, 0),), restores=((1, 2), (0, 6))))
    after = blocks_of(store)
    assert [after[2], after[6]] == [before[5], before[2]]


MOVES = st.tuples(st.booleans(), st.permutations(range(NUM_BLOCKS)), st.permutations(range(7)), st.integers(1, 7))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 4), st.integers(1, 4), st.lists(MOVES, max_size=5))
def test_any_moves_through_any_buffer(dtype: torch.dtype, slab: int, staged: int, script: list) -> None:
    """Slabs of one to four slots, a staging buffer of one to four blocks; against a model that keeps bytes."""
    with pytest.MonkeyPatch.context() as patch:
        slot_bytes = NUM_LAYERS * 2 * 3 * 2 * 6 * dtype.itemsize
        patch.setattr(kv_store, "SLAB_BYTES", slab * slot_bytes)
        patch.setattr(kv_store, "STAGING_BYTES", staged * slot_bytes)
        store = made(dtype, 7, groups_of(6))
    blocks = blocks_of(store)
    slots: dict[int, bytes] = {}
    for is_offload, some_blocks, some_slots, count in script:
        pairs = list(zip(some_blocks[:count], some_slots[:count], strict=True))
        if is_offload:
            store.move(plan(offloads=tuple(pairs)))
            slots |= {slot: blocks[block] for block, slot in pairs}
        else:
            kept = [(slot, block) for block, slot in pairs if slot in slots]
            store.move(plan(restores=tuple(kept)))
            for slot, block in kept:
                blocks[block] = slots[slot]
    assert blocks_of(store) == blocks


def test_what_a_step_without_copies_takes_is_not_told() -> None:
    assert made(torch.float32, 2, MIXED).move(plan()) is None


def test_copies_without_memory_for_them_are_an_error() -> None:
    with pytest.raises(EngineError, match="none was set aside"):
        made(torch.float32, 0, MIXED).move(plan(offloads=((0, 0),)))


@pytest.mark.parametrize("groups", [groups_of(6), MIXED], ids=["alike", "mixed"])
def test_a_slot_takes_what_a_block_takes(groups: list[KvGroup]) -> None:
    for dtype in DTYPES:
        store = made(dtype, 4, groups)
        num_bytes = sum(slab.nbytes for plane in store._host._planes for slab in plane._slabs)
        assert num_bytes == 4 * bytes_per_block(groups, 2, dtype)


def test_room_that_cannot_be_had_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store.this_process, "free_memory_bytes", lambda: 1000)

    def slots(asked: int, kernels: str = "triton", ranks: int = 1) -> int:
        config = RunnerConfig(model_path="", kv_offload_memory_bytes=asked, tensor_parallel_size=ranks)
        config.validate()
        return kv_store.num_host_slots(config, kernels, bytes_per_block=100)

    assert (slots(0, "native"), slots(1000), slots(999), slots(500, ranks=2)) == (0, 10, 9, 5)
    for asked, more, words in (
        (200, {"kernels": "native"}, "in host memory already"),
        (99, {}, "less than one block"),
        (1001, {}, "1000 bytes of host memory are free"),
        (600, {"ranks": 2}, "for each of 2 ranks"),
        (-1, {}, "at least 0"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            slots(asked, **more)
        assert caught.value.info.param == "kv_offload_memory_bytes"
