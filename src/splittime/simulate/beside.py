"""A prediction in a process of its own, beside a server that goes on: `python -m splittime.simulate.beside` (ADR 19).

The question (`simulate.recorded`) comes over standard input; the answer, a `WhatIfAnswer` as JSON, goes to standard
output. The process takes the lowest priority, has `CPU_S` of a processor, and ends when its parent does.
"""

import os
import resource
import sys
from collections.abc import Sequence

import msgspec

from splittime.core.errors import ConfigError, ErrorInfo
from splittime.core.this_process import end_with
from splittime.scheduler.admission import QueueLimits
from splittime.simulate.change import PredictedFigure, changed
from splittime.simulate.recorded import read_question
from splittime.simulate.replay import scheduler_config
from splittime.simulate.what_if import Miss, predict

CPU_S = 60
LOWEST = 19


class WhatIfAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """figures, share, miss: as in `Prediction`. step_error: the median error of the cost model on steps that it was not
    fitted on. error: why there is no answer. is_bad_change: the change itself cannot be, whatever the books say."""

    figures: tuple[PredictedFigure, ...] = ()
    num_requests: int = 0
    num_refused: int = 0
    num_steps: int = 0
    draws: int = 0
    share: float = 0.0
    step_error: float | None = None
    miss: Miss | None = None
    error: ErrorInfo | None = None
    is_bad_change: bool = False


def answer(lines: Sequence[bytes]) -> WhatIfAnswer:
    """Returns the answer to a question's lines."""
    question, recorded = read_question(lines)
    try:
        changed(scheduler_config(question.facts), QueueLimits(1, 1), question.change)
    except ConfigError as error:
        return WhatIfAnswer(error=error.info, is_bad_change=True)
    try:
        found = predict(recorded, question.change, question.draws)
    except ConfigError as error:
        return WhatIfAnswer(error=error.info)
    return WhatIfAnswer(
        figures=found.figures,
        num_requests=found.num_requests,
        num_refused=found.num_refused,
        num_steps=found.num_steps,
        draws=found.draws,
        share=found.share,
        step_error=found.model.errors.median_relative,
        miss=found.miss,
    )


def main() -> None:
    os.nice(LOWEST)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))  # SIGXCPU, which says why it ended; then SIGKILL
    end_with(os.getppid())
    found = answer(sys.stdin.buffer.read().splitlines())
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")


if __name__ == "__main__":
    main()
