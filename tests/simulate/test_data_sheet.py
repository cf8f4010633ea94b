"""What a data sheet says of a model's steps, against the arithmetic done by hand."""

import random

import msgspec
import pytest

from splittime.core.errors import ConfigError
from splittime.core.facts import TokenCost
from splittime.plan.load import requests_for
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.change import Change
from splittime.simulate.cost import CostModel
from splittime.simulate.data_sheet import (
    BANDWIDTH_SHARE,
    DEVICES,
    MEMORY_SHARE,
    RATE_SHARE,
    RESERVE_BYTES,
    STEP_NS,
    device_named,
    replica_of_data_sheet,
)
from splittime.simulate.replica import load_replica, save_replica
from splittime.simulate.shape import StepShape

EIGHT_B = TokenCost(
    weight_bytes=15_009_316_864,
    kv_bytes_per_token=131_072,
    operations_per_token=13_958_643_712,
    operations_per_context_token=524_288,
    operations_per_sample=1_050_673_152,
)


def shape(rows: int, context: int, prompt: int = 0) -> StepShape:
    pairs = prompt * (prompt + 1) // 2
    return StepShape(rows + (prompt > 0), rows + prompt, rows, rows * context + prompt, pairs)


def middle(share: tuple[float, float]) -> float:
    """Of the times that this share of the best makes."""
    return (1 / share[0] + 1 / share[1]) / 2


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_device_can_be_simulated_and_is_bound_by_its_memory_at_one_row(name: str) -> None:
    device = DEVICES[name]
    replica = replica_of_data_sheet(name, EIGHT_B)
    floor_ns = (EIGHT_B.weight_bytes + 500 * EIGHT_B.kv_bytes_per_token) / device.read_bytes_per_s * 1e9
    expected_ns = floor_ns * middle(BANDWIDTH_SHARE) + sum(STEP_NS) / 2
    assert replica.costs.step_time(shape(1, 500)).step_ns == pytest.approx(expected_ns, rel=1e-6)
    assert "nothing measured" in replica.source


def test_a_mixture_s_step_reads_the_experts_that_its_tokens_are_expected_to_choose() -> None:
    """Of 8 experts a token chooses 2: two tokens leave (3/4)^2 of all alone."""
    mixture = msgspec.structs.replace(EIGHT_B, idle_expert_bytes=60 * 10**9, num_experts=8, chosen_experts=2)
    device = msgspec.structs.replace(DEVICES["MI300X"], memory_bytes=10**12)
    costs = replica_of_data_sheet(device, mixture).costs
    one, two, many = (costs.step_time(shape(rows, 1)).step_ns for rows in (1, 2, 60))
    byte_ns = 1e9 / device.read_bytes_per_s * middle(BANDWIDTH_SHARE)
    assert two - one == pytest.approx(60e9 / 4 * byte_ns, rel=1e-3)
    assert many - one == pytest.approx(60e9 * byte_ns, rel=1e-2)


def test_a_long_prompt_is_bound_by_the_arithmetic() -> None:
    costs = replica_of_data_sheet("H100", EIGHT_B).costs
    operations = 512 * EIGHT_B.operations_per_token + EIGHT_B.operations_per_sample
    operations += (512 * 513 // 2 + 512) * EIGHT_B.operations_per_context_token
    expected_ns = operations / 989.5e12 * 1e9 * middle(RATE_SHARE) + sum(STEP_NS) / 2
    assert costs.step_time(shape(0, 0, 512)).step_ns == pytest.approx(expected_ns, rel=1e-6)


def test_where_both_bounds_meet_a_step_takes_the_larger_and_not_their_sum() -> None:
    costs = replica_of_data_sheet("H100", EIGHT_B).costs
    times = {rows: costs.step_time(shape(rows, 1)).step_ns for rows in (1, 64, 512)}
    assert times[64] == pytest.approx(times[1], rel=0.02)
    assert times[512] > 1.5 * times[64]


def test_eight_bits_are_read_in_half_the_time_and_multiplied_at_the_rate_that_the_sheet_says() -> None:
    assert DEVICES["H100"].rate("fp8") == 2 * DEVICES["H100"].rate("bfloat16")
    assert DEVICES["A100-80GB"].rate("fp8") == DEVICES["A100-80GB"].rate("bfloat16")
    assert DEVICES["H100"].rate("int4") == DEVICES["H100"].rate("bfloat16")
    with pytest.raises(ConfigError, match="does not say"):
        DEVICES["B200"].rate("float32")


def test_the_blocks_are_what_the_memory_has_left() -> None:
    replica = replica_of_data_sheet("H100", EIGHT_B, weights_bytes=16_059_990_016)
    room = 80e9 * MEMORY_SHARE - RESERVE_BYTES - 16_059_990_016
    assert replica.config.num_blocks == int(room // (16 * 131_072))


def test_a_model_that_does_not_fit_is_refused_with_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"need 140\.3 GB; H100 has 70\.0 GB"):
        replica_of_data_sheet("H100", EIGHT_B, weights_bytes=140 * 10**9)
    with pytest.raises(ConfigError) as error:
        replica_of_data_sheet("H1000", EIGHT_B)
    assert "H200" in str(error.value.info.hint)


def test_draws_lie_within_what_is_stated_nine_times_in_ten() -> None:
    costs, rng = replica_of_data_sheet("H100", EIGHT_B).costs, random.Random(0)
    best_ns = EIGHT_B.weight_bytes / 3350  # bytes in a ns
    low, high = (best_ns / share for share in reversed(BANDWIDTH_SHARE))
    drawn = [weights_ns(costs.sample(rng)) for _ in range(1000)]
    assert sum(low <= value <= high for value in drawn) == pytest.approx(900, abs=40)


def weights_ns(model: CostModel) -> float:
    """What the weights take to be read, told by the KV positions: both are read at one bandwidth."""
    return model.device[4] * EIGHT_B.weight_bytes / EIGHT_B.kv_bytes_per_token


def test_it_can_be_run_and_kept(tmp_path) -> None:
    device = device_named("two cores:8:20:0.2")
    small = TokenCost(
        weight_bytes=8_000_000,
        kv_bytes_per_token=2048,
        operations_per_token=5_900_000,
        operations_per_context_token=4096,
    )
    replica = replica_of_data_sheet(device, small, SchedulerConfig(max_model_len=1024), num_blocks=4096)
    load = {"rate": 20.0, "duration_s": 2.0, "input_tokens": "96", "output_tokens": "12", "seed": 3}
    books = replica.run(requests_for(load, replica), Change(), seed=0)
    assert {account.output_tokens for account in books.accounts} == {12}
    save_replica(replica, tmp_path / "replica.json")
    assert load_replica(tmp_path / "replica.json") == replica


@pytest.mark.parametrize("text", ["epyc:256:300", "epyc:256:300:fast", ":1:1:1", "epyc:256:0:4", "epyc:256:nan:4"])
def test_figures_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not NAME:GB:GB/S:TFLOPS"):
        device_named(text)
