"""Where Triton's kernels run: on a CUDA device or, with TRITON_INTERPRET=1, in Triton's interpreter on CPU tensors.

The interpreter runs each program of a launch one after the other over numpy: the same source, no speed. It is how every
kernel is tested where there is no card. It cannot multiply bfloat16 matrices (it holds them as raw 16-bit integers), so
kernels take the dtype that `tl.dot` computes in as a constant, `dot_dtype`.
"""

import os
from typing import Any

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


def dot_dtype(dtype: torch.dtype) -> Any:
    """What operands of `dtype` are multiplied as. float32 wants `input_precision="ieee"` beside it."""
    return tl.float32 if is_interpreted() and dtype == torch.bfloat16 else _DOT_DTYPES[dtype]
