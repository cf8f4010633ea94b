"""Where Triton's kernels run: on a CUDA device or, with TRITON_INTERPRET=1, in Triton's interpreter on CPU tensors.

The interpreter runs each program of a launch one after the other over numpy: the same source, no speed. It is how every
kernel is tested where there is no card. It cannot multiply bfloat16 matrices (it holds them as raw 16-bit integers), so
kernels take the dtype that `tl.dot` computes in as a constant, `dot_dtype`. With NumPy 2.4 and Triton 3.6 it could not
loop to a bound that a kernel has computed either (its scalars are arrays of one element, which `int` no longer takes);
importing this module mends that.
"""

import os
from typing import Protocol

import torch
import triton.language as tl

from splittime.core.errors import ConfigError

_DOT_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def device() -> torch.device:
    """Raises `ConfigError` where there is neither a card nor the interpreter."""
    if is_interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        message = "kernels=triton needs a CUDA device, and torch finds none"
        raise ConfigError(message, param="kernels", value="triton", hint="kernels=auto, or TRITON_INTERPRET=1 to test")
    return torch.device("cuda", torch.cuda.current_device())


def dot_dtype(dtype: torch.dtype) -> object:
    """Returns what operands of `dtype` are multiplied as. float32 wants `input_precision="ieee"` beside it."""
    return tl.float32 if is_interpreted() and dtype == torch.bfloat16 else _DOT_DTYPES[dtype]


class Scope(Protocol):
    """What triton.runtime.interpreter patches with, until it puts it back."""

    def set_attr(self, owner: object, name: str, value: object) -> None: ...


def _mend_interpreter() -> None:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: object, scope: Scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch


if is_interpreted():
    _mend_interpreter()
