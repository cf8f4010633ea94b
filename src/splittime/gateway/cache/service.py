"""What all requests' cache turns share: the store, the questions, the flights, and what was counted.

Everything that may take long (a body's normal form, the store, the search) is done by one thread, in order; the event
loop has the flights and the counts. A store that fails is a miss, and counted.

On a share of hits the model runs all the same, and both answers are compared (`outcome`): was the hit wrong?
Two answers to one question are rarely the same words, so there are four outcomes: `same` (the same text, spaces aside),
`close` (other words, and the verifier says that they say the same), `different`, and `unjudged` (the verifier gave no
verdict). A false hit is a `different` one, and the rate is of those that were judged. Without a verifier, which equal
requests need not have, other words are `different`: that errs to the wrong side. A verifier errs too: who needs better
marks hits as wrong (`/cache/wrong`).

The questions of kept answers, and which of them are nearest to another: an exact search, in memory, with numpy.

Questions are compared only within one `likeness`: everything else of their requests is the same, and the embedder too.
Bounded by `max_questions`: who came first goes first.

Makes the vectors of questions, by an upstream of the config that serves embeddings.
"""

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from splittime.gateway.breaker import LeftAlone
from splittime.gateway.cache.answers import (
    EQUAL,
    KINDS,
    LIKE,
    AskedKey,
    Flight,
    KeptAnswer,
    Wishes,
    asked_key,
    new_mark,
    pieces_of,
    text_of,
)
from splittime.gateway.cache.spare_room import SpareRoom, Verifier
from splittime.gateway.cache.stores import STORE_ERRORS, AnswerStore, Purge, SqliteAnswers
from splittime.gateway.config import BreakerConfig, CacheRoute, EmbedderConfig, GatewayConfig
from splittime.gateway.decoded_answer import ask_whole
from splittime.gateway.forwarded import ForwardedRequest
from splittime.gateway.upstream_connections import UpstreamConnections
from splittime.wire.target import Target

MAX_LOOKED_AT = 16  # of the nearest, until one is found that may be given
MAX_ANSWER_BYTES = 2**20
MAX_DIMENSIONS = 8192

Vector = NDArray[np.float32]


class ToldEmbedding(msgspec.Struct):
    embedding: list[float]


class ToldEmbeddings(msgspec.Struct):
    data: list[ToldEmbedding]


class Embedder:
    """Asks an OpenAI-compatible `/v1/embeddings`. name: vectors of different names are never compared."""

    def __init__(
        self, config: EmbedderConfig, breaker: BreakerConfig, key: str | None, connections: UpstreamConnections
    ) -> None:
        self.name = f"{config.model}@{config.url}"
        self._config, self._key, self._connections = config, key, connections
        self._address = Target(url=config.url).address
        self._left_alone = LeftAlone(breaker)

    async def embed(self, text: str) -> Vector | None:
        """Returns a vector of length 1, or None where there is none now: the question is then no hit."""
        return await self._left_alone.unless(lambda: self._asked(text))

    async def _asked(self, text: str) -> Vector | None:
        """Returns None where the text itself is refused. Raises `OSError` where nobody answers, and `ValueError` for
        what is no embedding."""
        body = msgspec.json.encode({"model": self._config.model, "input": text, "encoding_format": "float"})
        where, within_s = (self._connections, self._address, "/v1/embeddings"), self._config.timeout_s
        status, data = await ask_whole(*where, self._key, body, within_s=within_s, max_bytes=MAX_ANSWER_BYTES)
        if 400 <= status < 500:  # as of one that is too long: held against no other
            return None
        if status != 200 or data is None:
            raise ValueError(f"the embedder answered {status}")
        told = msgspec.json.decode(data, type=ToldEmbeddings).data
        if len(told) != 1 or not 0 < len(told[0].embedding) <= MAX_DIMENSIONS:
            raise ValueError("not one embedding")
        return unit(told[0].embedding)


def unit(values: list[float]) -> Vector:
    """Returns the vector of length 1 of this direction. Raises `ValueError` if it has none."""
    found = np.asarray(values, dtype=np.float32)
    length = float(np.linalg.norm(found))
    if not np.isfinite(length) or length == 0.0:
        raise ValueError("an embedding without a direction")
    return found / np.float32(length)


