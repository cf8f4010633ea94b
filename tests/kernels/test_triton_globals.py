"""What kernels refer to outside themselves must be equal to itself: Triton compares it at each launch with what it was
when the kernel was compiled, and a NaN ends the second launch. The interpreter compares nothing."""

import pkgutil
from importlib import import_module

import pytest

pytest.importorskip("triton")

import triton.language as tl

import splittime.kernels.triton as kernels


@pytest.mark.parametrize("name", sorted(module.name for module in pkgutil.iter_modules(kernels.__path__)))
def test_constants_are_equal_to_themselves(name):
    found = vars(import_module(f"{kernels.__name__}.{name}"))
    values = [one.value for one in found.values() if isinstance(one, tl.constexpr)]
    assert all(value == value for value in values)
