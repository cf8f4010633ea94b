"""Grammars are compiled beside the engine's loop: a request whose grammar is not known is held until it is.

It reaches the engine at once, so that its account says what it waits for (`grammar`), and a deadline or an abort finds
it. A thread compiles; then the engine is told to go on with it, or why it cannot.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from splittime.core.errors import SplittimeError
from splittime.core.request import Request
from splittime.drive.messages import Fail, Release, Submit, ToEngine
from splittime.ledger.stages import Cause


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

    def let_in(self, message: ToEngine) -> None:
        """Pass a message on; a request whose grammar is not known yet, as one that is held for it."""
        grammars = self._grammars
        asked = message.request.sampling.grammar if isinstance(message, Submit) else ""
        if not asked or grammars is None or grammars.is_known(asked):
            self._put(message)
            return
        assert isinstance(message, Submit)
        self._put(Submit(message.request, Cause.GRAMMAR))
        self._pool.submit(partial(self._compile, grammars, message.request))

    def _compile(self, grammars: GrammarCompiler, request: Request) -> None:
        try:
            grammars.compile(request.sampling.grammar)
        except SplittimeError as error:
            self._put(Fail(request.request_id, error.info))
        else:
            self._put(Release(request.request_id))
