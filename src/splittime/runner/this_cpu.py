"""The ceilings of this machine's processor, measured now, for plans of servers that were never started."""

import torch

from splittime.core import allowed
from splittime.core.errors import ConfigError
from splittime.core.facts import Machine
from splittime.kernels.api import Ops
from splittime.kernels.choose import make_backend
from splittime.models.quant.plan import QUANTIZATIONS, choose
from splittime.runner.ceilings import Gauge


def measured_processor(precision: str) -> Machine:
    """Returns what the processor reads and multiplies a second with weights in this precision, in under a second; None
    for what could not be measured. Raises ConfigError for a precision that its kernels do not have."""
    is_quantised = precision in QUANTIZATIONS
    plain = "float32" if is_quantised or precision == "float16" else precision
    scheme = choose(precision if is_quantised else None, plain).layers
    ops = _backend(getattr(torch, plain))
    ops.set_threads(allowed.num_cores())
    found = Gauge(ops, scheme, allowed.num_cores(), None)
    return [one for one in found.measure() if one is not None][-1]


def _backend(dtype: torch.dtype) -> Ops:
    try:
        return make_backend("native", dtype)
    except ConfigError:
        return make_backend("torch", dtype)
