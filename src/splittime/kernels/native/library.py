"""The shared library of CPU kernels, by ctypes: the structures and functions of `csrc/splittime.h`, `csrc/peaks.h` and
`csrc/suffix.h`.

`library()` loads it, or says why it cannot (`LibraryMissing`): no compiler at install, another processor. ctypes gives
up the GIL during each call, so the threads that answer health checks run while a step computes.

`ST_KERNELS_LIBRARY` names another build of the library, for those who work on the kernels.
"""

import ctypes
import functools
import importlib.machinery
import os
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from itertools import count, pairwise, takewhile
from pathlib import Path

INTERFACE_VERSION = 13
FLOAT32, BFLOAT16, INT8, INT4, FLOAT16 = range(5)
ZEROS, MINIMA = 1, 2  # what the groups of a weight may have besides scales
ROUNDED_ACTIVATIONS = 4  # of bfloat16 weights
TURNED = 8  # of weights of integers
STEPS, FIVE = 16, 32  # of GGUF's K types
READ_KINDS = 7
SILU, GELU = range(2)  # activations
PRODUCTS = 4  # of a layer
BLOB_ALIGNMENT = 64
NO_AMX = "the processor has no AMX"  # of `st_amx_refusal`


class LibraryMissing(Exception):
    """There is no usable library; says why."""


class StLinear(Structure):
    """`below` is the address of another; whoever sets it keeps that one alive."""

    _fields_ = (
        ("scheme", c_int32),
        ("out_features", c_int32),
        ("in_features", c_int32),
        ("group", c_int32),
        ("extras", c_int32),
        ("blob", c_void_p),
        ("bias", c_void_p),
        ("columns", c_void_p),
        ("below", c_void_p),
    )


def chain(weights: Sequence[StLinear]) -> None:
    """Put each below the one before, as a stack that begins with the first; valid while all of them live."""
    for one, below in pairwise(weights):
        one.below = ctypes.addressof(below)


