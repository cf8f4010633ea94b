"""`POST /v1/prefill`: a prompt that will come is computed ahead, so that the one who comes finds it in the cache.

What may be sent is what decides a prompt: a text or token ids, or messages with the tools and the variables of their
template. What came of it the answer says when it is done.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from splittime.api import schema
from splittime.api.answer import WholeRenderer
from splittime.api.answer_structs import AnyAnswer
from splittime.api.choice import Choice
from splittime.api.limits import BodyLimits, ModelInfo
from splittime.api.params import Ask, ask_of
from splittime.core.errors import RequestError
from splittime.core.sampling import AHEAD, SamplingParams
from splittime.ledger.account import PREFILL
from splittime.text.answer_marks import AnswerMarks


class PrefillBody(schema.Strict, kw_only=True):
    prompt: Annotated[str | list[int] | None, Meta(description="A text or token ids. This, or messages.")] = None
    messages: Annotated[list[schema.Message], Meta(min_length=1)] | None = None
    tools: Annotated[list[schema.ToolGiven] | None, Meta(description="Functions, as the prompt will name them.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description=schema.OPENS_ANSWER)] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description=schema.TEMPLATE_VARIABLES)] = None
    model: Annotated[str | None, Meta(description="A name from /v1/models; default: the model served.")] = None
    cache_salt: Annotated[schema.Label | None, Meta(description="Cached prefixes are shared within one salt.")] = None


class PrefillAnswer(AnyAnswer, kw_only=True):
    """cached_tokens: of the prompt's, those that were there before."""

    object: Literal["prefill"] = "prefill"
    prompt_tokens: int
    cached_tokens: int


def prefill_ask(
    body: PrefillBody, model: ModelInfo, limits: BodyLimits, include_timing: bool, marks: AnswerMarks
) -> Ask:
    """include_timing: a header asks for it. marks: of the model's chats. Raises `RequestError`."""
    like = ask_of(_generation(body), model, limits, include_timing, marks)
    sampling = SamplingParams(pooling=AHEAD, max_tokens=0, seed=0)
    return replace(like, endpoint=PREFILL, sampling=sampling, tool_use=None, reasoning=None)


def _generation(body: PrefillBody) -> schema.ChatBody | schema.CompletionBody:
    """Returns what would be asked with this prompt."""
    if (body.prompt is None) == (body.messages is None):
        words = "a prefill needs a prompt or messages" + ("" if body.prompt is None else ", not both")
        raise RequestError(words, param="prompt", value=None)
    if body.messages is not None:
        return schema.ChatBody(
            messages=body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            chat_template_kwargs=body.chat_template_kwargs,
            model=body.model,
            cache_salt=body.cache_salt,
        )
    for name in ("tools", "add_generation_prompt", "chat_template_kwargs"):
        if getattr(body, name) is not None:
            raise RequestError(f"{name} goes with messages", param=name, value=None, hint="leave it out")
    prompt = body.prompt or ""
    return schema.CompletionBody(
        prompt=prompt if isinstance(prompt, str) else [*prompt], model=body.model, cache_salt=body.cache_salt
    )


class PrefillRenderer(WholeRenderer):
    def _answer(self, choices: Sequence[Choice], **head: Any) -> PrefillAnswer:
        (choice,) = choices
        num_tokens = len(choice.request.prompt_token_ids)
        return PrefillAnswer(prompt_tokens=num_tokens, cached_tokens=choice.cached_tokens, **head)
