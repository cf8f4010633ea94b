"""Makes the scheduler's outputs: a request's progress, its end, its errors. It decides nothing."""

from splittime.core.errors import DeadlineExceeded, EngineError, ErrorInfo, RequestError
from splittime.core.request import FinishReason
from splittime.core.step import RowResult, TokenLogprob
from splittime.scheduler.events import RequestOutput
from splittime.scheduler.state import RequestState

Logprobs = tuple[TokenLogprob, ...]


def progress_output(
    state: RequestState, token_ids: tuple[int, ...], logprobs: Logprobs, prompt_logprobs: Logprobs
) -> RequestOutput:
    """The request goes on: its new tokens, its new marks, and what it found in the prefix cache."""
    return RequestOutput(
        request_id=state.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        marks=state.new_marks(),
        num_cached_tokens=state.num_cached_tokens,
        num_host_tokens=state.num_host_tokens,
        num_preemptions=state.num_preemptions,
    )


def end_output(
    state: RequestState,
    reason: FinishReason,
    now_ns: int,
    error: ErrorInfo | None,
    token_ids: tuple[int, ...],
    logprobs: Logprobs,
    prompt_logprobs: Logprobs,
) -> RequestOutput:
    """The terminal event; its blocks are free, its account is closed."""
    return RequestOutput(
        request_id=state.request_id,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        marks=state.new_marks(),
        finish_reason=reason,
        error=error,
        num_cached_tokens=state.num_cached_tokens,
        num_host_tokens=state.num_host_tokens,
        num_preemptions=state.num_preemptions,
        freed_ns=now_ns,
        stop_token_id=token_ids[-1] if reason is FinishReason.STOP else None,
    )


def row_error(row_result: RowResult) -> ErrorInfo:
    return EngineError(f"request {row_result.request_id} failed: {row_result.error}", code="row_failed").info


def deadline_error(state: RequestState, late_ns: int) -> ErrorInfo:
    where = "while it ran" if state.is_known_to_runner else "while it waited"
    return DeadlineExceeded(
        f"the request's deadline passed {where} (noticed {late_ns / 1e6:.1f} ms later)",
        hint="ask for fewer tokens, allow more time (X-Request-Deadline-Ms), or retry when the server is less busy",
    ).info


def check_prompt_length(num_prompt: int, max_model_len: int) -> None:
    """Raise RequestError for an empty prompt, and for one that leaves no room for a token of output."""
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens", param="prompt", value=0, limit=1)
    if num_prompt >= max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; the model takes at most {max_model_len - 1} and one of output",
            code="context_length_exceeded",
            param="prompt",
            value=num_prompt,
            limit=max_model_len - 1,
        )
