"""A calibration's file that cannot be is refused by the name of what is wrong in it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from known_replicas import ONE_AT_A_TIME

from splittime.core.errors import ConfigError
from splittime.simulate.replica import load_replica, save_replica

SPREAD = [[-1e6] * 6] * 6
BUCKET = {"num_steps": -1, "factor": 1.0, "noise": [1.0]}
OFF = {"off": {"ttft": 0.1}, "runs": 2, "void": 0}


def poisoned(path: Path, field: str, value: Any) -> Path:
    """Writes the file of a sound replica with another value in a field, which dots lead to."""
    save_replica(ONE_AT_A_TIME, path)
    told = json.loads(path.read_bytes())
    *places, name = field.split(".")
    inside = told
    for place in places:
        inside = inside[place]
    inside[name] = value
    path.write_text(json.dumps(told))
    return path


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("start_up_ns", -(10**18), "start_up_ns is -1000000000000000000; it must be 0 to"),
        ("start_up_ns", 10**18, "start_up_ns is 1000000000000000000; it must be 0 to"),
        ("token_cost.kv_bytes_per_token", -5, "token_cost.kv_bytes_per_token is -5; it must be 0 or more"),
        ("token_cost.chosen_experts", 3, "token_cost.chosen_experts is 3; it must be at most num_experts"),
        ("machine.read_bytes_per_s", -1.0, "machine.read_bytes_per_s is -1.0"),
        ("machine.read_rates", [[64, -1.0]], "machine.read_rates is"),
        ("costs.covariance", SPREAD, "costs.covariance is .* variances of 0 or more"),
        ("costs.covariance", [[0.0]], "costs.covariance is .* 6 rows"),
        ("costs.device", [-1.0] * 6, "costs.device is"),
        ("costs.host", [[0.0, 0.0, -1.0]] * 5, "costs.host is"),
        ("costs.host", [[0.0, 0.0]] * 5, "costs.host is"),
        ("costs.move_ns", -1.0, "costs.move_ns is -1.0"),
        ("costs.about", {"off": 7}, "costs.about is"),
        ("costs.about", {"version": 7}, "costs.about is"),
        ("costs.errors.median_relative", -5, "costs.errors is"),
        ("costs.errors.mean_relative", -5, "costs.errors is"),
        ("costs.num_steps", -7, "costs.num_steps is -7; it must be 0 or more"),
        ("costs.most", [-1] * 6, "costs.most is"),
        ("costs.buckets", {"decode, up to 1": BUCKET}, "costs.buckets is"),
        ("costs.basis.captured_rows", -1, "costs.basis is"),
        ("pace.decode", {"begins_ns": [2, 1], "factors": [1.0, 1.0]}, "pace.decode is"),
        ("pace.prompts", {"begins_ns": [2, 1], "factors": [1.0, 1.0]}, "pace.prompts is"),
        ("approach", [0, -1.0, 0], "approach is"),
        ("delivery", [0, 0, -1], "delivery is"),
        ("limits.max_queued_requests", -1, "limits is"),
        ("execution", "moon", "execution is moon; it must be host, eager, captured"),
        ("format", 1, "is of format 1; this version reads 2"),
    ],
)
def test_what_cannot_be_is_named(tmp_path: Path, field: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        load_replica(poisoned(tmp_path / "one.json", field, value))
    assert "Calibrate" in str(raised.value.info.hint)


def test_what_can_be_is_read(tmp_path: Path) -> None:
    path = poisoned(tmp_path / "one.json", "costs.about", {"model": "m", "version": "1", "more": 7, **OFF})
    assert msgspec.structs.replace(load_replica(path).costs, about={}) == ONE_AT_A_TIME.costs
