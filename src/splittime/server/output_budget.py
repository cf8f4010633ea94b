"""How many output tokens a request gets: those it asks for, within what its prompt leaves of the model's context."""

from collections.abc import Sequence

from splittime.core.errors import RequestError
from splittime.server.config import ModelInfo
from splittime.server.params import Ask


def output_budget(prompt_ids: Sequence[int], ask: Ask, model: ModelInfo, *, is_strict: bool = False) -> int:
    """Returns the output tokens that the request may get: those it asks for, but no more than the context has left.

    Raises `RequestError` if the prompt is empty or leaves no room; `is_strict`: also if less is left than is asked.
    """
    room = model.max_model_len - len(prompt_ids)
    wanted = ask.sampling.max_tokens
    if not prompt_ids:
        raise RequestError("the prompt has no tokens", code="empty_prompt", param="prompt", value=0)
    if room < 1 or (is_strict and room < (wanted or 1)):
        raise RequestError(
            f"the model's context is {model.max_model_len} tokens; the prompt has {len(prompt_ids)} and "
            f"{wanted or 1} were asked for",
            code="context_length_exceeded",
            param="messages" if ask.is_chat else "prompt" if room < 1 else "max_tokens",
            value=len(prompt_ids) + (wanted or 1),
            limit=model.max_model_len,
            hint=f"ask for at most {room} tokens" if room > 0 else "shorten the prompt",
        )
    return int(min(model.default_sampling.get("max_tokens", room) if wanted is None else wanted, room))


def clamp_notices(ask: Ask, budgets: Sequence[int], model: ModelInfo) -> list[str]:
    """Says that fewer output tokens are left than were asked for, if so."""
    wanted, least = ask.sampling.max_tokens, min(budgets)
    if wanted is None or least >= wanted:
        return []
    return [f"max_tokens {wanted} was clamped to {least}: the context has {model.max_model_len} tokens"]
