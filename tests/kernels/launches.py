"""How many kernels a card would be given: what is launched in the interpreter, counted."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

NO_KERNEL = {
    "view", "_unsafe_view", "slice", "select", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "alias",
    "as_strided", "detach", "view_as_real", "split", "split_with_sizes", "unbind", "empty", "empty_like", "new_empty",
    "empty_strided", "lift_fresh",
}  # fmt: skip
TWO = {"addmm"}  # out of place: the sum's first part is copied to where the product is added to it


class _Operations(TorchDispatchMode):
    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found, self.depth = found, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if not self.depth and name not in NO_KERNEL:
            self.found[name] += 2 if name in TWO else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """By kernel, or operation of torch's; those that only look at a tensor in another way are none."""
    found: Counter[str] = Counter()
    operations, real = _Operations(found), GridExecutor.__call__

    def call(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        found[self.fn.__name__] += 1
        operations.depth += 1  # what the interpreter itself does with tensors
        try:
            return real(self, *args, **kwargs)
        finally:
            operations.depth -= 1

    GridExecutor.__call__ = call
    try:
        with operations:
            yield found
    finally:
        GridExecutor.__call__ = real
