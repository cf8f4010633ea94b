"""How many bytes of weights and of KV stores this process has read, by what they were kept as: `Ops.bytes_read`.

The backends that compute with torch count here what each product and each attention takes from memory, once a call and
after it, so that what was loaded and never used counts nothing. The native library counts in its kernels.
"""

import threading
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

_lock = threading.Lock()
_bytes: Counter[str] = Counter()


def count_weight(name: str, *tensors: Tensor | None) -> None:
    """A product read these tensors of a weight kept in the scheme `name`."""
    _count(f"weights.{name}", tensors)


def count_kv(*tensors: Tensor | None) -> None:
    """An attention read these values of a KV store, and their scales."""
    values = tensors[0]
    assert values is not None
    _count(f"kv.{str(values.dtype).removeprefix('torch.')}", tensors)


def count_kv_bytes(dtype: torch.dtype, num_bytes: int) -> None:
    """The same, of so many bytes."""
    with _lock:
        _bytes[f"kv.{str(dtype).removeprefix('torch.')}"] += num_bytes


def add(counted: Mapping[str, int]) -> None:
    """What a captured step reads at each replay, by kind."""
    with _lock:
        _bytes.update(counted)


def total() -> dict[str, int]:
    with _lock:
        return dict(_bytes)


def _count(kind: str, tensors: tuple[Tensor | None, ...]) -> None:
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
    if num_bytes:
        with _lock:
            _bytes[kind] += num_bytes
