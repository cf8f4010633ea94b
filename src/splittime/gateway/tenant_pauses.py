"""Pauses that an upstream asked for when it refused one tenant's request, and for whom they hold.

A 429 that tells no reason may be about the request: its size, its tenant's own part of something. So it pauses the
upstream for that tenant alone. When another tenant is refused there too before the pause is over, it is the upstream
that has too much to do, or the gateway's key that is used up, and the pause holds for all. A tenant whose every
upstream asked it for a pause is refused without asking them; the others are not.
"""

from collections.abc import Iterable

from splittime.core.errors import Refused
from splittime.gateway.upstreams import RETRY_AFTER_S, Router, told_of


class TenantPauses:
    """has_several: the gateway has tenants; one that has none pauses for all at once. Times are ns of one monotonic
    clock."""

    def __init__(self, *, has_several: bool) -> None:
        self._has_several = has_several
        self._until_ns: dict[str, dict[str, int]] = {}  # by tenant, by upstream: as many as the config has at most

    def holds_for_all(self, upstream: str, tenant: str, now_ns: int, until_ns: int) -> bool:
        """Take note of a pause. Returns whether it holds for all."""
        if not self._has_several:
            return True
        others = (paused for name, paused in self._until_ns.items() if name != tenant)
        is_for_all = any(paused.get(upstream, 0) > now_ns for paused in others)
        paused = self._until_ns.setdefault(tenant, {})
        paused[upstream] = max(until_ns, paused.get(upstream, 0))
        return is_for_all

    def held(self, tenant: str, now_ns: int) -> list[str]:
        """Returns the upstreams that are to be left alone by this tenant."""
        paused = self._until_ns.get(tenant)
        if not paused:
            return []
        for name in [name for name, until_ns in paused.items() if until_ns <= now_ns]:
            del paused[name]
        return list(paused)

    def require_one(self, router: Router, line: str, tenant: str, now_ns: int) -> None:
        """Raises `Refused` where every upstream of a line that may be asked is to be left alone by this tenant."""
        held = self.held(tenant, now_ns)
        allowed = [one.name for one in router.allowed(line, now_ns)] if held else []
        if allowed and set(allowed) <= set(held):
            after_s = max(RETRY_AFTER_S, self._least_s(tenant, allowed, now_ns))
            raise Refused(told_of(line, is_busy=True), reason="upstreams_busy", retry_after_s=after_s)

    def _least_s(self, tenant: str, names: Iterable[str], now_ns: int) -> float:
        paused = self._until_ns[tenant]
        return min(paused[name] - now_ns for name in names) / 1e9
