"""Simulated servers whose costs are known."""

import msgspec

from splittime.core.facts import Machine, TokenCost
from splittime.scheduler.admission import QueueLimits
from splittime.scheduler.config import SchedulerConfig
from splittime.simulate.cost import CostModel, Errors
from splittime.simulate.replica import Approach, Replica

COSTS = CostModel(
    device=(1e6, 0.0, 1e5, 2e4, 10.0, 0.0),
    covariance=((0.0,) * 6,) * 6,
    host=((0.0, 0.0, 0.0),) * 5,
    move_ns=0.0,
    buckets={},
    most=(10**6,) * 6,
    persistence=0.0,
    errors=Errors(0.0, 0.0, 0.0),
    num_steps=100,
)
CONFIG = SchedulerConfig(max_model_len=1024, num_blocks=4096, block_size=16, max_num_seqs=8)
REPLICA = Replica(
    config=CONFIG,
    limits=QueueLimits(10**9, 10**12),
    costs=COSTS,
    approach=Approach(to_admission_ns=1_000, per_prompt_token_ns=10.0, to_engine_ns=500),
    source="a test",
)
LOAD = {"rate": 20.0, "duration_s": 5.0, "input_tokens": "96", "output_tokens": "12", "seed": 3}

STEP_NS = 10e6
ONE_AT_A_TIME = msgspec.structs.replace(
    REPLICA,
    config=msgspec.structs.replace(REPLICA.config, max_num_seqs=1, max_num_batched_tokens=64),
    costs=msgspec.structs.replace(REPLICA.costs, device=(STEP_NS, 0.0, 0.0, 0.0, 0.0, 0.0)),
    approach=Approach(),
    token_cost=TokenCost(
        weight_bytes=10**9, kv_bytes_per_token=1024, operations_per_token=1, operations_per_context_token=1
    ),
    machine=Machine(cpu="a test", threads=1, read_bytes_per_s=1e11),
    start_up_ns=3 * 10**9,
)


def unsure(replica: Replica) -> Replica:
    """A replica whose machine may be a fifth slower or faster."""
    return msgspec.structs.replace(
        replica, costs=msgspec.structs.replace(replica.costs, errors=Errors(0.0, 0.0, drift=0.2))
    )
