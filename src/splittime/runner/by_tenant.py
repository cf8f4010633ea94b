"""What is learnt of each tenant's texts, apart from the others'.

How fast tokens come shows how many drafts are made, and which are right. A number that is learnt from one tenant's
texts and decides about another's drafts would tell of those texts, to whoever measures his own answers. So what is
learnt of texts and outlives a request belongs to a tenant (the request's `cache_salt`).
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from splittime.runner.speculative import MOST_TENANTS

Learnt = TypeVar("Learnt")


class ByTenant(Generic[Learnt]):
    """make: what is believed of a tenant of whom nothing is known. most: tenants who are remembered, those who asked
    last."""

    def __init__(self, make: Callable[[], Learnt], most: int = MOST_TENANTS) -> None:
        self._make, self._most = make, most
        self._learnt: OrderedDict[str, Learnt] = OrderedDict()

    def of(self, salt: str) -> Learnt:
        """Returns what is learnt of this tenant, who asks now; one who was forgotten begins anew."""
        found = self._learnt.get(salt)
        if found is None:
            found = self._learnt[salt] = self._make()
        self._learnt.move_to_end(salt)
        if len(self._learnt) > self._most:
            self._learnt.popitem(last=False)
        return found
