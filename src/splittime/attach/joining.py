"""One account from two books: what the API process saw of a request, and what the engine's process says of it.

    receive -> tokenize -> admit -> handoff -> | the engine's marks | -> deliver (client_wait) -> end

Whichever comes last closes the account. All of it happens on the receiver's thread: the event loop appends, and
looks up what the engine has told.
A request whose engine never answers is closed after `PATIENCE_NS` with its time from the hand-off `unattributed`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from splittime.attach.mail import Mail
from splittime.attach.request_book import EndedBook, FirstTokenBook
from splittime.core.errors import ErrorInfo
from splittime.core.request import FinishReason
from splittime.ledger.account import Account, ClosedAccount, Mark
from splittime.ledger.facts import ServerFacts
from splittime.ledger.prompt_parts import answer_hashes, prompt_hashes, sampled_lookup
from splittime.ledger.stages import Stage
from splittime.ledger.steps import StepRecord
from splittime.ledger.store import Ledger

PATIENCE_NS = 5_000_000_000
MAX_FIRST_TOKENS = 10_000  # books of first tokens that are kept for who asks for them


class ApiBook(NamedTuple):
    """What the API process saw of one answer, once it is over. request_id: the engine's. marks: from the arrival to the
    hand-off. done_ns: when the API process saw the answer's end, and finish_reason what it called it; None: never.
    written_ns: of each token, when the chunk that holds it was with the socket. waits_ns: when the socket took nothing.
    """

    request_id: str
    group_id: str
    model: str
    endpoint: str
    started_at_unix_ns: int
    marks: tuple[Mark, ...]
    end_ns: int
    num_tokens: int
    done_ns: int | None
    finish_reason: str | None
    written_ns: tuple[int, ...]
    first_chunk_tokens: int
    waits_ns: tuple[tuple[int, int], ...]
    cancelled_ns: int | None
    cache_salt: str = ""
    error: ErrorInfo | None = None
    prompt_ids: Sequence[int] = ()


class AttachedEngine:
    """What an engine has said of itself, and the ledger of its requests and steps: of several engines each has one."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.facts: ServerFacts | None = None
        self.stopped = ""  # why its books end
        self.num_lost = 0  # messages
        self.waiting_for: dict[str, int] = {}  # as of the latest message
        # of all steps, those computed again among the prompts'; output: and this API process's first tokens
        self.prompt_tokens = self.output_tokens = 0
        ledger.describe_by(self.facts_and_gaps)

    def add_step(self, record: StepRecord) -> None:
        wrong_drafts = sum(drafts - accepted for _, drafts, accepted in record.verified)
        self.prompt_tokens += record.prefill_tokens
        self.output_tokens += record.decode_tokens - wrong_drafts
        self.ledger.add_step(record)

    def facts_and_gaps(self) -> ServerFacts | None:
        """Returns its facts, with what is missing of its books."""
        troubles = {"books_stopped": self.stopped, "lost_messages": self.num_lost}
        found = {name: value for name, value in troubles.items() if value}
        return None if self.facts is None else msgspec.structs.replace(self.facts, settings=self.facts.settings | found)


class Joining:
    """What has come of either book, until the other comes. `add` may be called from any thread. make_ledger: for an
    engine, by its number."""

    def __init__(self, make_ledger: Callable[[int], Ledger]) -> None:
        self.engines = {0: AttachedEngine(make_ledger(0))}
        self._make_ledger = make_ledger
        self._arrived: deque[ApiBook] = deque()
        self._api_books: dict[str, ApiBook] = {}
        self._ended: dict[str, tuple[AttachedEngine, EndedBook]] = {}
        self._first_tokens: dict[str, FirstTokenBook] = {}
        self._wanted: dict[str, Callable[[], object]] = {}
        self._expected: set[str] = set()  # requests whose visit is open: their books are kept however long it takes

    # ---- from the event loop

    def expect(self, request_id: str) -> None:
        """A request is on its way to the engine; `add` comes when its answer is over."""
        self._expected.add(request_id)

    def add(self, api_book: ApiBook) -> None:
        self._arrived.append(api_book)

    def engine_part(self, request_id: str) -> EndedBook | FirstTokenBook | None:
        """What the engine has said of a request so far."""
        ended = self._ended.get(request_id)
        return self._first_tokens.get(request_id) if ended is None else ended[1]

    def call_no_more(self, request_id: str) -> None:
        self._wanted.pop(request_id, None)

    def call_when_ended(self, request_id: str, callback: Callable[[], object]) -> None:
        """callback: called once, when the engine has said how the request ended: on the receiver's thread, or here."""
        self._wanted[request_id] = callback
        if request_id in self._ended and self._wanted.pop(request_id, None) is not None:
            callback()

    # ---- on the receiver's thread

    def take(self, mail: Mail) -> None:
        engine = self._engine(mail.engine)
        engine.facts = mail.facts or engine.facts
        engine.stopped = mail.stopped or engine.stopped
        engine.num_lost = mail.lost
        engine.waiting_for = mail.waiting_for
        engine.output_tokens += len(mail.first_tokens)
        for first in mail.first_tokens:
            self._first_tokens[first.request_id] = first
        while len(self._first_tokens) > MAX_FIRST_TOKENS:
            self._first_tokens.pop(next(iter(self._first_tokens)))
        for ended in mail.ended:
            self._ended[ended.request_id] = engine, ended
            callback = self._wanted.pop(ended.request_id, None)
            if callback is not None:
                callback()
        for record in mail.steps:
            engine.add_step(record)

    def _engine(self, number: int) -> AttachedEngine:
        if number not in self.engines:
            self.engines[number] = AttachedEngine(self._make_ledger(number))
        return self.engines[number]

    def join(self) -> None:
        """Close every account of which both books are there, or one has waited long enough."""
        while self._arrived:
            api_book = self._arrived.popleft()
            self._api_books[api_book.request_id] = api_book
            self._expected.discard(api_book.request_id)
        self._close_known(time.monotonic_ns() - PATIENCE_NS)

    def close(self) -> None:
        """Close what is still open with what is known, and the ledgers. The receiver's thread has ended."""
        self.join()
        self._close_known(math.inf)
        for engine in self.engines.values():
            engine.ledger.close()

    def _close_known(self, late_ns: float) -> None:
        """Close the accounts that both books are there of, and those that have waited for the engine since then."""
        for request_id in list(self._api_books):
            found, api_book = self._ended.pop(request_id, None), self._api_books[request_id]
            if found is None and api_book.end_ns >= late_ns:
                continue
            del self._api_books[request_id]
            self._first_tokens.pop(request_id, None)
            if found is None:
                self.engines[0].ledger.add_account(unexplained(api_book))
            else:
                found[0].ledger.add_account(joined(api_book, found[1]))
        for request_id, (_, book) in list(self._ended.items()):
            if book.ended_ns < late_ns - PATIENCE_NS and request_id not in self._expected:
                del self._ended[request_id]  # nobody's: it did not come over HTTP


