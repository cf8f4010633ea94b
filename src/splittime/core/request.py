"""A request: one generation asked of the engine. This is what was *asked*, a frozen value.

What has become of it since (computed tokens, blocks, account) is `scheduler.state.RequestState`, which the scheduler
alone owns. A request ends in exactly one terminal event, which carries its `FinishReason`.
"""

from enum import StrEnum

import msgspec

from splittime.core.sampling import SamplingParams


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-sequence id, a stop id or a stop string; an embedding: its prompt is computed
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the client asked, or went away
    DEADLINE = "deadline"  # the request's own deadline passed
    ERROR = "error"  # the request could not be carried out; `RequestOutput.error` says why


class Request(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One generation. Times are `time.monotonic_ns()` of this host.

    prompt_token_ids: at least one token.
    sampling: already validated; `seed` and `max_tokens` are set (not None).
    eos_token_ids: ids that end the request unless `sampling.ignore_eos`.
    submitted_ns: when the client handed it to the engine; the `handoff` stage begins here.
    priority: lower goes first (as in vLLM); used by the `priority` policy.
    deadline_ns: absolute, or None. Passing it while queued or running ends the request with `DEADLINE`.
    cache_salt: requests share cached prefixes only with the same salt.
    adapter: the id of the adapter that computes it (`adapter_id`); "": the model alone. Requests share cached prefixes
        only with the same one.
    tenant: the key that asks, and the weight of its share beside the others' (`core.shares`).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    submitted_ns: int
    priority: int = 0
    deadline_ns: int | None = None
    cache_salt: str = ""
    adapter: str = ""
    tenant: str = ""
    weight: float = 1.0


def adapter_id(name: str, number: int) -> str:
    """Returns what no other adapter is called, also of that name. number: of its load, of all that there were. A name
    has no #."""
    return f"{name}#{number}"


def adapter_name(adapter_id: str) -> str:
    return adapter_id.rpartition("#")[0]
