"""Choosing a backend by name. The names are listed here once; a backend is imported when it is chosen."""

from typing import TYPE_CHECKING, Literal, get_args

from splittime.core.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from splittime.kernels.api import Ops

Backend = Literal["native", "torch", "reference", "triton"]
BACKENDS: tuple[str, ...] = get_args(Backend)


def make_backend(name: str, dtype: "torch.dtype") -> "Ops":
    """The backend called `name` for weights of `dtype`. Raises `ConfigError` for a name that is not in `BACKENDS`, for
    "native" where its library is missing, and for "triton" where there is no card."""
    if name == "native":
        return _native()
    if name == "torch":
        from splittime.kernels.cpu.ops import CpuOps

        return CpuOps(dtype)
    if name == "triton":
        return _triton(dtype)
    if name == "reference":
        from splittime.kernels.reference.ops import ReferenceOps

        return ReferenceOps(dtype)
    raise ConfigError(f"kernel backend {name!r} is not one of {', '.join(BACKENDS)}", param="kernels", value=name)


def _triton(dtype: "torch.dtype") -> "Ops":
    try:
        from splittime.kernels.triton.ops import TritonOps
    except ImportError as error:
        message = f"kernels=triton: {error}"
        raise ConfigError(message, param="kernels", value="triton", hint="pip install triton") from error
    return TritonOps(dtype)


def _native() -> "Ops":
    from splittime.kernels.native.library import LibraryMissing
    from splittime.kernels.native.ops import NativeOps

    try:
        return NativeOps()
    except LibraryMissing as error:
        raise ConfigError(f"kernels=native: {error}", param="kernels", value="native", hint="kernels=torch") from error
