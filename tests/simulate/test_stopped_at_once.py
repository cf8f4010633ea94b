"""Many requests meet stop strings at once, and no account says which of them the engine had ended by itself."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from known_runs import CONFIGS, record_run

from splittime.ledger.steps import verify_steps
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.recorded import Recorded
from splittime.simulate.replay import replay


def crowded_run(config: SchedulerConfig, seed: int, plans_ahead: bool, guess_ns: int | None = None) -> Recorded:
    how = {"count": 15, "eos_every": 4, "stops": 0.8, "is_crowded": True}
    return record_run(config, seed, plans_ahead=plans_ahead, guess_ns=guess_ns, **how)


@given(CONFIGS, st.integers(0, 10_000), st.sampled_from(("plain", "ahead", "drafts")))
def test_a_replay_finds_who_had_ended_among_many_that_are_stopped_at_once(
    config: SchedulerConfig, seed: int, kind: str
) -> None:
    """By the blocks that were held, which are known where none are shared."""
    config = msgspec.structs.replace(config, enable_prefix_caching=False)
    recorded = crowded_run(config, seed, kind == "ahead", 3 if kind == "drafts" else None)
    verify_steps(recorded.steps)
    assert replay(recorded) is None


CROWDED = {
    "a block that two hold is held once": (
        {"max_num_seqs": 3, "max_num_batched_tokens": 16, "block_size": 32, "num_blocks": 30, "num_host_slots": 8},
        {"policy": "deadline", "max_prefill_tokens": 16, "starvation_bound_ms": 0.01, "enable_chunked_prefill": False},
        (81, False),
    ),
    "rows in the air hold blocks": (
        {"max_num_seqs": 3, "max_num_batched_tokens": 64, "num_blocks": 20, "num_host_slots": 8},
        {"policy": "deadline", "starvation_bound_ms": 10.0, "enable_chunked_prefill": False},
        (101079, True),
    ),
    "told of two in the order of their rows": (
        {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_blocks": 20, "max_prefill_tokens": 16},
        {"policy": "shortest_prefill", "starvation_bound_ms": 10.0, "enable_chunked_prefill": False},
        (7143, True),
    ),
    "admitted without a row": (
        {"max_num_seqs": 12, "max_num_batched_tokens": 16, "num_blocks": 60, "max_prefill_tokens": 16},
        {"batching": "static", "starvation_bound_ms": 0.01, "enable_chunked_prefill": False},
        (9342, False),
    ),
    "its client had gone away before": (
        {"max_num_seqs": 12, "max_num_batched_tokens": 64, "block_size": 32, "num_blocks": 10},
        {"policy": "deadline", "batching": "static", "starvation_bound_ms": 10.0, "enable_chunked_prefill": False},
        (49, True),
    ),
    "overdue, and told so first": (
        {"max_num_seqs": 12, "max_num_batched_tokens": 300, "block_size": 32, "num_blocks": 10, "num_host_slots": 8},
        {
            "policy": "shortest_prefill",
            "batching": "static",
            "starvation_bound_ms": 0.01,
            "enable_chunked_prefill": False,
        },
        (516, False),
    ),
    "preempted before the engine was told": (
        {"max_num_seqs": 3, "max_num_batched_tokens": 300, "block_size": 64, "num_blocks": 5, "max_prefill_tokens": 16},
        {"policy": "priority", "batching": "static", "starvation_bound_ms": 0.01},
        (594, False),
    ),
    "the other would have been heard of": (
        {"max_num_seqs": 3, "max_num_batched_tokens": 64, "block_size": 64, "num_blocks": 4, "num_host_slots": 8},
        {
            "policy": "shortest_prefill",
            "batching": "static",
            "starvation_bound_ms": 10.0,
            "max_prefill_tokens": 16,
            "enable_chunked_prefill": False,
        },
        (509, True),
    ),
}


@pytest.mark.parametrize(("sizes", "policy", "run"), CROWDED.values(), ids=CROWDED)
def test_stopped_at_once_beside_a_cache(sizes: dict, policy: dict, run: tuple[int, bool]) -> None:
    config = SchedulerConfig(max_model_len=256, **{"block_size": 16} | sizes, **policy)
    assert replay(crowded_run(config, *run)) is None
