"""Which prompts were computed ahead, and what it saved those who came with them."""

from array import array
from bisect import bisect_left
from collections import Counter, deque
from typing import NamedTuple

import msgspec

from splittime.core.errors import Refused
from splittime.core.request import FinishReason, Request
from splittime.ledger.account import PREFILL, ClosedAccount
from splittime.ledger.stages import Stage

MOST_OPEN, MOST_KEPT = 8, 16  # of a tenant
CHUNK_TOKENS = 16  # prompts are compared in pieces of so many


class KeptPrompt(NamedTuple):
    """A prompt of which the tokens from `begin` on were computed ahead, in so many ns; those before were in the cache.
    hashes: see `chunk_hashes`. until_ns: when it is forgotten."""

    salt: str
    hashes: "array[int]"
    begin: int
    num_tokens: int
    took_ns: int
    until_ns: int


class Prefilled:
    """kept_ns: how long a prompt is remembered. Tenants are those of the server's keys."""

    def __init__(self, kept_ns: int) -> None:
        self._kept_ns = kept_ns
        self._open: Counter[str] = Counter()
        self._kept: dict[str, deque[KeptPrompt]] = {}  # only of tenants who have some
        self._until: deque[tuple[int, str]] = deque()  # when a prompt of which tenant is to be forgotten

    def enter(self, tenant: str) -> None:
        """Raises `Refused` if this tenant has as many prefills under way as it may have."""
        if self._open[tenant] >= MOST_OPEN:
            words = f"{MOST_OPEN} prompts of this key are being computed ahead"
            raise Refused(words, reason="open_prefills", queued=self._open[tenant], limit=MOST_OPEN, retry_after_s=1.0)
        self._open[tenant] += 1

    def leave(self, tenant: str) -> None:
        self._open[tenant] -= 1

    def with_savings(self, account: ClosedAccount, request: Request) -> ClosedAccount:
        """Returns the account of a request that has ended, with what a prefill saved it. That of a prefill is
        remembered, until somebody has come with its prompt."""
        self._forget_old(account.end_ns)
        if account.endpoint == PREFILL:
            if account.finish_reason == FinishReason.STOP:
                self._keep(account, request)
            return account
        kept = self._kept.get(account.tenant)
        if not kept or request.adapter or not account.cached_tokens:
            return account
        hashes = chunk_hashes(request.prompt_token_ids[: account.cached_tokens])
        saved, best = max(((_saved(one, hashes, request.cache_salt), one) for one in kept), key=lambda found: found[0])
        if saved <= 0:
            return account
        kept.remove(best)
        saved_ns = best.took_ns * saved // (best.num_tokens - best.begin)
        return msgspec.structs.replace(account, ahead_tokens=saved, ahead_ns=saved_ns)

    def _keep(self, account: ClosedAccount, request: Request) -> None:
        took_ns = sum(each.duration_ns for each in account.intervals if each.stage in (Stage.PREFILL, Stage.RECOMPUTE))
        until_ns, token_ids = account.end_ns + self._kept_ns, request.prompt_token_ids
        sizes = account.cached_tokens, len(token_ids)
        made = KeptPrompt(request.cache_salt, chunk_hashes(token_ids), *sizes, took_ns, until_ns)
        self._kept.setdefault(account.tenant, deque(maxlen=MOST_KEPT)).append(made)
        self._until.append((until_ns, account.tenant))

    def _forget_old(self, now_ns: int) -> None:
        while self._until and self._until[0][0] < now_ns:
            _, tenant = self._until.popleft()
            kept = self._kept.get(tenant, deque())
            while kept and kept[0].until_ns < now_ns:
                kept.popleft()
            if not kept:
                self._kept.pop(tenant, None)


def chunk_hashes(token_ids: tuple[int, ...]) -> "array[int]":
    """Returns for each end of a whole chunk a hash of all tokens before it."""
    hashes, before = array("q"), 0
    for begin in range(0, len(token_ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        before = hash((before, token_ids[begin : begin + CHUNK_TOKENS]))
        hashes.append(before)
    return hashes


def _saved(kept: KeptPrompt, hashes: "array[int]", salt: str) -> int:
    """Returns how many tokens were computed ahead with that prompt, of those that a request found in the cache: whole
    chunks, whose hashes these are."""
    if kept.salt != salt:
        return 0
    most = min(len(kept.hashes), len(hashes))
    num_common = bisect_left(range(most), True, key=lambda place: kept.hashes[place] != hashes[place])
    return num_common * CHUNK_TOKENS - kept.begin
