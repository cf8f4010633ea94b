"""A replica of which only the instants of first and last tokens are told: cheap enough for a thousand of them at once.

    replica = CoarseReplica(measured)                 what it is a coarse picture of: a `Replica`
    replica.add(CoarseRequest(prompt, output), now_ns)
    while replica.next_ns < ...: news = replica.turn()

Steps take what the cost model says of their shape. Who is in them is decided by the rules of the server's own scheduler
in a few lines: decodes first, then chunks of prompts, then admissions in the order of arrival while slots, KV room and
the step's tokens last; whoever came last is preempted where decodes find no room. Steps in which everybody decodes are
taken at once, up to the next end or arrival: a step's time grows evenly with the positions in the cache, so many steps
take the sum of an arithmetic series.

It tells what `simulate.replica` tells without noise, to the nanosecond, while there are blocks for everybody; where
requests are preempted, nearly: KV room is counted in tokens, with half a block for each request.
`tests/simulate/test_coarse_replica.py` holds it to that. What prefix caching finds goes by the ids of blocks that a
trace tells (`cached_blocks`). Refused is what it does not know: other policies, static batches, drafts, blocks in host
memory, prompts that are never cut.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from splittime.core.errors import ConfigError
from splittime.simulate.replica import Replica
from splittime.simulate.shape import StepShape

PREFIX_TOKENS = 512  # of a trace's block


class CachedBlocks:
    """most: so many are kept."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[int, None] = OrderedDict()  # what was used last comes last

    def tokens_of(self, blocks: Iterable[int]) -> int:
        """Returns how many tokens of a prompt of these blocks are here, from its beginning on."""
        found = 0
        for block in blocks:
            if block not in self._kept:
                break
            self._kept.move_to_end(block)
            found += PREFIX_TOKENS
        return found

    def remember(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._kept[block] = None
            self._kept.move_to_end(block)
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)


class StepsInHand(NamedTuple):
    """Steps that follow each other: the first takes `first_ns`, each next one `more_ns` more. late_ns: from a step's
    tokens to the begin of the next step. chunks: prompts' parts in it, of a single step."""

    begin_ns: int
    number: int
    first_ns: float
    more_ns: float
    late_ns: int
    chunks: "tuple[tuple[CoarseRequest, int], ...]" = ()

    @property
    def end_ns(self) -> int:
        return self.begin_ns + round(self.number * (self.first_ns + self.more_ns * (self.number - 1) / 2))

    def begun_by(self, now_ns: int) -> int:
        """Returns how many have begun by this time, at least one."""
        passed, half = now_ns - self.begin_ns, self.first_ns - self.more_ns / 2
        if self.more_ns > 0:
            count = (math.sqrt(half * half + 2 * self.more_ns * passed) - half) / self.more_ns
        else:
            count = passed / self.first_ns
        return min(self.number, max(1, math.ceil(count)))


NEVER = math.inf


class CoarseRequest:
    """prompt, output: tokens. blocks: the ids of the prompt's blocks of `PREFIX_TOKENS` from its beginning; equal ids
    are equal tokens. generated: tokens that it has. cached: of its prompt, found in the prefix cache."""

    __slots__ = (
        *("prompt", "output", "blocks", "generated", "cached", "known", "computed", "end_step", "freed_at"),
        *("rank", "queued_ns"),
    )

    def __init__(self, prompt: int, output: int, blocks: tuple[int, ...] = ()) -> None:
        self.prompt, self.output, self.blocks = max(1, prompt), max(1, output), blocks
        self.generated = self.cached = self.computed = 0
        self.known = self.prompt  # tokens to be computed before the next one is sampled
        self.freed_at: int | None = None  # preempted: when so many tokens of room had been taken
        self.end_step = -1  # of a request that decodes
        self.rank = (1, 0)  # who comes first here: who has waited too long, then who came first
        self.queued_ns = -1  # since when it waits; -1: it does not


class CoarseNews(NamedTuple):
    """A request's prompt is computed and its next token is there, or its last one is."""

    at_ns: int
    request: CoarseRequest
    is_end: bool


