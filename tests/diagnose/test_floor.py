"""The floor of a step against sums done another way, and its laws: it grows with what there is to do."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splittime.core.facts import Machine, TokenCost
from splittime.diagnose.floor import Bound, Kind, batch_class, floors, operations, sentence, step_floor
from splittime.ledger.facts import ServerFacts
from splittime.ledger.steps import StepRecord

GB = 10**9
COST = TokenCost(
    weight_bytes=2 * GB,
    kv_bytes_per_token=100_000,
    operations_per_token=2 * GB,
    operations_per_context_token=10_000,
    head_bytes=GB // 4,
    operations_per_sample=GB // 2,
)
MACHINE = Machine(cpu="any", threads=2, read_bytes_per_s=20.0 * GB, operations_per_s=100.0 * GB, cache_bytes=32 << 20)


def record(*rows: tuple[int, int], device_ns: int = 200_000_000, host_ns: int = 0, samples: int | None = None):
    """A step of these (start, num_tokens); rows of one token decode unless told."""
    decode_tokens = sum(1 for _, count in rows if count == 1) if samples is None else samples
    return StepRecord(
        step_id=1,
        begin_ns=0,
        end_ns=device_ns + host_ns,
        plan_ns=host_ns,
        launch_ns=0,
        device_ns=device_ns,
        sample_ns=0,
        commit_ns=0,
        host_gap_ns=0,
        idle_ns=0,
        rows=tuple((f"r{index}", start, count) for index, (start, count) in enumerate(rows)),
        prefill_tokens=sum(count for _, count in rows) - decode_tokens,
        decode_tokens=decode_tokens,
        kv_tokens_read=sum(start + count for start, count in rows),
        blocks_used=0,
        num_running=len(rows),
        num_waiting=0,
    )


def test_decoding_reads_the_weights_once_and_each_context():
    floor = step_floor(record((999, 1), (1999, 1)), COST, MACHINE)
    assert floor.weights_ns == 100_000_000
    assert floor.kv_ns == 15_000_000  # 3,000 positions of 100 kB at 20 GB/s
    assert floor.operations_ns == round((2 * 2.5 * GB + 3000 * 10_000) / (100 * GB) * 1e9)
    assert floor.floor_ns == 115_000_000
    assert floor.share == pytest.approx(0.575)
    assert floor.bound is Bound.WEIGHTS


def test_a_chunk_that_does_not_sample_leaves_the_head_alone():
    floor = step_floor(record((0, 100)), COST, MACHINE)
    assert floor.weights_ns == 87_500_000
    assert floor.operations_ns == round((100 * 2 * GB + 5050 * 10_000) / (100 * GB) * 1e9)
    assert floor.bound is Bound.COMPUTE


def test_the_floor_is_the_processor_s_and_the_bound_that_of_the_kernels():
    """With instructions ten times as fast as the kernels the floor is reading, and products still hold the step."""
    fast = msgspec.structs.replace(MACHINE, peak_operations_per_s=10 * MACHINE.operations_per_s)
    step = record((0, 10))  # 20 billion operations: 200 ms by the kernels, 20 at the peak; 87.5 ms of reading
    floor = step_floor(step, COST, fast)
    assert floor.operations_ns == 10 * floor.peak_ns
    assert floor.floor_ns == floor.bytes_ns == 87_500_000 + 50_000
    assert floor.bound is Bound.COMPUTE
    long = floors([record((0, 100), device_ns=4_000_000_000)], facts_of(fast))[0]
    assert long.share == pytest.approx(0.05, abs=0.001)
    assert long.attained == pytest.approx(0.5, abs=0.001)
    assert "runs at 5 % of what this machine can multiply, 50 % of what its kernels can: of the 4e+03" in sentence(long)
    known = floors([record((0, 100), device_ns=4_000_000_000)], facts_of(MACHINE))[0]
    assert known.share == known.attained == pytest.approx(0.5, abs=0.001)
    assert "its kernels" not in sentence(known)


def facts_of(machine: Machine) -> ServerFacts:
    return ServerFacts(version="1", model="m", max_model_len=1, cost=COST, machine=machine)


def test_each_row_reads_and_writes_its_state() -> None:
    step = record((9, 1), (19, 1), (29, 7))
    with_states = step_floor(step, msgspec.structs.replace(COST, state_bytes=50_000_000), MACHINE)
    without = step_floor(step, COST, MACHINE)
    assert with_states is not None
    assert without is not None
    assert with_states.weights_ns == without.weights_ns
    read_rate = MACHINE.read_bytes_per_s
    assert read_rate is not None
    assert with_states.kv_ns - without.kv_ns == pytest.approx(3 * 2 * 50_000_000 / read_rate * 1e9)


def test_long_contexts_are_bound_by_the_kv_cache():
    assert step_floor(record((40_000, 1)), COST, MACHINE).bound is Bound.KV


def test_a_slow_host_is_said_to_be_the_bound():
    assert step_floor(record((10, 1), device_ns=10, host_ns=11), COST, MACHINE).bound is Bound.HOST


def test_what_fits_the_cache_is_not_bound_by_memory():
    small = msgspec.structs.replace(COST, weight_bytes=8_000_000, head_bytes=2_000_000, operations_per_token=6_000_000)
    floor = step_floor(record((10, 1)), small, MACHINE)
    assert floor.fits_cache
    assert floor.bytes_ns == 0
    assert floor.bound is Bound.COMPUTE
    too_large = msgspec.structs.replace(MACHINE, cache_bytes=8_000_000)
    assert step_floor(record((10, 1)), small, too_large).weights_ns > 0


RATES = msgspec.structs.replace(
    MACHINE,
    read_rates=((4 << 20, 40.0 * GB), (64 << 20, 20.0 * GB), (256 << 20, 10.0 * GB)),
    read_bytes_per_s=10.0 * GB,
)


@pytest.mark.parametrize(
    ("mebibytes", "rate", "is_cached"),
    [
        (1, 40, True),
        (4, 40, True),
        (16, 30, True),
        (64, 20, True),
        (128, 15, False),
        (256, 10, False),
        (4096, 10, False),
    ],
)
def test_the_floor_has_the_rate_of_the_steps_own_bytes(mebibytes, rate, is_cached):
    """Whatever cache the machine reports: here one of 480 MiB, which it does not have for itself."""
    boasting = msgspec.structs.replace(RATES, cache_bytes=480 << 20)
    kv_free = msgspec.structs.replace(COST, weight_bytes=mebibytes << 20, head_bytes=0, kv_bytes_per_token=0)
    floor = step_floor(record((10, 1)), kv_free, boasting)
    assert floor.bytes_ns == pytest.approx((mebibytes << 20) / (rate * GB) * 1e9, rel=0.01)
    assert floor.fits_cache is is_cached


def test_no_floor_without_a_bandwidth_or_rows():
    assert step_floor(record((10, 1)), COST, msgspec.structs.replace(MACHINE, read_bytes_per_s=None)) is None
    assert step_floor(record(), COST, MACHINE) is None
    unknown = step_floor(record((10, 1)), COST, msgspec.structs.replace(MACHINE, operations_per_s=None))
    assert unknown.operations_ns is None
    assert unknown.bound is Bound.NONE, "products may take longer"


rows = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=4)


@given(rows, st.none() | st.integers(1, 100), st.sampled_from([0.0, 0.5, 1.0]))
def test_pairs_and_positions_are_those_counted_one_by_one(rows, window, share):
    cost = msgspec.structs.replace(COST, window_tokens=window, windowed_share=share if window else 0.0)
    pairs = positions = 0.0
    for start, count in rows:
        seen = [position + 1 for position in range(start, start + count)]
        in_window = [min(visible, window or visible) for visible in seen]
        old = set(range(start))
        old_in_window = {p for p in old if window is None or p > start - window}
        pairs += sum(seen) + cost.windowed_share * (sum(in_window) - sum(seen))
        positions += count + len(old) + cost.windowed_share * (len(old_in_window) - len(old))
    step = record(*rows)
    products = sum(count for _, count in rows) * COST.operations_per_token + step.decode_tokens * GB // 2
    assert operations(step, cost) == pytest.approx(products + pairs * COST.operations_per_context_token)
    floor = step_floor(step, cost, MACHINE)
    assert floor.kv_ns == pytest.approx(positions * 100_000 / 20, abs=1)


@given(rows, rows)
def test_more_work_has_no_lower_floor(some, more):
    both = step_floor(record(*some, *more), COST, MACHINE)
    assert both.floor_ns >= step_floor(record(*some), COST, MACHINE).floor_ns


def test_batch_classes_do_not_overlap_and_leave_nothing_out():
    classes = [batch_class(count) for count in range(1, 200)]
    assert all(low <= count <= high for count, (low, high) in enumerate(classes, 1))
    distinct = sorted(set(classes))
    assert all(after[0] == before[1] + 1 for before, after in itertools.pairwise(distinct))


def test_groups_by_kind_and_batch_size():
    facts = ServerFacts(version="1", model="m", max_model_len=1, cost=COST, machine=MACHINE)
    steps = [record((10, 1)), record((20, 1)), record(*[(10, 1)] * 7), record((0, 50)), record((0, 50), (10, 1))]
    groups = floors(steps, facts)
    assert {(group.kind, group.rows, group.num_steps) for group in groups} == {
        (Kind.DECODE, (1, 1), 2),
        (Kind.DECODE, (5, 8), 1),
        (Kind.PREFILL, (1, 1 << 20), 1),
        (Kind.MIXED, (1, 1 << 20), 1),
    }
    assert groups[0].num_steps == 2  # the most device time first
    assert groups[0].share == pytest.approx(0.5, abs=0.001)
    assert sentence(groups[0]) == (
        "decode of 1 row runs at 50 % of what this memory can do: of the 200 ms that a step takes on the device it "
        "needs 100; the host adds 0; 100 % of the bytes are weights, 0 % KV"
    )
    alone, together = (floors([record(*[(10, 1)] * rows, device_ns=50_000_000)], facts)[0] for rows in (1, 4))
    assert "more than all" in sentence(alone)
    assert "share a prefix" in sentence(together)
    assert "share a prefix" not in sentence(alone)
    assert "host takes longer" in sentence(floors([record((10, 1), device_ns=5, host_ns=6)], facts)[0])


def test_no_groups_without_facts():
    facts = ServerFacts(version="1", model="m", max_model_len=1, cost=COST)
    assert floors([record((10, 1))], facts) == floors([record((10, 1))], None) == []