def joined(api_book: ApiBook, book: EndedBook) -> ClosedAccount:
    """Returns the account. Where the API process ended the answer (a stop string), it is over for the client from then
    on, and what the engine still did is not part of it; `freed_ns` says when that was over."""
    done_ns = book.ended_ns if api_book.done_ns is None else min(api_book.done_ns, book.ended_ns)
    account = with_engine(api_book.marks, book.marks, done_ns)
    account.enter(Stage.DELIVER, max(done_ns, account.marks[-1].begin_ns))
    end_ns = max(api_book.end_ns, done_ns, account.marks[-1].begin_ns)
    _add_waits(account, api_book.waits_ns, end_ns)
    account.close(end_ns)
    num_tokens = api_book.num_tokens if api_book.finish_reason is not None else len(book.token_steps)
    hashes = prompt_hashes(api_book.prompt_ids)
    looked_up = sampled_lookup(api_book.request_id, api_book.prompt_ids, book.answer_ids)
    return ClosedAccount(
        **_about(api_book, account),
        finish_reason=_finish_reason(api_book.finish_reason or book.finish_reason),
        error=api_book.error,
        prompt_tokens=book.prompt_tokens,
        cached_tokens=min(book.cached_tokens, book.prompt_tokens),
        output_tokens=num_tokens,
        num_preemptions=book.num_preemptions,
        first_chunk_tokens=api_book.first_chunk_tokens,
        token_steps=tuple(book.token_steps[:num_tokens]),
        token_ready_ns=tuple(book.token_ready_ns[:num_tokens]),
        token_written_ns=api_book.written_ns[:num_tokens],
        cancelled_ns=api_book.cancelled_ns,
        freed_ns=book.ended_ns,
        prompt_parts=hashes.parts,
        prefixes=hashes.prefixes,
        answer_prefixes=answer_hashes(api_book.prompt_ids, book.answer_ids, hashes),
        computes_prompt=book.computes_prompt,
        max_tokens=book.max_tokens,
        priority=book.priority,
        lookup_guesses=looked_up.guesses,
        lookup_right=looked_up.right,
    )


def with_engine(api_marks: Sequence[Mark], engine_marks: Sequence[Mark], until_ns: int) -> Account:
    """Returns the open account of a request up to `until_ns`."""
    account = Account("", api_marks[0].begin_ns, Stage.RECEIVE)
    account.extend(api_marks[1:])
    for mark in engine_marks:
        if mark.begin_ns < until_ns:
            account.enter(mark.stage, max(mark.begin_ns, account.marks[-1].begin_ns), mark.cause)
    return account


def unexplained(api_book: ApiBook) -> ClosedAccount:
    """Returns the account of a request of which the engine never told: nobody knows where its time went."""
    account = with_engine(api_book.marks, (), 0)
    account.enter(Stage.UNATTRIBUTED, account.marks[-1].begin_ns)
    account.close(max(api_book.end_ns, account.marks[-1].begin_ns))
    return ClosedAccount(
        **_about(api_book, account),
        finish_reason=_finish_reason(api_book.finish_reason or ("abort" if api_book.cancelled_ns else "error")),
        error=api_book.error,
        output_tokens=api_book.num_tokens,
        first_chunk_tokens=api_book.first_chunk_tokens,
        cancelled_ns=api_book.cancelled_ns,
    )


def _about(api_book: ApiBook, account: Account) -> dict[str, Any]:
    return {
        "request_id": api_book.request_id,
        "group_id": api_book.group_id,
        "model": api_book.model,
        "endpoint": api_book.endpoint,
        "started_at_unix_ns": api_book.started_at_unix_ns,
        "start_ns": account.start_ns,
        "end_ns": account.end_ns,
        "intervals": tuple(account.intervals()),
        "cache_salt": api_book.cache_salt,
    }


def _add_waits(account: Account, waits_ns: Sequence[tuple[int, int]], end_ns: int) -> None:
    """Waits for the client count once the engine owes nothing."""
    since_ns = account.marks[-1].begin_ns
    for begin_ns, until_ns in waits_ns:
        if until_ns > since_ns and until_ns <= end_ns:
            account.enter(Stage.CLIENT_WAIT, max(begin_ns, account.marks[-1].begin_ns))
            account.enter(Stage.DELIVER, until_ns)


def _finish_reason(name: str) -> str:
    return name if name in set(FinishReason) else FinishReason.ERROR
