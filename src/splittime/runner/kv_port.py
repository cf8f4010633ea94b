"""Where blocks of the KV cache leave for other servers and come in from them: their bytes, and what these depend on.

A block's bytes are those of its pieces, layer after layer, each with its scales if there are any. `read` is called
between steps for full blocks of the index, which nobody writes to; what comes in lies here under a number until the
`imports` of a plan have it copied, in the order of the plans (`core.step.StepPlan`).

`layout` names all that a block's bytes depend on beside its tokens: the hash of every file of weights, the types, the
kernels with their instruction set, the shape. Two servers of one layout compute the same bytes.
"""

import hashlib
import itertools
import json
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from splittime import __version__
from splittime.kernels.native.library import library
from splittime.models.weights.fingerprints import fingerprints
from splittime.models.weights.load import open_source
from splittime.runner import machine
from splittime.runner.kv_store import bytes_of
from splittime.runner.torch_runner import TorchRunner

MAX_RECEIVED_BYTES = 256 << 20
OF_NUMBERS = (
    *("architecture", "dtype", "activation_dtype", "products", "layers", "weights", "kv_cache_dtype", "block_size"),
    *("kernels", "linear_backend", "attention_backend", "kv_bytes_per_block", "num_parameters"),
)


class BlockPort:
    """Implements `drive.kv_gate.Port`. `receive` may be called in any thread, all else in the engine's."""

    def __init__(self, runner: TorchRunner) -> None:
        """Reads all files of weights, the first time."""
        self._runner, self._decoder = runner, weakref.ref(runner.decoder)  # asleep, its weights are to go
        self._tensors = runner.store.tensors
        self._layout = layout_of(runner)
        self.block_bytes = sum(tensor[0].nbytes for tensor in self._tensors)
        self._received: dict[int, bytes] = {}
        self._numbers = itertools.count()
        runner.store.take_received = self._received.pop

    @property
    def layout(self) -> str:
        """Empty once other weights may have been read, at waking: nobody asks for that one."""
        return self._layout if self._runner.decoder is self._decoder() else ""

    def read(self, block_ids: Sequence[int]) -> tuple[bytes, ...]:
        return tuple(
            b"".join(bytes_of(tensor[block_id]).tobytes() for tensor in self._tensors) for block_id in block_ids
        )

    def receive(self, blob: bytes) -> int | None:
        """Returns the number under which a block's content lies here; None: there is no more room."""
        if (len(self._received) + 1) * self.block_bytes > MAX_RECEIVED_BYTES:
            return None
        number = next(self._numbers)
        self._received[number] = blob
        return number

    def drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._received.pop(number, None)


def layout_of(runner: TorchRunner) -> str:
    config, resolved, decoder = runner.config, runner.resolved, runner.decoder
    files = [*open_source(Path(config.model_path), decoder.config).files, Path(library()._name)]
    hashes = fingerprints(files, machine.packed_cache_folder(config.packed_cache))
    values = {name: getattr(resolved, name) for name in OF_NUMBERS}
    shapes = [(list(tensor.shape[1:]), str(tensor.dtype)) for tensor in runner.store.tensors]
    turned_far = [mixer.position.is_far(resolved.max_model_len) for mixer in decoder.config.attention]
    facts = [__version__, torch.__version__, repr(decoder.config), sorted(hashes), values, shapes, turned_far]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
