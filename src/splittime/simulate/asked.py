"""Requests that nobody has sent yet: what is asked when, made into what a simulated server takes.

The prompts' tokens are their own: two prompts share what their tokens share, as in a real cache.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.ledger.account import ClosedAccount, Mark
from splittime.ledger.stages import Stage
from splittime.simulate.replica import Approach
from splittime.simulate.trace import TracedRequest


class Asked(NamedTuple):
    """A request that arrives at `at_ns`. prompt: token ids. leaves_ns: when its client goes away, if it does."""

    at_ns: int
    prompt: tuple[int, ...]
    output_tokens: int
    leaves_ns: int | None = None
    tenant: str = ""
    priority: int = 0
    deadline_ns: int | None = None


def asked_requests(asked: Iterable[Asked], approach: Approach, max_model_len: int) -> Iterator[TracedRequest]:
    """Returns the requests in the order given. An answer ends where the context does."""
    for number, one in enumerate(asked):
        yield _traced(f"asked-{number}", one, approach, max_model_len)


def _traced(name: str, asked: Asked, approach: Approach, max_model_len: int) -> TracedRequest:
    prompt_tokens = len(asked.prompt)
    admitted_ns = asked.at_ns + approach.to_admission_ns + round(approach.per_prompt_token_ns * prompt_tokens)
    received_ns = admitted_ns + approach.to_engine_ns
    max_tokens = max(1, min(asked.output_tokens, max_model_len - prompt_tokens))
    request, account = _request(name, asked, max_tokens, admitted_ns), _account(name, asked, max_tokens)
    marks = (Mark(Stage.RECEIVE, None, asked.at_ns), Mark(Stage.ADMIT, None, admitted_ns))
    return TracedRequest(request, account, marks, received_ns, leaves_ns=asked.leaves_ns)


def _request(name: str, asked: Asked, max_tokens: int, admitted_ns: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=asked.prompt,
        sampling=SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True),
        submitted_ns=admitted_ns,
        priority=asked.priority,
        deadline_ns=asked.deadline_ns,
        cache_salt=asked.tenant,
        tenant=asked.tenant,
    )


def _account(name: str, asked: Asked, max_tokens: int) -> ClosedAccount:
    """Returns what the server would know of it when it came."""
    return ClosedAccount(
        request_id=name,
        group_id=name,
        model="",
        endpoint="",
        started_at_unix_ns=asked.at_ns,
        start_ns=asked.at_ns,
        end_ns=asked.at_ns,
        intervals=(),
        finish_reason="length",
        prompt_tokens=len(asked.prompt),
        max_tokens=max_tokens,
        priority=asked.priority,
        tenant=asked.tenant,
        cache_salt=asked.tenant,
    )
