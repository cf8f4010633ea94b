"""What a calibration has found, from the books of its stairs. `plan.kept` keeps it."""

from collections.abc import Sequence

import msgspec

from splittime.bench.book.records import Arm
from splittime.core.errors import ConfigError
from splittime.simulate.held_out import KindOfSteps, errors_by_kind
from splittime.simulate.recorded import Recorded
from splittime.simulate.replica import Replica, replica_of


class ServerCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """What a calibration has found. errors: by kind of step, on steps that the model was not fitted on. others_share:
    the share of the steps' rows that were of other clients' requests. seconds: from the first step to the last."""

    replica: Replica
    errors: list[KindOfSteps]
    others_share: float
    num_steps: int
    seconds: float


def calibration_of(arms: Sequence[Arm]) -> ServerCalibration:
    """Returns the server as its books of each stair (`bench.stairs.climb`) show it. Raises ConfigError where these say
    too little."""
    facts = arms[-1].facts
    if facts is None:
        raise ConfigError("the server does not say what it is", param="url", value=arms[-1].url)
    accounts = [account for arm in arms for account in arm.accounts]
    steps = [step for arm in arms for step in arm.steps]
    replica = replica_of(Recorded(accounts, steps, facts)).steady()
    ours = {account.request_id for account in accounts}
    rows = [request_id for step in steps for request_id, _, _ in step.rows]
    source = f"a calibration of {len(steps):,} steps"
    return ServerCalibration(
        replica=msgspec.structs.replace(replica, source=source, mix=None),  # its users' requests nobody knows
        errors=errors_by_kind(steps),
        others_share=sum(request_id not in ours for request_id in rows) / len(rows),
        num_steps=len(steps),
        seconds=(steps[-1].end_ns - steps[0].begin_ns) / 1e9,
    )
