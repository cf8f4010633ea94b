"""Policies: who goes first among the waiting, and so, in reverse, who is preempted first among the running.

Each policy is one key function; lower goes first, ties go by arrival. Whatever the policy, a request that has waited
longer than the starvation bound goes before all that have not, the longest wait first, and keeps that rank while it
runs, so that it is not preempted at once for what the policy would have preferred.
"""

from collections.abc import Callable

from splittime.core.request import Request
from splittime.scheduler.state import Rank

POLICIES: dict[str, Callable[[Request], float]] = {
    "fcfs": lambda request: 0.0,
    "priority": lambda request: float(request.priority),
    "shortest_prefill": lambda request: float(len(request.prompt_token_ids)),
    "deadline": lambda request: float("inf") if request.deadline_ns is None else float(request.deadline_ns),
}


def rank(policy: str, request: Request, arrival: int) -> Rank:
    return (1, POLICIES[policy](request), arrival)


def overdue_rank(arrival: int) -> Rank:
    return (0, 0.0, arrival)


def is_overdue(rank: Rank) -> bool:
    return rank[0] == 0
