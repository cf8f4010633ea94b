"""A card that is not there: tensors that say they are on "cuda:0" and lie in the host's memory, so that what a real one
refuses, or waits for, shows without it.

    with FakeCard() as card:
        runner = load_torch_runner(...)          takes the path of a card, its kernels in Triton's interpreter

* An operation, or a launch, that takes tensors of both sides is a `CardError`, as on a card.
* What makes the host wait (`.item()`, `.tolist()`, indexing by booleans, copies from memory that is not pinned) is
  counted in `waits`; within `no_waiting()` and within a capture it is a `CardError`.
* A copy to the host that is not waited for leaves `POISON` there until an event after it is; a copy from pinned memory
  that was changed before the copy was surely made is a `CardError`.
* `torch.cuda.graph` records operations and launches. A replay carries them out again over the same tensors: what Python
  decided is decided. A first launch of a kernel with these constants is a `CardError` there, for it would be compiled.

`Tensor.device` and `Tensor.is_cuda` are answered here, which a mode of torch's functions makes possible: all that is
called from Python goes through it. A tensor is the card's if its storage is.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

CARD = torch.device("cuda", 0)
POISON = 0xA5
MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
TOTAL_BYTES = 1 << 40
NAMESPACES = {"device": torch.Tensor.device.__get__, "is_cuda": torch.Tensor.is_cuda.__get__}  # type: ignore[attr-defined]
READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero", "nonzero",
    "masked_select", "equal", "allclose", "unique", "argwhere", "bincount",
}  # fmt: skip
LOOKS = {
    "untyped_storage",
    "numel",
    "element_size",
    "stride",
    "size",
    "dim",
    "data_ptr",
    "is_contiguous",
    "view",
    "set_",
}
NOT_AGAIN = {"empty", "empty_like", "new_empty", "empty_strided"}
STRIDED = {"q", "x_ptr", "x", "logits", "kv", "block_tables"}  # of which kernels are told the stride of a line


class CardError(AssertionError):
    """What a card would not do, or not without waiting."""


@dataclass
class Copy:
    """On its way: to the host (`target`, the content that it will have), or from it (`source`, what was read)."""

    place: Tensor
    content: Tensor
    is_to_host: bool


@dataclass
class FakeCard(TorchFunctionMode):
    waits: list[str] = field(default_factory=list)
    launched: list[str] = field(default_factory=list)
    replays: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}  # kept, so that no address is met twice
        self._pinned: dict[int, Any] = {}
        self._copies: list[Copy] = []
        self._begun = 0  # copies that were waited for, of all that there ever were
        self.compiled: set[Any] = set()  # kernels, each with what it was compiled for
        self._recorded: list[Callable[[], None]] | None = None
        self._is_strict = False
        self._patch = pytest.MonkeyPatch()

    # ---- there and away

    def __enter__(self) -> "FakeCard":
        self._install()
        super().__enter__()
        return self

    def __exit__(self, *told: Any) -> None:
        super().__exit__(*told)
        self._patch.undo()

    def _install(self) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        from splittime.kernels.triton import attention, ops

        card, put = self, self._patch.setattr
        attention.processors_of.cache_clear()
        put(ops, "device", lambda: CARD)
        real = InterpretedFunction.run
        put(InterpretedFunction, "run", lambda kernel, *args, **kwargs: card._launch(real, kernel, args, kwargs))
        properties = SimpleNamespace(name="a card", multi_processor_count=132, L2_cache_size=50 << 20)
        nothing = lambda *args, **kwargs: None  # noqa: E731
        fakes = {
            "Event": lambda enable_timing=False: _Event(card), "CUDAGraph": lambda: _Graph(card),
            "graph": self._capturing, "synchronize": lambda device=None: card.wait("synchronize"),
            "get_device_properties": lambda device=None: properties, "get_device_name": lambda device=None: "a card",
            "mem_get_info": lambda device=None: (TOTAL_BYTES // 2, TOTAL_BYTES), "empty_cache": nothing,
            "current_device": lambda: 0, "is_available": lambda: True, "memory_allocated": lambda device=None: 0,
            "max_memory_allocated": lambda device=None: 0, "reset_peak_memory_stats": nothing,
        }  # fmt: skip
        for name, fake in fakes.items():
            put(torch.cuda, name, fake)
        put(torch, "Generator", _Generator)

    # ---- what a test asks

    @contextlib.contextmanager
    def no_waiting(self) -> Iterator[None]:
        before, self._is_strict = self._is_strict, True
        try:
            yield
        finally:
            self._is_strict = before

    def is_there(self, tensor: Tensor) -> bool:
        return _key(tensor) in self._storages

    # ---- waiting and copies

    def wait(self, why: str) -> None:
        if self._is_strict or self._recorded is not None:
            raise CardError(f"{why}: the host waits for the card")
        self.waits.append(why)
        self.reach(self._begun + len(self._copies))

    def reach(self, count: int) -> None:
        """The first `count` copies are made."""
        while self._begun < count and self._copies:
            self._begun += 1
            copy = self._copies.pop(0)
            if copy.is_to_host:
                copy.place.copy_(copy.content)
            elif not torch.equal(_raw(copy.place), _raw(copy.content)):
                raise CardError("pinned memory was written to before a copy from it was made")

    @property
    def num_copies(self) -> int:
        return self._begun + len(self._copies)

    def _copy_in(self, source: Tensor, is_async: bool) -> None:
        """Of `source`, in host memory."""
        if self._recorded is not None:
            raise CardError("a copy from host memory within a capture")
        if not is_async or _key(source) not in self._pinned:
            self.wait("a copy from memory that is not pinned" if is_async else "a copy from the host")
            return
        if any(copy.is_to_host and _key(copy.place) == _key(source) for copy in self._copies):
            self.reach(self.num_copies)  # the order of the stream: what was copied there is what is read
        self._copies.append(Copy(source.detach(), source.clone(), is_to_host=False))

    def _copy_out(self, target: Tensor, source: Tensor, is_async: bool) -> None:
        if self._recorded is not None:
            raise CardError("a copy to host memory within a capture")
        if not is_async or _key(target) not in self._pinned:
            self.wait("a copy to the host")
            target.copy_(source)
            return
        content = target.clone().copy_(source)
        if not any(_key(copy.place) == _key(target) for copy in self._copies):
            _raw(target).fill_(POISON)
        self._copies.append(Copy(target, content, is_to_host=True))

    # ---- operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            if func == NAMESPACES["device"]:
                return CARD if self.is_there(args[0]) else func(*args)
            return self.is_there(args[0]) if func == NAMESPACES["is_cuda"] else func(*args, **kwargs)
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        special = getattr(self, f"_of_{name.strip('_')}", None)
        if special is not None:
            return special(func, tensors, *args, **kwargs)
        there = [self.is_there(one) for one in tensors]
        if any(there):
            self._check(name, func, args, tensors, there)
        is_made_there = _is_card(kwargs.get("device"))
        if is_made_there:
            kwargs = {**kwargs, "device": "cpu"}
            if name == "tensor":
                self.wait("torch.tensor on the card")
        is_pinned = kwargs.pop("pin_memory", False) if "pin_memory" in kwargs else False
        made = func(*args, **kwargs)
        if is_pinned:
            self._pinned[_key(made)] = made.untyped_storage()
        if is_made_there or (any(there) and not _is_host(kwargs.get("device"))):
            self._own(made)
            self._record(name, func, args, kwargs, made)
        return made

    def _check(self, name: str, func: Any, args: Any, tensors: list[Tensor], there: list[bool]) -> None:
        if name in READS:
            self.wait(name)
        if name == "repeat_interleave" and len(tensors) > 1:
            self.wait(name)
        for tensor, is_there in zip(tensors, there, strict=True):
            if is_there and name not in LOOKS and tensor.numel() and not tensor.untyped_storage().nbytes():
                raise CardError(f"{name}: a tensor whose memory was given back")
            if not is_there and (tensor.dim() or tensor is args[0]):
                raise CardError(f"{name}: tensors of the card and of the host, {list(tensor.shape)}")

    def _own(self, made: Any) -> None:
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._storages[_key(one)] = one.untyped_storage()

    def _record(self, name: str, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        if self._recorded is None or name in NOT_AGAIN:
            return
        given = {_key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}

        def again() -> None:
            anew = func(*args, **kwargs)
            pairs = zip(tree_leaves(made), tree_leaves(anew), strict=True)
            for old, new in pairs:
                if isinstance(old, Tensor) and _key(old) not in given:  # no view of, nor in place in, what was there
                    old.copy_(new)

        self._recorded.append(again)

    # ---- operations that are more than that

    def _of_numpy(self, func: Any, tensors: list[Tensor], one: Tensor) -> Any:
        if self.is_there(one):
            raise CardError("numpy of a tensor of the card")
        return func(one)

    def _of_is_pinned(self, func: Any, tensors: list[Tensor], one: Tensor) -> bool:
        return _key(one) in self._pinned

    def _of_pin_memory(self, func: Any, tensors: list[Tensor], one: Tensor) -> Tensor:
        if self.is_there(one):
            raise CardError("pin_memory of a tensor of the card")
        if _key(one) in self._pinned:
            return one
        if self._recorded is not None:
            raise CardError("memory pinned within a capture")
        made = one.clone(memory_format=torch.contiguous_format)
        self._pinned[_key(made)] = made.untyped_storage()
        return made

    def _of_cpu(self, func: Any, tensors: list[Tensor], one: Tensor) -> Tensor:
        return self._of_to(torch.Tensor.to, tensors, one, "cpu")

    def _of_to(self, func: Any, tensors: list[Tensor], one: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        asked = next((arg for arg in (*args, kwargs.get("device")) if isinstance(arg, str | torch.device)), None)
        is_async = kwargs.pop("non_blocking", False)
        was_there = self.is_there(one)
        goes_there = was_there if asked is None else _is_card(asked)
        plain = [torch.device("cpu") if isinstance(arg, str | torch.device) else arg for arg in args]
        kwargs = {name: "cpu" if name == "device" else value for name, value in kwargs.items()}
        if was_there == goes_there:
            made = func(one, *plain, **kwargs)
            if goes_there:
                self._own(made)
                self._record("to", func, (one, *plain), kwargs, made)
            return made
        made = func(one, *plain, **{**kwargs, "copy": True})
        if goes_there:
            self._copy_in(one, is_async)
            self._own(made)
        elif self._recorded is not None:
            raise CardError("a copy to host memory within a capture")
        else:
            self.wait("a copy to the host")
        return made

    def _of_copy(self, func: Any, tensors: list[Tensor], to: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
        is_to, is_from = self.is_there(to), self.is_there(source)
        if is_from and not is_to:
            self._copy_out(to, source, non_blocking)
            return to
        if is_to and not is_from:
            self._copy_in(source, non_blocking)
        func(to, source)
        if is_to:
            self._record("copy_", func, (to, source), {}, to)
        return to

    def _of_getitem(self, func: Any, tensors: list[Tensor], one: Tensor, index: Any) -> Tensor:
        self._check_index(one, index)
        made = func(one, index)
        if self.is_there(one):
            self._own(made)
            self._record("__getitem__", func, (one, index), {}, made)
        return made

    def _of_setitem(self, func: Any, tensors: list[Tensor], one: Tensor, index: Any, value: Any) -> None:
        self._check_index(one, index)
        if isinstance(value, Tensor) and value.dim() and self.is_there(value) != self.is_there(one):
            self.wait("assigned from the other side")
        func(one, index, value)
        if self.is_there(one):
            self._record("__setitem__", func, (one, index, value), {}, one)

    def _check_index(self, one: Tensor, index: Any) -> None:
        for part in tree_leaves(index):
            if isinstance(part, Tensor) and part.dim():
                if self.is_there(part) and not self.is_there(one):
                    raise CardError("a tensor of the host indexed by one of the card")
                if self.is_there(one) and (part.dtype == torch.bool or not self.is_there(part)):
                    self.wait(f"indexed by {part.dtype}")

    def _of_set(self, func: Any, tensors: list[Tensor], one: Tensor, *args: Any) -> Tensor:
        return func(one, *args)

    # ---- launches and captures

    def _launch(self, real: Any, kernel: Any, args: tuple, kwargs: dict) -> None:
        name, names = kernel.__name__, kernel.arg_names
        general = set(kernel.kwargs.get("do_not_specialize") or ())
        with torch._C.DisableTorchFunction():
            given = dict(zip(names, args, strict=False)) | {key: one for key, one in kwargs.items() if key in names}
            self._check_launch(name, kwargs["grid"], given)
            self.launched.append(name)
            constants = tuple(_compiled_for(given[one]) for one in names if one not in general)
            key = (name, *constants, kwargs.get("num_warps"))
            if self._recorded is not None:
                if key not in self.compiled:
                    raise CardError(f"{name} is compiled within a capture")
                self._recorded.append(lambda: real(kernel, *args, **kwargs))
            self.compiled.add(key)
            real(kernel, *args, **kwargs)

    def _check_launch(self, kernel: str, grid: Any, given: dict[str, Any]) -> None:
        if not all(0 < count <= most for count, most in zip(grid, MOST_PROGRAMS, strict=False)):
            raise CardError(f"{kernel}: a grid of {grid}")
        for name, one in given.items():
            if isinstance(one, Tensor):
                if not self.is_there(one):
                    raise CardError(f"{kernel}: {name} is not on the card")
                if one.numel() and not one.untyped_storage().nbytes():
                    raise CardError(f"{kernel}: the memory of {name} was given back")
                if not one.is_contiguous() and (name not in STRIDED or one.stride(-1) != 1):
                    raise CardError(f"{kernel}: {name} has strides {one.stride()}")

    @contextlib.contextmanager
    def _capturing(self, graph: "_Graph", pool: Any = None) -> Iterator[None]:
        self.wait("a capture begins")
        self._recorded = graph.recorded
        try:
            yield
        finally:
            self._recorded = None


class _Event:
    def __init__(self, card: FakeCard) -> None:
        self._card, self._count, self._is_reached = card, -1, False

    def record(self) -> None:
        if self._card._recorded is not None:
            raise CardError("an event within a capture")
        self._count = self._card.num_copies

    def synchronize(self) -> None:
        if self._card._recorded is not None or self._card._is_strict:
            raise CardError("an event is waited for")
        self._card.reach(self._count)
        self._is_reached = True

    def elapsed_time(self, end: "_Event") -> float:
        if self._count < 0 or end._count < self._count:
            raise CardError("time between events that were not recorded in this order")
        if self._card._begun < end._count:
            raise CardError("time to an event that was not waited for")
        return 0.001


class _Graph:
    def __init__(self, card: FakeCard) -> None:
        self._card, self.recorded = card, []

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def replay(self) -> None:
        self._card.replays += 1
        with torch._C.DisableTorchFunction():
            for again in self.recorded:
                again()


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _raw(tensor: Tensor) -> Tensor:
    return (
        tensor
        if tensor.dtype == torch.uint8
        else tensor.view(torch.uint8)
        if tensor.dim()
        else tensor[None].view(torch.uint8)
    )


def _compiled_for(one: Any) -> Any:
    """What of an argument Triton compiles a kernel for."""
    if isinstance(one, Tensor):
        return one.dtype, one.data_ptr() % 16 == 0
    return (one == 1, one % 16 == 0) if isinstance(one, int) and not isinstance(one, bool) else str(one)


def _is_card(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _is_host(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"
