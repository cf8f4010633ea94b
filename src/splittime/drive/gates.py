"""Gates: what a request needs is made ready beside the engine's loop, a grammar compiled or an adapter read.

Grammars are compiled beside the engine's loop: a request whose grammar is not known is held until it is.

It reaches the engine at once, so that its account says what it waits for (`grammar`), and a deadline or an abort finds
it. Threads have it compiled, elsewhere and within limits; then the engine is told to go on with it, or why it cannot.

Requests of one form wait for it together. Those of one tenant never keep those of another waiting for long: tenants
take turns, one has half of the threads at most, and what nobody wants any more ends where it is. Tenants are those
among whom the server shares, a gateway's each apart.

Adapters are read beside the engine's loop: a thread loads them, and the loop says what came of it.

Nothing waits for an adapter: a client may name one only once it is loaded (`server.adapters`).
"""

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from splittime.core.errors import ConfigError, EngineError, ErrorInfo, Refused, SplittimeError
from splittime.core.request import Request
from splittime.drive.messages import Abort, AdapterLoaded, Fail, LoadAdapter, Release, Submit, ToEngine, UnloadAdapter
from splittime.ledger.stages import Cause

log = logging.getLogger("splittime.engine")


class AdapterLoader(Protocol):
    """What the runner has for adapters (`runner.batch.Adapters`)."""

    def load(self, adapter_id: str, folder: str) -> int:
        """Returns the number of its parameters. Raises ConfigError for one that does not fit."""
        ...

    def unload(self, adapter_id: str) -> None:
        """Forgets it; who runs with it keeps it."""
        ...


class KeptAdapters:
    """What a client of the engine keeps: the folder of each adapter that is loaded, by id. A process that succeeds a
    dead one reads them all again before it is given requests, which may name them."""

    def __init__(self) -> None:
        self.folders: dict[str, str] = {}
        self._awaited: dict[int, str] = {}  # ids, by call

    @property
    def are_awaited(self) -> bool:
        return bool(self._awaited)

    def read_again(self, new_number: Callable[[], int]) -> list[LoadAdapter]:
        """Returns what is to be asked of a new process."""
        self._awaited = {new_number(): adapter_id for adapter_id in self.folders}
        return [LoadAdapter(call_id, name, self.folders[name]) for call_id, name in self._awaited.items()]

    def take(self, answer: AdapterLoaded) -> bool:
        """Returns whether the answer was awaited. An adapter that cannot be read any more fails its requests."""
        adapter_id = self._awaited.pop(answer.call_id, None)
        if adapter_id is not None and answer.error is not None:
            log.error("adapter %s is lost: %s", adapter_id, answer.error.message)
        return adapter_id is not None


class AdapterGate:
    """put: gives the engine's loop a message, from any thread. let_in: takes what is not of adapters."""

    def __init__(
        self, adapters: AdapterLoader | None, put: Callable[[ToEngine], None], let_in: Callable[[ToEngine], None]
    ) -> None:
        self._adapters, self._put, self._pass_on = adapters, put, let_in
        self._pool = ThreadPoolExecutor(1, "adapters")

    def let_in(self, message: ToEngine) -> None:
        if isinstance(message, LoadAdapter):
            self._pool.submit(self._load, message)
        elif isinstance(message, UnloadAdapter):
            if self._adapters is not None:
                self._adapters.unload(message.adapter_id)
        else:
            self._pass_on(message)

    def _load(self, asked: LoadAdapter) -> None:
        try:
            self._put(AdapterLoaded(asked.call_id, self._loaded(asked)))
        except SplittimeError as error:
            self._put(AdapterLoaded(asked.call_id, error=error.info))
        except Exception as error:  # of whatever kind the reader has for a broken file: the caller must be told
            words = f"the adapter cannot be loaded: {type(error).__name__}"
            self._put(AdapterLoaded(asked.call_id, error=EngineError(words, code="adapter").info))

    def _loaded(self, asked: LoadAdapter) -> int:
        if self._adapters is None:
            raise ConfigError("this engine serves no adapters", param="enable_lora", hint="start it with --enable-lora")
        return self._adapters.load(asked.adapter_id, asked.folder)


THREADS, MOST_THREADS = 4, 2  # in all, and of one tenant
MOST_WAITING = 64  # forms, of one tenant


