"""Instants on a device's stream, and tensors on their way from it: what may be looked at once a mark is reached.

On a card a mark is an event of the stream. The interpreter has no stream: what was launched is done, and a mark is the
clock's time.
"""

import time

import torch
from torch import Tensor

from splittime.kernels.api import CPU


class StreamMark:
    """Now, in the order of what was launched."""

    __slots__ = ("_event", "_now_ns")

    def __init__(self, device: torch.device) -> None:
        if device == CPU:
            self._event, self._now_ns = None, time.monotonic_ns()
        else:
            self._event, self._now_ns = torch.cuda.Event(enable_timing=True), 0
            self._event.record()

    def wait(self) -> None:
        """Until the device has reached it."""
        if self._event is not None:
            self._event.synchronize()

    def ns_since(self, earlier: "StreamMark") -> int:
        """Both must have been reached."""
        if self._event is None or earlier._event is None:
            return self._now_ns - earlier._now_ns
        return round(earlier._event.elapsed_time(self._event) * 1e6)


def to_host(tensor: Tensor) -> Tensor:
    """A copy that is complete when a mark after it is reached."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """From the host, without waiting: what is there stays as it was until the copy is made."""
    return tensor if device == CPU else tensor.pin_memory().to(device, non_blocking=True)
