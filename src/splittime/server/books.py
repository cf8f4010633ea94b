"""What the routes of the ledger and the page ask of whoever keeps the books: our own service, or vLLM's with ours."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from splittime.core.engine import EngineStats
from splittime.ledger.account import Mark
from splittime.ledger.facts import ServerFacts
from splittime.ledger.store import Ledger
from splittime.web.tenants import Tenant


class OpenBook(NamedTuple):
    """What is known of a request that is being served, taken in the event loop: later marks do not reach it."""

    request_id: str
    group_id: str
    endpoint: str
    start_ns: int
    marks: tuple[Mark, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class KeepsBooks(Protocol):
    """ledger: of the closed. pool: threads for work on thousands of records."""

    @property
    def ledger(self) -> Ledger: ...

    @property
    def pool(self) -> ThreadPoolExecutor: ...

    def facts(self) -> ServerFacts | None:
        """Returns what the server says of itself; None while it is not known."""
        ...

    def is_open(self, request_id: str, tenant: Tenant) -> bool:
        """Returns whether a request of this id is being served, as far as this tenant may know."""
        ...

    def stats(self) -> EngineStats:
        """Returns the engine's latest gauges."""
        ...

    def about(self) -> dict[str, Any]:
        """Returns the server's part of the page's head."""
        ...

    def open_books(self) -> Iterable[OpenBook]:
        """Yields the requests that are being served."""
        ...
