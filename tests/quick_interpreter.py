"""Triton's interpreter, which lists all members of `triton.language` at each call of a kernel or of a function in one,
and makes a table of types for each number: here both are made once. What a kernel computes is the same."""

import inspect
from functools import cache
from types import ModuleType

from triton.language.core import block_type, is_builtin, pointer_type
from triton.runtime import interpreter

numpy_type = interpreter._get_np_dtype
numpy_type_of_numbers = cache(numpy_type)


@cache
def builtins_of(package: ModuleType | type) -> list[str]:
    """Asked first outside of any kernel, where they are not yet replaced."""
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def patch_builtin(package, builder, scope) -> None:
    for name in builtins_of(package):
        member = getattr(package, name)
        if is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def get_np_dtype(kind):
    """The cache is for numbers alone: pointers have no hash."""
    kind = kind.element_ty if isinstance(kind, block_type) else kind
    return numpy_type(kind) if isinstance(kind, pointer_type) else numpy_type_of_numbers(kind)


def quicken() -> None:
    if hasattr(interpreter, "_LangPatchScope"):  # as in Triton 3.7; any other is left as it is
        interpreter._get_np_dtype = get_np_dtype
        interpreter._patch_builtin = patch_builtin