class QuestionGroup:
    """The questions of one likeness: row n of `vectors` is that of the answer `held[n]`."""

    def __init__(self, dimensions: int) -> None:
        self.held: list[str] = []
        self.vectors = np.zeros((4, dimensions), dtype=np.float32)

    def add(self, key: str, vector: Vector) -> None:
        if len(self.held) == len(self.vectors):
            self.vectors = np.concatenate([self.vectors, np.zeros_like(self.vectors)])
        self.vectors[len(self.held)] = vector
        self.held.append(key)

    def discard(self, key: str) -> None:
        """Put the last in the place of the one that goes."""
        if key in self.held:
            at, last = self.held.index(key), self.held.pop()
            if at < len(self.held):
                self.held[at] = last
                self.vectors[at] = self.vectors[len(self.held)]

    def nearest(self, vector: Vector, threshold: float) -> list[str]:
        """Returns the keys of those whose cosine reaches the threshold, the nearest first."""
        cosines = self.vectors[: len(self.held)] @ vector
        reached = np.flatnonzero(cosines >= threshold)
        return [self.held[at] for at in reached[np.argsort(-cosines[reached], kind="stable")][:MAX_LOOKED_AT]]


class QuestionIndex:
    def __init__(self, max_questions: int) -> None:
        self._max_questions = max_questions
        self._groups: dict[str, QuestionGroup] = {}
        self._likeness: dict[str, str] = {}  # by key, the oldest first

    def __len__(self) -> int:
        return len(self._likeness)

    def add(self, key: str, likeness: str, vector: Vector) -> None:
        self.discard(key)
        group = self._groups.get(likeness)
        if group is None:
            group = self._groups[likeness] = QuestionGroup(len(vector))
        if len(vector) != group.vectors.shape[1]:
            return  # of an upstream that answers with another model under one name
        group.add(key, vector)
        self._likeness[key] = likeness
        while len(self._likeness) > self._max_questions:
            self.discard(next(iter(self._likeness)))

    def discard(self, key: str) -> None:
        likeness = self._likeness.pop(key, None)
        if likeness is not None:
            self._groups[likeness].discard(key)
            if not self._groups[likeness].held:
                del self._groups[likeness]

    def near(self, likeness: str, vector: Vector, threshold: float) -> list[str]:
        """Returns the keys of answers to questions that are near enough, the nearest first."""
        group = self._groups.get(likeness)
        if group is None or len(vector) != group.vectors.shape[1]:
            return []
        return group.nearest(vector, threshold)


MAX_WAITING = 64  # answers that wait to be kept
SAME, CLOSE, DIFFERENT, UNJUDGED = "same", "close", "different", "unjudged"
JUDGED = (SAME, CLOSE, DIFFERENT)
OUTCOMES = (*JUDGED, UNJUDGED)
Z = 1.959963984540054  # of 95 %
MAX_CHARS = 4000

SaysSame = Callable[[str, str], Awaitable[bool | None]]


async def outcome(given: str, fresh: str, says_same: SaysSame | None) -> str:
    """Returns how the answer that would have been given compares with the model's own."""
    given, fresh = " ".join(given.split()), " ".join(fresh.split())
    if given == fresh:
        return SAME
    if says_same is None:
        return DIFFERENT
    if max(len(given), len(fresh)) > MAX_CHARS:
        return UNJUDGED
    return {True: CLOSE, False: DIFFERENT, None: UNJUDGED}[await says_same(given, fresh)]


def wilson(events: int, trials: int) -> tuple[float, float]:
    """Returns Wilson's interval (1927) of a share, 95 %; from 0 to 1 where nothing was tried."""
    if not trials:
        return 0.0, 1.0
    share, z2 = events / trials, Z * Z
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    reach = Z * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials)) / (1 + z2 / trials)
    low = 0.0 if events == 0 else max(0.0, middle - reach)
    return low, 1.0 if events == trials else min(1.0, middle + reach)


class LookUp(NamedTuple):
    """What the cache knows of a request. answer: None for a miss. vector: of its question, if it was made."""

    asked: AskedKey
    answer: KeptAnswer | None = None
    kind: str = EQUAL
    vector: Vector | None = None


