"""What comes back, as the structs that are written out; `/openapi.json` is made from them. A field that is unset is not
written. A stream's chunks are dicts in OpenAI's form (`answer.Renderer`)."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

TokenIds = Annotated[list[int], Meta(description="With return_token_ids.")]
Timing = Annotated[dict[str, Any], Meta(description="With X-Include-Timing: the account, in nanoseconds.")]
Notices = Annotated[list[str], Meta(description="What was changed to fit.")]
StopReason = Annotated[str, Meta(description="The stop string that ended it, if one did.")]
FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: Annotated[int, Meta(description="Of the completion, with the marks around the reasoning.")]


class TokenUsage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: (
        Annotated[CompletionTokensDetails, Meta(description="Of models that reason.")] | UnsetType
    ) = UNSET


class AnyChoice(Struct, kw_only=True):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET
    prompt_token_ids: TokenIds | UnsetType = UNSET
    timing: Timing | UnsetType = UNSET


class CompletionChoice(AnyChoice, kw_only=True):
    text: str


class AnyAnswer(Struct, kw_only=True):
    id: str
    created: int
    model: str
    timing: Timing | UnsetType = UNSET
    notices: Notices | UnsetType = UNSET


class Completion(AnyAnswer, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: TokenUsage


class CalledFunction(Struct, kw_only=True):
    name: str
    arguments: Annotated[str, Meta(description="JSON, unless the answer was cut in it.")]


class ToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: (
        Annotated[str, Meta(description="What a model that reasons wrote before its answer.")] | UnsetType
    ) = UNSET
    refusal: None = None
    tool_calls: Annotated[list[ToolCall], Meta(description="Where tools were called.")] | UnsetType = UNSET


class ChatChoice(AnyChoice, kw_only=True):
    message: AssistantMessage


class ChatCompletion(AnyAnswer, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: TokenUsage


class ModelCard(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["splittime"] = "splittime"
    max_model_len: int
    root: str
    parent: str | None = None


class Models(Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Text(Struct):
    prompt: str
