"""Looks at a share of the prompts that pass, in a thread beside the event loop, and keeps numbers and hashes alone.

Bounded: `MAX_WAITING` requests of at most `MAX_BODY_BYTES` wait, the rest of the share is skipped and counted;
`MAX_PREFIXES` beginnings are remembered, each as two hashes. A request's text is let go when it has been looked at.
"""

import hashlib
import logging
import random
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from splittime.gateway.config import LintConfig
from splittime.gateway.forwarded import BYTES_PER_TOKEN, ForwardedRequest
from splittime.gateway.lint.faults import KINDS, ChangingPrefix, changing_prefix, faults_of, texts_of
from splittime.ledger.account import ClosedAccount
from splittime.ledger.stages import Stage

log = logging.getLogger("splittime.gateway")

MAX_WAITING = 64
MAX_BODY_BYTES = 256 * 1024
MAX_PREFIXES = 1024


class ModelFaults:
    """What one model's prompts showed: requests looked at, their bytes, and by kind how many had it, in bytes too."""

    def __init__(self) -> None:
        self.requests = self.num_bytes = 0
        self.having: Counter[str] = Counter()
        self.wasted: Counter[str] = Counter()


class PromptLint:
    """`note` takes a request, `report` tells what was found."""

    def __init__(self, config: LintConfig) -> None:
        self._share = config.share
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lint")
        self._lock = Lock()
        self._salt = secrets.token_bytes(16)
        self._waiting = self.num_skipped = 0
        self._models: dict[str, ModelFaults] = {}
        self._prefixes: OrderedDict[bytes, bytes] = OrderedDict()

    def note(self, request: ForwardedRequest) -> None:
        """Take a request, if chance says so and there is room. model: one of the config's, so they are few."""
        if random.random() >= self._share:
            return
        with self._lock:
            if self._waiting >= MAX_WAITING or len(request.body) > MAX_BODY_BYTES:
                self.num_skipped += 1
                return
            self._waiting += 1
        self._thread.submit(self._look, request.model, request.body)

    def _look(self, model: str, body: bytes) -> None:
        try:
            self._count(model, body)
        except Exception as error:  # whatever it is: it is no fault of the request's, and its text is not logged
            log.error("lint could not look at a prompt: %s", type(error).__name__)
        finally:
            with self._lock:
                self._waiting -= 1

    def _count(self, model: str, body: bytes) -> None:
        texts = texts_of(body)
        found, prefix = faults_of(texts), changing_prefix(texts)
        if prefix is not None and self._has_changed(model, prefix):
            found["changing_prefix"] = len(prefix.rest.encode("utf-8", "surrogatepass"))
        with self._lock:
            of_model = self._models.setdefault(model, ModelFaults())
            of_model.requests += 1
            of_model.num_bytes += len(body)
            of_model.wasted += found
            of_model.having.update(found.keys())

    def _has_changed(self, model: str, prefix: ChangingPrefix) -> bool:
        """Returns whether this beginning went on otherwise the last time."""
        key, value = self._hash(f"{model}\0{prefix.before}"), self._hash(prefix.rest)
        last = self._prefixes.pop(key, None)
        self._prefixes[key] = value
        if len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)
        return last not in (None, value)

    def _hash(self, text: str) -> bytes:
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=self._salt, digest_size=16).digest()

    def report(self, accounts: Iterable[ClosedAccount]) -> dict[str, Any]:
        """Returns what was found by model. accounts: whose upstreams told what a token of a prompt takes."""
        ns_per_token = prefill_ns_per_token(accounts)
        with self._lock:
            models = {model: _model_report(found, ns_per_token) for model, found in self._models.items()}
            skipped = self.num_skipped
        return {"share": self._share, "skipped": skipped, "prefill_ns_per_token": ns_per_token, "models": models}

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def prefill_ns_per_token(accounts: Iterable[ClosedAccount]) -> float | None:
    """Returns what a token that no cache had took to be computed, by the accounts of upstreams; None if none told."""
    lasted_ns = tokens = 0
    for account in accounts:
        nested = [stage for attempt in account.attempts for stage in attempt.nested if stage.stage is Stage.PREFILL]
        if nested:
            lasted_ns += sum(stage.end_ns - stage.begin_ns for stage in nested)
            tokens += account.prompt_tokens - account.cached_tokens
    return lasted_ns / tokens if tokens > 0 else None


def _model_report(found: ModelFaults, ns_per_token: float | None) -> dict[str, Any]:
    faults = {
        kind: {
            "requests": found.having[kind],
            "tokens": found.wasted[kind] // BYTES_PER_TOKEN,
            "prefill_ms": None
            if ns_per_token is None
            else round(found.wasted[kind] // BYTES_PER_TOKEN * ns_per_token / 1e6, 3),
        }
        for kind in KINDS
        if found.having[kind]
    }
    return {"requests": found.requests, "tokens": found.num_bytes // BYTES_PER_TOKEN, "faults": faults}