class CoarseReplica:
    """like: what it is a picture of. factor: how many times as long its steps take. next_ns: when `turn` has something
    to do; infinite while it has nothing. Raises ConfigError for a server that it cannot picture."""

    def __init__(self, like: Replica, factor: float = 1.0) -> None:
        require_coarse(like)
        self._like, self._factor, self._costs, config = like, factor, like.costs, like.config
        self._config, self._half_block = config, config.block_size // 2
        self._room = config.num_blocks * config.block_size
        self._keep_free = max(1, config.num_blocks // 100) * config.block_size
        self._most_tokens = config.max_prefill_tokens or config.max_num_batched_tokens
        self._clear()

    def _clear(self) -> None:
        self.waiting: deque[CoarseRequest] = deque()  # best rank first
        self._by_age: deque[tuple[int, CoarseRequest]] = deque()  # those, and some that have left
        self._behind: list[CoarseRequest] = []  # whose prompts are being computed
        self._decoding: set[CoarseRequest] = set()
        self._ends: list[tuple[int, int, CoarseRequest]] = []
        self._cached = CachedBlocks(self._room // PREFIX_TOKENS)
        self._in_hand: StepsInHand | None = None
        self._step = self._count = self._context = self._held = self._taken = 0
        self.next_ns: float = NEVER

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._behind)

    @property
    def running_tokens(self) -> int:
        """Tokens that are held for those that run."""
        return self._held

    @property
    def waiting_tokens(self) -> int:
        return sum(request.known for request in self.waiting)

    @property
    def kv_usage(self) -> float:
        return min(1.0, self._held / self._room)

    def add(self, request: CoarseRequest, now_ns: int) -> None:
        """A request has come to the engine. Raises ConfigError for one that is longer than its context."""
        if request.prompt + request.output > self._config.max_model_len:
            words = f"a request has {request.prompt} + {request.output} tokens"
            raise ConfigError(words, param="max_model_len", limit=self._config.max_model_len)
        self._count += 1
        request.known, request.rank = request.prompt + request.generated, (1, self._count)
        self._queue(request, now_ns)
        if self._in_hand is None:
            self._plan(now_ns + self._like.delivery.to_wake_ns)
        elif self._in_hand.number > 1:
            self._take_in_hand(self._in_hand._replace(number=self._in_hand.begun_by(now_ns)))

    def fail(self, now_ns: int) -> list[CoarseRequest]:
        """Lose all that it has. Returns its requests, each with as many tokens as were ready."""
        if self._in_hand is not None:
            self._step += self._in_hand.begun_by(now_ns) - 1
        for request in self._decoding:
            request.generated = request.output - max(0, request.end_step - self._step)
        lost = sorted([*self._decoding, *self._behind, *self.waiting], key=lambda one: one.rank)
        self._clear()
        return lost

    def turn(self) -> list[CoarseNews]:
        """Ends the steps in hand and plans the next ones. Returns what came of them."""
        steps = self._in_hand
        assert steps is not None, "it has nothing to do"
        at_ns, num_decodes = steps.end_ns, len(self._decoding)
        ready_ns, news = at_ns - steps.late_ns, []
        self._step += steps.number
        self._context += steps.number * num_decodes
        self._held += steps.number * num_decodes
        self._taken += steps.number * num_decodes
        while self._ends and self._ends[0][0] <= self._step:
            end_step, _, request = heapq.heappop(self._ends)
            if request.end_step == end_step:  # else it was preempted meanwhile
                self._leave(request)
                news.append(CoarseNews(ready_ns, request, is_end=True))
        for request, count in steps.chunks:
            news += self._compute(request, count, ready_ns)
        self._plan(at_ns)
        return news

    # ---- what comes of a step

    def _compute(self, request: CoarseRequest, count: int, ready_ns: int) -> list[CoarseNews]:
        """A chunk of its prompt is done; with the last of them it has a token."""
        request.computed += count
        if request.computed < request.known:
            return []
        self._behind.remove(request)
        self._cached.remember(request.blocks[: request.prompt // PREFIX_TOKENS])
        request.generated += 1
        news = [CoarseNews(ready_ns, request, is_end=False)]
        left = request.output - request.generated
        self._held += 1
        if not left:
            self._held -= request.known + 1
            return [*news, CoarseNews(ready_ns, request, is_end=True)]
        self._decoding.add(request)
        self._context += request.known
        request.end_step = self._step + left
        heapq.heappush(self._ends, (request.end_step, request.rank[1], request))
        return news

    def _leave(self, request: CoarseRequest) -> None:
        """Take it out of those that decode, and free its room. Its `generated` is what it is by now."""
        request.generated = request.output - max(0, request.end_step - self._step)
        self._decoding.remove(request)
        self._context -= request.prompt + request.generated - 1
        self._held -= request.prompt + request.generated

    # ---- a plan

    def _plan(self, now_ns: int) -> None:
        self._find_room(now_ns)
        num_decodes = len(self._decoding)
        budget = max(0, min(self._most_tokens, self._config.max_num_batched_tokens - num_decodes))
        chunks: list[tuple[CoarseRequest, int]] = []
        for request in self._behind:
            budget -= _cut(request, budget, chunks)
        while budget > 0 and self.waiting and self._may_admit(request := self._first(now_ns)):
            self._admit(request)
            budget -= _cut(request, budget, chunks)
        if chunks:
            self._take_in_hand(self._mixed(now_ns, tuple(chunks)))
        elif num_decodes:
            self._take_in_hand(self._decodes(now_ns))
        else:
            self._in_hand, self.next_ns = None, NEVER

    def _take_in_hand(self, steps: StepsInHand) -> None:
        self._in_hand, self.next_ns = steps, steps.end_ns

    def _free(self) -> int:
        """Returns the tokens for which there is room."""
        return self._room - self._held - self.num_running * self._half_block

    def _queue(self, request: CoarseRequest, now_ns: int) -> None:
        request.queued_ns, behind = now_ns, len(self.waiting)
        if self.waiting and self.waiting[-1].rank > request.rank:
            behind = next(at for at, other in enumerate(self.waiting) if other.rank > request.rank)
        self.waiting.insert(behind, request)
        self._by_age.append((now_ns, request))

    def _first(self, now_ns: int) -> CoarseRequest:
        """Returns who is admitted next: whoever has waited for too long, and keeps that rank, or has the best."""
        while self._by_age[0][0] != self._by_age[0][1].queued_ns:
            self._by_age.popleft()
        since_ns, oldest = self._by_age[0]
        if now_ns - since_ns <= self._config.starvation_bound_ms * 1e6:
            return self.waiting[0]
        oldest.rank = (0, oldest.rank[1])
        return oldest

    def _find_room(self, now_ns: int) -> None:
        """Preempt who came last until everybody who decodes has room for a token."""
        while self._decoding and self._free() < len(self._decoding):
            request = max([*self._decoding, *self._behind], key=lambda one: one.rank)
            if request in self._decoding:
                self._leave(request)
            else:
                self._behind.remove(request)
                self._held -= request.known
            request.end_step, request.freed_at = -1, self._taken
            request.known = request.prompt + request.generated
            self._queue(request, now_ns)

    def _may_admit(self, request: CoarseRequest) -> bool:
        keep_free = self._keep_free if self.num_running else 0
        has_slot = self.num_running < self._config.max_num_seqs
        return has_slot and self._free() - keep_free >= request.known

    def _admit(self, request: CoarseRequest) -> None:
        self.waiting.remove(request)
        request.queued_ns = -1
        request.computed = self._found(request)
        if request.freed_at is None:
            request.cached = request.computed
        self._held += request.known
        self._taken += request.known - request.computed
        self._behind.append(request)

    def _mixed(self, now_ns: int, chunks: tuple[tuple[CoarseRequest, int], ...]) -> StepsInHand:
        """Returns a step with these parts of prompts, and a token of everybody who decodes."""
        num_decodes, prompt_tokens = len(self._decoding), sum(count for _, count in chunks)
        kv_tokens = self._context + num_decodes + sum(request.computed + count for request, count in chunks)
        pairs = sum(count * request.computed + count * (count + 1) // 2 for request, count in chunks if count > 1)
        rows, tokens = num_decodes + len(chunks), num_decodes + prompt_tokens
        first_ns, late_ns = self._time(StepShape(rows, tokens, num_decodes, kv_tokens, pairs))
        return StepsInHand(now_ns, 1, first_ns, 0.0, late_ns, chunks)

    def _decodes(self, now_ns: int) -> StepsInHand:
        """Returns the steps up to the next end in which everybody decodes."""
        rows = len(self._decoding)
        while self._ends[0][2].end_step != self._ends[0][0]:  # preempted
            heapq.heappop(self._ends)
        count = max(1, min(self._ends[0][0] - self._step, self._free() // rows))
        first_ns, late_ns = self._time(StepShape(rows, rows, rows, self._context + rows, 0))
        if count == 1:
            return StepsInHand(now_ns, 1, first_ns, 0.0, late_ns)
        last_ns, _ = self._time(StepShape(rows, rows, rows, self._context + rows * count, 0))
        return StepsInHand(now_ns, count, first_ns, max(0.0, (last_ns - first_ns) / (count - 1)), late_ns)

    def _time(self, shape: StepShape) -> tuple[float, int]:
        """Returns ns from this step's begin to the next one's, and from its tokens on."""
        time = self._costs.step_time(shape._replace(execution=self._like.execution), self._factor)
        return max(1.0, float(time.step_ns + time.host_gap_ns)), time.commit_ns + time.host_gap_ns

    # ---- the prefix cache

    def _found(self, request: CoarseRequest) -> int:
        """Returns how many tokens of it are in the prefix cache; never all of them. One that was preempted finds its
        own again, but for what has been taken of its room since."""
        if not self._config.enable_prefix_caching:
            return 0
        found = 0 if request.freed_at is None else request.known - (self._taken - request.freed_at)
        found, size = max(found, self._cached.tokens_of(request.blocks)), self._config.block_size
        return max(0, min(found, request.known - 1)) // size * size


def _cut(request: CoarseRequest, budget: int, chunks: list[tuple[CoarseRequest, int]]) -> int:
    """Add what of a prompt fits. Returns how much."""
    count = min(request.known - request.computed, budget)
    if count > 0:
        chunks.append((request, count))
    return count


def require_coarse(like: Replica) -> None:
    """Raises ConfigError for a server that `CoarseReplica` is no picture of."""
    config = like.config
    known = {"policy": "fcfs", "batching": "continuous", "num_host_slots": 0, "enable_chunked_prefill": True}
    for name, value in known.items():
        given = getattr(config, name)
        if given != value:
            hint = f"Simulate one with splittime simulate; a fleet needs {name} {value}."
            raise ConfigError(f"a fleet of servers with {name} {given} cannot be simulated", param=name, hint=hint)
    if like.guesses_ahead:
        hint = "Record the server without speculative decoding."
        raise ConfigError("nobody knows what drafts would be right of a fleet's requests", param="replica", hint=hint)