class StKv(Structure):
    _fields_ = (
        ("type", c_int32),
        ("num_blocks", c_int32),
        ("block_size", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("data", c_void_p),
        ("scales", c_void_p),
    )


class StBatch(Structure):
    _fields_ = (
        ("rows", c_int32),
        ("tokens", c_int32),
        ("decode_rows", c_int32),
        ("max_blocks", c_int32),
        ("query_begins", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("token_blocks", c_void_p),
        ("token_offsets", c_void_p),
        ("turns", c_void_p),
    )


class StScores(Structure):
    _fields_ = (("scale", c_float), ("cap", c_float), ("sinks", c_void_p))


class StDelta(Structure):
    _fields_ = (
        ("num_key_heads", c_int32),
        ("num_value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("conv_width", c_int32),
        ("length_eps", c_float),
        ("eps", c_float),
        ("conv", c_void_p),
        ("decay", c_void_p),
        ("dt_bias", c_void_p),
        ("norm", c_void_p),
    )


class StStates(Structure):
    _fields_ = (
        ("rows", c_int32),
        ("tokens", c_int32),
        ("num_keeps", c_int32),
        ("begins", c_void_p),
        ("reads", c_void_p),
        ("writes", c_void_p),
        ("keeps", c_void_p),
    )


class StLayer(Structure):
    _fields_ = (
        ("qkv", StLinear),
        ("output", StLinear),
        ("gate_up", StLinear),
        ("down", StLinear),
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("norm_after_mixer", c_void_p),
        ("norm_after_mlp", c_void_p),
        ("qk_norm", c_void_p),
        ("scores", StScores),
        ("eps", c_float),
        ("num_heads", c_int32),
        ("window_tokens", c_int32),
        ("activation", c_int32),
    )


class StLowRank(Structure):
    """Whoever sets `parts` and `begins`, addresses of arrays, keeps these alive."""

    _fields_ = (("down", StLinear), ("num_parts", c_int32), ("parts", c_void_p), ("begins", c_void_p))


class StAdapted(Structure):
    """products: addresses of `StLowRank`s; whoever sets them and `tokens` keeps those alive."""

    _fields_ = (("products", c_void_p * PRODUCTS), ("tokens", c_void_p), ("count", c_int32))


_I, _L, _F, _P = c_int32, c_int64, c_float, c_void_p
_LINEAR, _KV, _BATCH, _LAYER = POINTER(StLinear), POINTER(StKv), POINTER(StBatch), POINTER(StLayer)
_DELTA, _STATES = POINTER(StDelta), POINTER(StStates)
SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "st_interface_version": (_I, ()),
    "st_isa_name": (c_char_p, (_I,)),
    "st_isa_runs": (_I, (_I,)),
    "st_isa_select": (None, (_I,)),
    "st_isa_selected": (_I, ()),
    "st_amx_refusal": (c_char_p, ()),
    "st_set_threads": (_I, (_I,)),
    "st_work_alone": (None, ()),
    "st_packed_bytes": (_L, (_I, _I, _I, _I, _I)),
    "st_pack": (None, (_I, _I, _I, _I, _I, _P, _I, _I, _I, _P)),
    "st_pack_rounded": (None, (_I, _I, _I, _I, _I, _P, _P, _P, _P, _P, _I, _I, _P)),
    "st_pack_quantized": (None, (_I, _I, _I, _I, _P, _P, _P, _P)),
    "st_unpack": (None, (_LINEAR, _P)),
    "st_linear": (None, (_LINEAR, _I, _P, _L, _P, _P, _L)),
    "st_add_low_rank": (None, (_I, _P, _I, _P, _L, _P, _L)),
    "st_rms_norm": (None, (_I, _I, _P, _L, _P, _F, _P)),
    "st_gate": (None, (_I, _I, _I, _P, _P)),
    "st_rope_write": (None, (_BATCH, _KV, _I, _P, _F, _P)),
    "st_attention": (None, (_BATCH, _KV, _I, _I, POINTER(StScores), _P, _L, _P)),
    "st_delta": (None, (_DELTA, _STATES, _P, _L, _P, _P)),
    "st_draw": (None, (_I, _I, _P, _P, _P, _P)),
    "st_argmax": (None, (_I, _I, _P, _P)),
    "st_finite": (None, (_I, _I, _P, _P)),
    "st_bytes_read": (None, (_P,)),
    "st_layer": (None, (_LAYER, _BATCH, _KV, _I, _P, _P)),
    "st_delta_layer": (None, (_LAYER, _DELTA, _STATES, _P, _I, _P, _P)),
    "st_release_pages": (None, (_P, _L)),
    "st_allocate": (_P, (_L,)),
    "st_free": (None, (_P, _L)),
    "st_peak_name": (c_char_p, (_I,)),
    "st_peak_kind": (_I, (_I,)),
    "st_peak_runs": (_I, (_I,)),
    "st_peak_multiply": (c_double, (_I, _L)),
    "st_peak_forget": (_I, (_P, _L)),
    "st_peak_read": (_L, (_I, _P, _L)),
    "st_text_new": (_P, (_L,)),
    "st_text_free": (None, (_P,)),
    "st_text_append": (None, (_P, _P, _L)),
    "st_text_follow": (None, (_I, _P, _P, _P, _P, _I, _P, _P, _P, _P)),
}


@functools.cache
def library() -> ctypes.CDLL:
    """The loaded library. Raises `LibraryMissing`."""
    path = os.environ.get("ST_KERNELS_LIBRARY") or _built_path()
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise LibraryMissing(f"cannot load {path}: {error}") from error
    missing = [name for name in SIGNATURES if not hasattr(loaded, name)]
    if missing or loaded.st_interface_version() != INTERFACE_VERSION:
        raise LibraryMissing(f"{path} is of another version of splittime: reinstall")
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def _built_path() -> str:
    folder = Path(__file__).parent
    for suffix in reversed(importlib.machinery.EXTENSION_SUFFIXES):  # the last is bare: builds before it named a Python
        if (folder / f"_kernels{suffix}").exists():
            return str(folder / f"_kernels{suffix}")
    raise LibraryMissing("the kernels were not built at install (is there a C++ compiler?)")


def isa_names() -> list[str]:
    """Instruction sets that this CPU runs, worst first."""
    return list(_places_of_isas())


def _places_of_isas() -> dict[str, int]:
    names = takewhile(bool, map(library().st_isa_name, count()))
    return {name.decode(): place for place, name in enumerate(names) if library().st_isa_runs(place)}


def amx_refusal() -> str:
    """Why a processor's AMX is not used; "" where it is, or where there is none."""
    refusal = library().st_amx_refusal().decode()
    return "" if refusal == NO_AMX else refusal


def select_isa(name: str) -> None:
    """Use this instruction set from the next call on; for tests and comparisons."""
    if name not in (places := _places_of_isas()):
        raise ValueError(f"instruction set {name!r} is not one of {', '.join(places)}")
    library().st_isa_select(places[name])


def selected_isa() -> str:
    return str(library().st_isa_name(library().st_isa_selected()).decode())
