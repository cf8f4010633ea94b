"""What all tests share: how Hypothesis looks for examples, and where Triton's kernels run.

No deadline, and no complaint about slowness: a busy machine is no failure. The examples are the same at each run, from
no database, so that a check says the same twice, and of two checks at once neither disturbs the other.
`SPLITTIME_EXPLORE=1 make test` looks for new ones instead, and prints how to come back to what it finds.

Without a card, Triton's kernels are tested in its interpreter, which has to be chosen before Triton is imported.
"""

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

SLOW = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("check", deadline=None, derandomize=True, database=None, suppress_health_check=SLOW)
settings.register_profile("explore", deadline=None, print_blob=True, database=None, suppress_health_check=SLOW)
settings.load_profile("explore" if os.environ.get("SPLITTIME_EXPLORE") else "check")

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
