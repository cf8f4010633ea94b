"""A runner with declared delays and predictable tokens: for tests, simulations, and benchmarks of everything else.

A step takes `step_ns + token_ns * tokens`, and `move_ns` for each block that is copied to host memory or back, by the
clock it is given: a `VirtualClock` is advanced, a real one slept. The next token is a hash of all tokens before it, *as
read back from the blocks*: what the fake keeps in a KV slot is the token itself. So the output equals `expected_tokens`
however a request is batched, chunked, preempted or served from the prefix cache, unless a plan reads a slot that was
never written or belongs to somebody else by now.
"""

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from zlib import crc32

from splittime.core.clock import Clock, SystemClock, VirtualClock
from splittime.core.step import PENDING, Admitted, Row, RowResult, StepPlan, StepResult


class FakeRunner:
    """block_size: of the KV cache. vocab_size: tokens are 1..vocab_size - 1; 0 is end-of-sequence if `eos_every` > 0:
    a token is 0 when its hash divides by `eos_every`. execution: of `StepResult`; other than "host", it is a device
    that tells how long it waited. is_late: of a row that samples, whether it gives nothing yet."""

    verifies_drafts = True

    def __init__(
        self,
        block_size: int = 16,
        vocab_size: int = 1000,
        eos_every: int = 0,
        step_ns: int = 0,
        token_ns: int = 0,
        clock: Clock | None = None,
        execution: str = "host",
        move_ns: int = 0,
        is_late: Callable[[Row], bool] | None = None,
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._eos_every = eos_every
        self._step_ns = step_ns
        self._token_ns = token_ns
        self._clock = clock or SystemClock()
        self._execution = execution
        self._move_ns = move_ns
        self._is_late = is_late
        self._host: dict[int, array] = {}  # slot of host memory -> what a block held
        self._known: dict[str, Admitted] = {}
        self._blocks: dict[str, list[int]] = {}
        self._kv: dict[int, array] = {}  # block -> token id in each slot
        self._sampled: dict[str, int] = {}  # the latest of each request
        self._launched: deque[tuple[StepResult, int]] = deque()  # and when it is done
        self._free_ns: int | None = None  # when the device is done with what it was told; None: it was told nothing

    def run(self, plan: StepPlan) -> StepResult:
        result = self._compute(plan)
        self._pass(_busy_ns(result))
        self._free_ns = self._clock.now_ns()
        return result

    def launch(self, plan: StepPlan) -> None:
        """The device begins with it when it is done with the step before."""
        result = self._compute(plan)
        self._free_ns = self._begin_ns() + _busy_ns(result)
        self._launched.append((result, self._free_ns))

    def collect(self) -> StepResult:
        result, done_ns = self._launched.popleft()
        self._pass(max(0, done_ns - self._clock.now_ns()))
        return result

    def _compute(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self._known[request_id], self._blocks[request_id]
        for admitted in plan.admitted:
            assert admitted.request_id not in self._known, f"{admitted.request_id} is known already"
            self._known[admitted.request_id] = admitted
            self._blocks[admitted.request_id] = []
        for block, slot in plan.offloads:
            self._host[slot] = array("I", self._kv[block])
        for slot, block in plan.restores:
            self._kv[block] = array("I", self._host[slot])
        rows = tuple(self._run_row(row) for row in plan.rows)
        device_ns = self._step_ns + self._token_ns * sum(row.num_tokens for row in plan.rows)
        gap_ns = 0
        if self._execution != "host" and self._free_ns is not None:
            gap_ns = self._begin_ns() - self._free_ns
        return StepResult(
            plan.step_id,
            rows,
            device_ns,
            execution=self._execution,
            gap_ns=gap_ns,
            offload_ns=self._move_ns * len(plan.offloads),
            restore_ns=self._move_ns * len(plan.restores),
        )

    def _begin_ns(self) -> int:
        """When the device begins with a step that it is told now."""
        return max(self._free_ns or 0, self._clock.now_ns())

    def _run_row(self, row: Row) -> RowResult:
        blocks = self._blocks[row.request_id]
        blocks.extend(row.new_block_ids)
        token_ids = (self._sampled[row.request_id],) if row.token_ids == (PENDING,) else row.token_ids
        for position, token_id in enumerate((*token_ids, *row.draft_token_ids), row.start):
            block = self._kv.setdefault(blocks[position // self._block_size], array("I", bytes(4 * self._block_size)))
            block[position % self._block_size] = token_id
        if not row.num_samples:
            return RowResult(row.request_id)
        if self._is_late is not None and self._is_late(row):
            if row.draft_token_ids:
                del blocks[-(-(row.start + len(token_ids) - 1) // self._block_size) :]
            return RowResult(row.request_id, is_late=True)
        accepted = self._accept(blocks, row)
        self._sampled[row.request_id] = accepted[-1]
        return RowResult(row.request_id, tuple(accepted))

    def _accept(self, blocks: list[int], row: Row) -> list[int]:
        """The tokens that follow the known ones, up to the first that its draft did not guess."""
        end = row.start + len(row.token_ids)
        accepted = [self._next_token(self._read(blocks, end))]
        for draft in row.draft_token_ids:
            if draft != accepted[-1]:
                break
            accepted.append(self._next_token(self._read(blocks, end + len(accepted))))
        if row.draft_token_ids:
            num_computed = end + len(accepted) - 1
            del blocks[-(-num_computed // self._block_size) :]
        return accepted

    def _read(self, blocks: list[int], num_tokens: int) -> bytes:
        """The first `num_tokens` tokens, as the blocks hold them."""
        num_blocks = -(-num_tokens // self._block_size)
        return b"".join(self._kv[block].tobytes() for block in blocks[:num_blocks])[: 4 * num_tokens]

    def _next_token(self, tokens: bytes) -> int:
        mixed = crc32(tokens)
        if self._eos_every and mixed % self._eos_every == 0:
            return 0
        return 1 + mixed % (self._vocab_size - 1)

    def _pass(self, delay_ns: int) -> None:
        if isinstance(self._clock, VirtualClock):
            self._clock.advance(delay_ns)
        elif delay_ns:
            time.sleep(delay_ns / 1e9)


def _busy_ns(result: StepResult) -> int:
    return result.offload_ns + result.restore_ns + result.device_ns


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int = 1000, eos_every: int = 0) -> list[int]:
    """What a FakeRunner must generate for a prompt, worked out with no cache at all."""
    runner = FakeRunner(vocab_size=vocab_size, eos_every=eos_every)
    tokens = array("I", prompt)
    for _ in range(count):
        tokens.append(runner._next_token(tokens.tobytes()))
        if tokens[-1] == 0 and eos_every:
            break
    return list(tokens[len(prompt) :])
