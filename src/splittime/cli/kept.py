"""Which server `plan` and `simulate` mean where no ledger is named: a calibration that was kept, which they say."""

import os
from typing import TYPE_CHECKING, Any

import msgspec

from splittime import __version__
from splittime.cli.options import talk
from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.wire.target import base_of, get_json

if TYPE_CHECKING:
    from splittime.plan.kept import KeptCalibration


def kept_calibration(url: str | None = None) -> "KeptCalibration":
    """Returns the calibration that holds for the server at this URL, with the scheduler's settings that this has now;
    None: the one of this machine. Raises ConfigError where there is none, or several."""
    from splittime.plan.kept import kept_here, require_kept_for

    found = kept_here(_this_machine(), __version__) if url is None else require_kept_for(_facts(url))
    _tell(found)
    return found


def _tell(found: "KeptCalibration") -> None:
    talk().print(f"taken: {found}", markup=False)


def _facts(url: str) -> ServerFacts:
    answer: Any = get_json(f"{base_of(url)}/ledger/facts", os.environ.get("SPLITTIME_API_KEY"))
    try:
        return msgspec.convert(answer, ServerFacts)
    except msgspec.ValidationError as error:
        message = f"{url} does not say what it is: {error}"
        raise ConfigError(message, param="source", value=url, hint="Is it a splittime server?") from None


def _this_machine() -> set[tuple[str, int | None]]:
    """Returns what facts call this machine, with its cores, and each card of it."""
    import torch  # two seconds

    from splittime.core.this_process import num_cores
    from splittime.runner.machine import cpu_name

    cards = [torch.cuda.get_device_properties(each) for each in range(torch.cuda.device_count())]
    return {(cpu_name(), num_cores()), *((card.name, card.multi_processor_count) for card in cards)}
