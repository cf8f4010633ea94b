"""What the kernel tests share: one torch thread, and the native kernels called on torch tensors."""

import ctypes

import pytest
import torch
from torch import Tensor

from splittime.kernels import api
from splittime.kernels.choose import make_backend
from splittime.kernels.layer import Weighing
from splittime.kernels.native import library
from splittime.kernels.native.packed import weighing_of

KV_TYPES = {torch.float32: library.FLOAT32, torch.bfloat16: library.BFLOAT16, torch.int8: library.INT8}


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """These tensors are tiny, and threads that wait for each other make a busy machine's timings erratic."""
    torch.set_num_threads(1)


WEIGHING = Weighing(0.3)


class Native:
    """The library, with torch tensors for pointers. A *store* here is (data [N + 1, 2, H, block_size * D], scales)."""

    def __init__(self) -> None:
        self.lib = library.library()

    def new_store(self, shape: api.KvShape, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        tiles = (shape.num_blocks + 1, 2, shape.num_kv_heads)
        data = torch.zeros(*tiles, shape.block_size * shape.head_dim, dtype=dtype)
        return data, torch.zeros(*tiles, shape.block_size) if dtype == torch.int8 else None

    def kv(self, shape: api.KvShape, store: tuple[Tensor, Tensor | None]) -> library.StKv:
        data, scales = store
        sizes = (shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        return library.StKv(
            KV_TYPES[data.dtype], *sizes, data.data_ptr(), None if scales is None else scales.data_ptr()
        )

    def batch(self, batch: api.AttentionBatch, turns: Tensor | None = None) -> library.StBatch:
        """turns: complex64 [T, D / 2]. The structure keeps the arrays that it points at."""
        parts = (batch.query_begins, batch.context_lens, batch.block_tables, batch.token_blocks, batch.token_offsets)
        arrays = [torch.as_tensor(part).to(torch.int32).contiguous() for part in parts]
        rows, tokens = len(batch.context_lens), batch.query_begins[-1]
        pointers = [array.data_ptr() for array in arrays] + [None if turns is None else turns.data_ptr()]
        made = library.StBatch(rows, tokens, batch.num_decode_rows, batch.block_tables.shape[1], *pointers)
        made.kept = (arrays, turns)
        return made

    def attention(
        self, batch, shape, store, q: Tensor, window: int | None = None, weighing: Weighing = WEIGHING
    ) -> Tensor:
        """q [T, Hq, D], whose rows may be a slice of something wider -> [T, Hq * D]."""
        out = torch.full((q.shape[0], q.shape[1] * q.shape[2]), float("nan"))
        native_batch, kv = self.batch(batch), self.kv(shape, store)
        sizes = (
            q.shape[1],
            window or 0,
            ctypes.byref(weighing_of(weighing)),
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
        )
        self.lib.st_attention(ctypes.byref(native_batch), ctypes.byref(kv), *sizes)
        return out

    def rope_write(self, batch, shape, store, qkv: Tensor, turns: Tensor, qk_norm=None, eps: float = 1e-6) -> None:
        """qkv [T, Hq + 2 Hkv, D], in place."""
        native_batch, kv = self.batch(batch, turns), self.kv(shape, store)
        norm = None if qk_norm is None else qk_norm.data_ptr()
        num_heads = qkv.shape[1] - 2 * shape.num_kv_heads
        self.lib.st_rope_write(ctypes.byref(native_batch), ctypes.byref(kv), num_heads, norm, eps, qkv.data_ptr())

    @staticmethod
    def from_plain(shape: api.KvShape, plain: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """plain: float32 [N + 1, 2, H, block_size, D] -> a store; by the rules, in torch."""
        scales = None
        if dtype == torch.int8:
            scales = plain.abs().amax(-1) / 127
            plain = (plain / scales.clamp(min=1e-30)[..., None]).round()
        keys, values = plain[:, 0].transpose(-1, -2).flatten(-2), plain[:, 1].flatten(-2)
        return torch.stack((keys, values), dim=1).to(dtype), scales

    @staticmethod
    def to_plain(shape: api.KvShape, store: tuple[Tensor, Tensor | None]) -> Tensor:
        """The float32 [N + 1, 2, H, block_size, D] that a store stands for."""
        data, scales = store
        keys = data[:, 0].unflatten(-1, (shape.head_dim, shape.block_size)).transpose(-1, -2)
        values = data[:, 1].unflatten(-1, (shape.block_size, shape.head_dim))
        plain = torch.stack((keys, values), dim=1).float()
        return plain if scales is None else plain * scales[..., None]


@pytest.fixture(scope="session")
def native_library():
    try:
        return Native()
    except library.LibraryMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def native(native_library):
    """On the instruction set that is selected, with two threads; both as they were afterwards."""
    selected = native_library.lib.st_isa_selected()
    native_library.lib.st_set_threads(2)
    yield native_library
    native_library.lib.st_set_threads(1)
    native_library.lib.st_isa_select(selected)


def _isa_names() -> list[str]:
    try:
        return library.isa_names()
    except library.LibraryMissing:
        return ["none"]


@pytest.fixture(params=_isa_names())
def isa(request, native):
    """The native kernels, on each instruction set that this processor has."""
    library.select_isa(request.param)
    return native


@pytest.fixture(params=["native", "torch", "reference"])
def ops(request):
    if request.param == "native":
        request.getfixturevalue("native")
    return make_backend(request.param, torch.float32)