class GrammarCompiler(Protocol):
    """What the runner has for grammars (`runner.grammars.Grammars`)."""

    def is_known(self, grammar: str, owner: str = "") -> bool:
        """Returns whether `compile` would answer at once. owner: the tenant who asks, for whom forms are kept."""
        ...

    def compile(self, grammar: str, owner: str = "", is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Raises RequestError for a grammar that cannot be. is_wanted: where it says no, this ends soon."""
        ...

    def tell_found(self, on_found: Callable[[str], None]) -> None:
        """From now on a request whose mask is late sits steps out, and this is told its id when the mask is there."""
        ...


class AskedForm:
    """A form that is to be compiled. request_ids: of those who wait for it; without any, nobody wants it any more."""

    __slots__ = ("grammar", "owner", "request_ids")

    def __init__(self, owner: str, grammar: str) -> None:
        self.owner, self.grammar, self.request_ids = owner, grammar, dict[str, None]()


class GrammarGate:
    """put: gives the engine's loop a message, from any thread."""

    def __init__(self, grammars: GrammarCompiler | None, put: Callable[[ToEngine], None]) -> None:
        self._grammars, self._put = grammars, put
        self._pool = ThreadPoolExecutor(THREADS, "grammars")
        self._waiting: dict[str, AskedForm] = {}  # by the request's id, which a client may use again
        self._forms: dict[tuple[str, str], AskedForm] = {}  # that somebody waits for, by owner and grammar
        self._queues: OrderedDict[str, deque[AskedForm]] = OrderedDict()  # by owner, whose turn is next first
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
        if grammars.is_known(request.sampling.grammar, request.tenant):
            self._put(message)
            return
        self._put(Submit(request, Cause.GRAMMAR))
        self._queue(grammars, request)

    def _forget(self, request_id: str) -> None:
        """From now on the engine is told nothing of who waits under this id, which may be another's next."""
        with self._lock:
            form = self._waiting.pop(request_id, None)
            if form is None:
                return
            del form.request_ids[request_id]
            if not form.request_ids:
                self._drop(form)

    def _drop(self, form: AskedForm) -> None:
        """Nobody waits for this form any more: who asks for it next has it compiled anew."""
        del self._forms[form.owner, form.grammar]
        queue = self._queues.get(form.owner, ())
        if form in queue:
            self._queues[form.owner].remove(form)

    def _queue(self, grammars: GrammarCompiler, request: Request) -> None:
        owner, grammar = request.tenant, request.sampling.grammar
        with self._lock:
            form = self._forms.get((owner, grammar)) or self._new_form(owner, grammar)
            if form is not None:
                form.request_ids[request.request_id] = None
                self._waiting[request.request_id] = form
                self._begin(grammars)
        if form is None:
            words = f"{MOST_WAITING} forms wait to be compiled"
            self._put(Fail(request.request_id, Refused(words, reason="grammars_queue_full").info))

    def _new_form(self, owner: str, grammar: str) -> AskedForm | None:
        """Returns a form that waits for its turn; None where as many wait as may."""
        queue = self._queues.setdefault(owner, deque())
        if len(queue) + self._num_running[owner] >= MOST_WAITING:
            return None
        form = self._forms[owner, grammar] = AskedForm(owner, grammar)
        queue.append(form)
        return form

    def _begin(self, grammars: GrammarCompiler) -> None:
        """Has threads compile for those whose turn it is, while there are threads."""
        while self._num_running.total() < THREADS:
            owner = next((one for one in self._queues if self._num_running[one] < MOST_THREADS), None)
            if owner is None:
                return
            queue = self._queues[owner]
            form = queue.popleft() if queue else None
            self._queues.move_to_end(owner)
            if not queue:
                del self._queues[owner]
            if form is not None:
                self._num_running[owner] += 1
                self._pool.submit(self._compile, grammars, form)

    def _compile(self, grammars: GrammarCompiler, form: AskedForm) -> None:
        """Tells the engine what became of the form, for those who still wait for it."""
        error: ErrorInfo | None = None
        try:
            grammars.compile(form.grammar, form.owner, lambda: bool(form.request_ids))
        except SplittimeError as failure:
            error = failure.info
        except BaseException as failure:  # whatever it was, the requests must not wait for ever
            words = f"the compiler of forms failed: {type(failure).__name__}"
            error = EngineError(words, code="grammar").info
        with self._lock:
            if form.request_ids:
                del self._forms[form.owner, form.grammar]
            for request_id in form.request_ids:
                del self._waiting[request_id]
                self._put(Release(request_id) if error is None else Fail(request_id, error))
            self._num_running[form.owner] -= 1
            self._num_running += Counter()  # without those of whom none runs
            self._begin(grammars)
