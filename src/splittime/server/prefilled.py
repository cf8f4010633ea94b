"""Which prompts were computed ahead, and what it saved those who came with them."""

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from splittime.core.errors import Refused
from splittime.core.request import FinishReason, Request
from splittime.ledger.account import PREFILL, ClosedAccount
from splittime.ledger.stages import Stage

MOST_OPEN, MOST_KEPT = 8, 16  # of a tenant


class KeptPrompt(NamedTuple):
    """A prompt of which the tokens from `begin` on were computed ahead, in so many ns; those before were in the cache.
    until_ns: when it is forgotten."""

    salt: str
    token_ids: tuple[int, ...]
    begin: int
    took_ns: int
    until_ns: int


class Prefilled:
    """kept_ns: how long a prompt is remembered. Tenants are those of the server's keys."""

    def __init__(self, kept_ns: int) -> None:
        self._kept_ns = kept_ns
        self._open: Counter[str] = Counter()
        self._kept: dict[str, deque[KeptPrompt]] = {}

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
        kept = self._kept.setdefault(account.tenant, deque(maxlen=MOST_KEPT))
        while kept and kept[0].until_ns < account.end_ns:
            kept.popleft()
        if account.endpoint == PREFILL:
            if account.finish_reason == FinishReason.STOP:
                kept.append(self._remembered(account, request))
            return account
        saved, best = max(((_saved(one, account, request), one) for one in kept), default=(0, None))
        if best is None or saved <= 0:
            return account
        kept.remove(best)
        saved_ns = best.took_ns * saved // (len(best.token_ids) - best.begin)
        return msgspec.structs.replace(account, ahead_tokens=saved, ahead_ns=saved_ns)

    def _remembered(self, account: ClosedAccount, request: Request) -> KeptPrompt:
        took_ns = sum(each.duration_ns for each in account.intervals if each.stage in (Stage.PREFILL, Stage.RECOMPUTE))
        until_ns = account.end_ns + self._kept_ns
        return KeptPrompt(request.cache_salt, request.prompt_token_ids, account.cached_tokens, took_ns, until_ns)


def _saved(kept: KeptPrompt, account: ClosedAccount, request: Request) -> int:
    """Returns how many of the tokens that this request found in the cache were computed ahead with that prompt."""
    if request.adapter or kept.salt != request.cache_salt or account.cached_tokens <= kept.begin:
        return 0
    return min(_num_common(kept.token_ids, request.prompt_token_ids), account.cached_tokens) - kept.begin


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many tokens two texts have in common at their beginnings, in slices that are compared whole."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
