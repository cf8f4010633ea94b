"""Grammars are compiled beside the engine's loop: a request whose grammar is not known is held until it is.

It reaches the engine at once, so that its account says what it waits for (`grammar`), and a deadline or an abort finds
it. Threads have it compiled, elsewhere and within limits; then the engine is told to go on with it, or why it cannot.

Those of one tenant never keep those of another waiting for long: tenants take turns, one has half of the threads at
most, and what nobody wants any more ends where it is.
"""

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from splittime.core.errors import EngineError, Refused, SplittimeError
from splittime.core.request import Request, owner_of
from splittime.drive.messages import Abort, Fail, Release, Submit, ToEngine
from splittime.ledger.stages import Cause

THREADS, MOST_THREADS = 4, 2  # in all, and of one tenant
MOST_WAITING = 64  # of one tenant


class GrammarCompiler(Protocol):
    """What the runner has for grammars (`runner.grammars.Grammars`)."""

    def is_known(self, grammar: str, cache_salt: str = "") -> bool:
        """Whether `compile` would answer at once."""
        ...

    def compile(self, grammar: str, cache_salt: str = "", is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Raises RequestError for a grammar that cannot be. is_wanted: where it says no, this ends soon."""
        ...

    def tell_found(self, on_found: Callable[[str], None]) -> None:
        """From now on a request whose mask is late sits steps out, and this is told its id when the mask is there."""
        ...


class GrammarGate:
    """put: gives the engine's loop a message, from any thread."""

    def __init__(self, grammars: GrammarCompiler | None, put: Callable[[ToEngine], None]) -> None:
        self._grammars, self._put = grammars, put
        self._pool = ThreadPoolExecutor(THREADS, "grammars")
        self._waiting: dict[str, Request] = {}  # by id, which a client may use again
        self._queues: OrderedDict[str, deque[Request]] = OrderedDict()  # by tenant, whose turn is next first
        self._num_running: Counter[str] = Counter()
        self._lock = threading.Lock()

    def let_in(self, message: ToEngine) -> None:
        """Pass a message on; a request whose grammar is not known yet, as one that is held for it."""
        grammars = self._grammars
        if isinstance(message, Abort):
            self._forget(message.request_id)
        elif isinstance(message, Submit):  # whoever had this id has ended
            self._forget(message.request.request_id)
        if not isinstance(message, Submit) or not message.request.sampling.grammar or grammars is None:
            self._put(message)
            return
        request = message.request
        if grammars.is_known(request.sampling.grammar, request.cache_salt):
            self._put(message)
            return
        self._put(Submit(request, Cause.GRAMMAR))
        self._queue(grammars, request)

    def _forget(self, request_id: str) -> None:
        """From now on the engine is told nothing of who waits under this id, which may be another's next."""
        with self._lock:
            self._waiting.pop(request_id, None)

    def _queue(self, grammars: GrammarCompiler, request: Request) -> None:
        owner = owner_of(request.cache_salt)
        with self._lock:
            queue = self._queues.setdefault(owner, deque())
            is_full = len(queue) + self._num_running[owner] >= MOST_WAITING
            if not is_full:
                self._waiting[request.request_id] = request
                queue.append(request)
                self._begin(grammars)
        if is_full:
            words = f"{MOST_WAITING} requests wait for their forms to be compiled"
            self._put(Fail(request.request_id, Refused(words, reason="grammars_queue_full").info))

    def _begin(self, grammars: GrammarCompiler) -> None:
        """Has threads compile for those whose turn it is, while there are threads."""
        while self._num_running.total() < THREADS:
            owner = next((one for one in self._queues if self._num_running[one] < MOST_THREADS), None)
            if owner is None:
                return
            queue = self._queues[owner]
            request = queue.popleft() if queue else None
            self._queues.move_to_end(owner)
            if not queue:
                del self._queues[owner]
            if request is not None and self._is_wanted(request):
                self._num_running[owner] += 1
                self._pool.submit(self._compile, grammars, request, owner)

    def _is_wanted(self, request: Request) -> bool:
        return self._waiting.get(request.request_id) is request

    def _compile(self, grammars: GrammarCompiler, request: Request, owner: str) -> None:
        """Tells the engine what became of it, unless its client has gone."""
        answer: ToEngine = Release(request.request_id)
        try:
            grammars.compile(request.sampling.grammar, request.cache_salt, lambda: self._is_wanted(request))
        except SplittimeError as error:
            answer = Fail(request.request_id, error.info)
        except BaseException as error:  # whatever it was, the request must not wait for ever
            words = f"the compiler of forms failed: {type(error).__name__}"
            answer = Fail(request.request_id, EngineError(words, code="grammar").info)
        with self._lock:
            if self._is_wanted(request):
                del self._waiting[request.request_id]
                self._put(answer)
            self._num_running[owner] -= 1
            self._num_running += Counter()  # without those of whom none runs
            self._begin(grammars)
