"""`truncate_prompt_tokens`: how much of a prompt is kept, of what a client would have cut."""

from typing import Annotated

from msgspec import Meta

from splittime.api.limits import ModelInfo
from splittime.core.errors import RequestError

CUT = (
    "So many last tokens of each prompt are kept, its special ones among them; -1: as many as there is room for. "
    "A notice says how much was cut."
)
FIELD = "truncate_prompt_tokens"
KeepLast = Annotated[int | None, Meta(description=CUT)]


def keep_last(asked: int | None, model: ModelInfo, max_tokens: int) -> int | None:
    """Returns how many last tokens of a prompt are kept; None for all. max_tokens: that are to have room behind it.
    Raises `RequestError` for a number that makes no sense."""
    if asked is None:
        return None
    most = model.max_model_len
    if asked != -1 and not 1 <= asked <= most:
        words = f"{FIELD} is {asked}, and can be 1 to {most}, or -1"
        raise RequestError(words, param=FIELD, value=str(asked), limit=[-1, most])
    if asked == -1 and max_tokens >= most:
        words, hint = (
            f"{FIELD} is -1, and max_tokens {max_tokens} leaves a prompt no room",
            f"ask for at most {most - 1}",
        )
        raise RequestError(words, param=FIELD, value=asked, limit=most, hint=hint)
    return most - max_tokens if asked == -1 else asked