class ResponseCache:
    """connections: for the embedder. likeness_s: how long it takes at the most to find a like question. Raises
    `ConfigError` for a store that cannot be."""

    def __init__(
        self, config: GatewayConfig, connections: UpstreamConnections, embedder_key: str | None = None
    ) -> None:
        self.config = config.cache
        self._routes = {route.model: route for route in config.cache_route}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")
        self.store = _store(config)
        self._questions = QuestionIndex(config.cache.max_questions)
        embedder, verifier = config.embedder, config.verifier
        self._embedder = None if embedder is None else Embedder(embedder, config.breaker, embedder_key, connections)
        self.verifier = None if verifier is None else Verifier(verifier, config.breaker)
        self.flights: dict[str, Flight] = {}
        self.results: Counter[tuple[str, str]] = Counter()  # result and why
        self.shadowed: Counter[tuple[str, str]] = Counter()  # kind and outcome
        self.wrong: Counter[str] = Counter()  # by kind
        self.num_errors = self._num_waiting = 0
        self._purged_ns: dict[str | None, int] = {}  # by tenant; None: everybody's
        self._purging: tuple[Purge, ...] = ()  # what they take is not given, though it may still be there
        self.likeness_s = sum(one.timeout_s for one in (config.embedder, config.verifier) if one is not None)
        self._draw = random.Random()
        self._comparing: set[asyncio.Task[None]] = set()
        if self._embedder is not None and any(route.semantic for route in config.cache_route):
            self._thread.submit(self._index_all, self._embedder.name)

    def route(self, model: str) -> CacheRoute | None:
        return self._routes.get(model)

    # ---- finding

    async def look_up(self, request: ForwardedRequest, tenant: str, route: CacheRoute, wishes: Wishes) -> LookUp:
        """Returns the answer of an equal request, if there is one that is fresh enough."""
        return await self._in_thread(partial(self._look_up, request, tenant, route, wishes))

    async def look_alike(self, found: LookUp, route: CacheRoute, wishes: Wishes, room: SpareRoom) -> LookUp:
        """Returns the answer of a like question, if the route has such hits, one is near and the verifier agrees."""
        if not (route.semantic and found.asked.question) or self._embedder is None or self.verifier is None:
            return found
        vector = await self._embedder.embed(found.asked.question)
        if vector is None:
            return found
        found = found._replace(vector=vector)
        near: KeptAnswer | None = await self._in_thread(partial(self._nearest, found, route, wishes))
        if near is None or not await self.verifier.has_same_answer(near.question, found.asked.question, room):
            return found
        # The verdict took a while, in which it may have been taken out.
        still: KeptAnswer | None = await self._in_thread(partial(self._fresh, near.key, route, wishes))
        return found if still is None else found._replace(answer=still, kind=LIKE)

    def is_shadowed(self, route: CacheRoute) -> bool:
        """Returns whether the model runs for this hit all the same, by chance."""
        return self._draw.random() < route.shadow_share

    def _look_up(self, request: ForwardedRequest, tenant: str, route: CacheRoute, wishes: Wishes) -> LookUp:
        asked = asked_key(request, tenant, takes_sampled=route.sampled)
        answer = None if asked.why_not or wishes.no_cache else self._fresh(asked.key, route, wishes)
        return LookUp(asked, answer)

    def _nearest(self, found: LookUp, route: CacheRoute, wishes: Wishes) -> KeptAnswer | None:
        """Returns the answer to the nearest question of those that are near enough and may be given."""
        assert found.vector is not None
        keys = self._questions.near(self._likeness(found.asked), found.vector, route.threshold)
        return next((answer for key in keys if (answer := self._fresh(key, route, wishes)) is not None), None)

    def _fresh(self, key: str, route: CacheRoute, wishes: Wishes) -> KeptAnswer | None:
        try:
            answer = self.store.get(key)
        except STORE_ERRORS:
            self.num_errors += 1
            return None
        if answer is None:
            self._questions.discard(key)
            return None
        if any(which.takes(answer) for which in self._purging):
            return None
        most_s = route.max_age_s if wishes.max_age_s is None else min(route.max_age_s, wishes.max_age_s)
        return answer if answer.age_s(time.time()) <= most_s else None

    def _likeness(self, asked: AskedKey) -> str:
        assert self._embedder is not None
        return f"{self._embedder.name} {asked.likeness}"

    # ---- keeping

    def keep(self, flight: Flight, found: LookUp, request: ForwardedRequest, tenant: str) -> asyncio.Future[Any] | None:
        """Keep a whole answer, if it may be and the thread keeps up; the future is done when others find it."""
        route = self.route(request.model)
        purged_ns = max(self._purged_ns.get(None, 0), self._purged_ns.get(tenant, 0))
        if route is None or self._num_waiting >= MAX_WAITING or flight.begun_ns <= purged_ns:
            return None
        self._num_waiting += 1
        work = self._in_thread(partial(self._keep, flight, found, request, tenant, route))
        task = asyncio.ensure_future(work)
        task.add_done_callback(self._note_kept)
        return task

    def _note_kept(self, task: asyncio.Future[Any]) -> None:
        self._num_waiting -= 1
        self.num_errors += int(not task.cancelled() and task.exception() is not None)

    def _keep(self, flight: Flight, found: LookUp, request: ForwardedRequest, tenant: str, route: CacheRoute) -> None:
        answer = self._made(flight, found, request, tenant)
        if answer is None:
            return
        for key in self.store.put(answer, route.max_age_s):
            self._questions.discard(key)
        self._index(answer)

    def _made(self, flight: Flight, found: LookUp, request: ForwardedRequest, tenant: str) -> KeptAnswer | None:
        mark, headers = new_mark(), dict(flight.headers)
        pieces = pieces_of(flight.raw, request.is_stream, mark)
        if pieces is None:
            return None
        is_semantic = found.vector is not None
        return KeptAnswer(
            key=found.asked.key,
            tenant=tenant,
            model=request.model,
            created_unix_s=time.time(),
            is_stream=request.is_stream,
            content_type=headers[b"content-type"].decode("latin-1"),
            pieces=pieces,
            mark=mark,
            likeness=self._likeness(found.asked) if is_semantic else "",
            question=found.asked.question if is_semantic else "",
            vector=b"" if found.vector is None else found.vector.tobytes(),
        )

    def _index_all(self, embedder: str) -> None:
        for answer in self.store.each():
            if answer.likeness.startswith(f"{embedder} "):
                self._index(answer)

    def _index(self, answer: KeptAnswer) -> None:
        if answer.vector:
            self._questions.add(answer.key, answer.likeness, np.frombuffer(answer.vector, dtype=np.float32))

    # ---- shadows

    def compare(self, flight: Flight, request: ForwardedRequest, hit: LookUp, room: SpareRoom) -> None:
        """Compare the model's answer with the one that would have been given, when both are there."""
        task = asyncio.get_running_loop().create_task(self._compare(flight, request, hit, room))
        self._comparing.add(task)
        task.add_done_callback(self._comparing.discard)

    async def _compare(self, flight: Flight, request: ForwardedRequest, hit: LookUp, room: SpareRoom) -> None:
        pieces = await self._in_thread(partial(pieces_of, flight.raw, request.is_stream, ""))
        if pieces is not None and hit.answer is not None:
            given, fresh = hit.answer.pieces, pieces
            one, other = await self._in_thread(lambda: (text_of(given), text_of(fresh)))
            says_same = None if self.verifier is None else partial(self.verifier.says_same, room=room)
            self.shadowed[hit.kind, await outcome(one, other, says_same)] += 1

    # ---- taking out

    async def purge(self, which: Purge) -> int:
        """Take answers out, and what is under way now is not kept; returns how many there were. They go by parts, and
        look-ups come between these; none finds what is to go."""
        self._purged_ns[which.tenant] = time.monotonic_ns()
        self._purging += (which,)
        parts, count = self.store.purge(which), 0
        try:
            while (gone := await self._in_thread(partial(self._purge_part, parts))) is not None:
                count += gone
        finally:
            others = list(self._purging)
            others.remove(which)
            self._purging = tuple(others)
        return count

    async def begun_unix_s(self) -> float | None:
        """Returns since when the store keeps what it was given; None where that is not known."""
        try:
            return await self._in_thread(self.store.begun_unix_s)  # type: ignore[no-any-return]
        except STORE_ERRORS:
            self.num_errors += 1
            return None

    def _purge_part(self, parts: Iterator[list[str]]) -> int | None:
        """Returns how many went; None when there are no more parts."""
        gone = next(parts, None)
        for key in gone or ():
            self._questions.discard(key)
        return None if gone is None else len(gone)

    # ---- what it knows of itself

    def false_hits(self, kind: str) -> tuple[int, int]:
        """Returns how many of the shadowed hits were different, and how many were judged."""
        counts = [self.shadowed[kind, one] for one in JUDGED]
        return self.shadowed[kind, DIFFERENT], sum(counts)

    @property
    def num_questions(self) -> int:
        return len(self._questions)

    def stats(self) -> dict[str, Any]:
        results: Counter[str] = Counter()
        for (result, _), count in self.results.items():
            results[result] += count
        return {
            "answers": self.store.num_answers,
            "bytes": self.store.num_bytes,
            "questions": self.num_questions,
            "under_way": len(self.flights),
            "results": dict(results),
            "wrong": dict(self.wrong),
            "errors": self.num_errors,
            "verdicts": {} if self.verifier is None else dict(self.verifier.counts),
            "shadow": {kind: self._shadow_stats(kind) for kind in KINDS},
        }

    def _shadow_stats(self, kind: str) -> dict[str, Any]:
        false, trials = self.false_hits(kind)
        rate = false / trials if trials else None
        counts = {one: self.shadowed[kind, one] for one in OUTCOMES}
        return {**counts, "false_hit_rate": rate, "interval_95": wilson(false, trials)}

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        for task in self._comparing:
            task.cancel()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.store.close()


def _store(config: GatewayConfig) -> AnswerStore:
    if config.cache.valkey is not None:
        from splittime.gateway.cache.stores import ValkeyAnswers

        return ValkeyAnswers(config.cache.valkey)
    return SqliteAnswers(config.cache.file, config.cache.max_bytes)
