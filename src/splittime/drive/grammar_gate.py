"""Grammars are compiled beside the engine's loop: a request whose grammar is not known is held until it is.

It reaches the engine at once, so that its account says what it waits for (`grammar`), and a deadline or an abort finds
it. A thread compiles; then the engine is told to go on with it, or why it cannot.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from splittime.core.errors import EngineError, Refused, SplittimeError
from splittime.core.request import Request
from splittime.drive.messages import Abort, Fail, Release, Submit, ToEngine
from splittime.ledger.stages import Cause

MOST_WAITING = 64


class GrammarCompiler(Protocol):
    """What the runner has for grammars (`runner.grammars.Grammars`)."""

    def is_known(self, grammar: str) -> bool:
        """Whether `compile` would answer at once."""
        ...

    def compile(self, grammar: str) -> None:
        """Raises RequestError for a grammar that cannot be."""
        ...


class GrammarGate:
    """put: gives the engine's loop a message, from any thread."""

    def __init__(self, grammars: GrammarCompiler | None, put: Callable[[ToEngine], None]) -> None:
        self._grammars, self._put = grammars, put
        self._pool = ThreadPoolExecutor(1, "grammars")
        self._waiting: dict[str, Request] = {}  # by id, which a client may use again

    def let_in(self, message: ToEngine) -> None:
        """Pass a message on; a request whose grammar is not known yet, as one that is held for it."""
        grammars = self._grammars
        if isinstance(message, Abort):
            self._waiting.pop(message.request_id, None)
        asked = message.request.sampling.grammar if isinstance(message, Submit) else ""
        if not asked or grammars is None or grammars.is_known(asked):
            self._put(message)
            return
        assert isinstance(message, Submit)
        self._put(Submit(message.request, Cause.GRAMMAR))
        if len(self._waiting) >= MOST_WAITING:
            words = f"{MOST_WAITING} requests wait for their forms to be compiled"
            self._put(Fail(message.request.request_id, Refused(words, reason="grammars_queue_full").info))
            return
        self._waiting[message.request.request_id] = message.request
        self._pool.submit(self._compile, grammars, message.request)

    def _compile(self, grammars: GrammarCompiler, request: Request) -> None:
        """Tells the engine what became of it, unless its client has gone."""
        if self._waiting.get(request.request_id) is not request:
            return
        answer: ToEngine = Release(request.request_id)
        try:
            grammars.compile(request.sampling.grammar)
        except SplittimeError as error:
            answer = Fail(request.request_id, error.info)
        except BaseException as error:  # whatever it was, the request must not wait for ever
            words = f"the compiler of forms failed: {type(error).__name__}"
            answer = Fail(request.request_id, EngineError(words, code="grammar").info)
        if self._waiting.get(request.request_id) is request:
            del self._waiting[request.request_id]
            self._put(answer)
