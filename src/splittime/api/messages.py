"""Anthropic's Messages API as an adapter: a body becomes that of a chat (a chat's answer becomes a message in
`message_answers`).

A turn's blocks are a chat's messages: results of tools are messages of their own, calls and thinking are fields of the
assistant's. A last turn of the assistant's is continued, as the API promises.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from splittime.api.lenient import Ignored
from splittime.api.schema import CacheControl, Label, Strict, hint, no_effect
from splittime.core.errors import RequestError

VERSIONS = ("2023-06-01", "2026-10-21")  # the latter took temperature, top_p and top_k away; they are honoured here

EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "xhigh"}
CUSTOM = (None, "custom")
ONLY_CUSTOM = "offer it as a tool with a name and an input_schema, which your program carries out"
BUDGET = (
    "Most tokens of thinking: behind them it is closed, and the answer goes on. Without effect where there can be no "
    "bound: a model that does not reason, or whose end of reasoning is no token, and gpt-oss where it may call tools."
)


class MessagesBlock(Strict, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl = None
    citations: Annotated[Any, no_effect("of an earlier answer, whose text has been read.")] = None

    def to_chat(self) -> dict[str, str]:
        return {"type": "text", "text": self.text}


class ToolUseBlock(Strict, kw_only=True, tag_field="type", tag="tool_use"):
    """A call, of an answer."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl = None

    def to_chat(self) -> dict[str, Any]:
        arguments = msgspec.json.encode(self.input).decode()
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


class ToolResultBlock(Strict, kw_only=True, tag_field="type", tag="tool_result"):
    """What a call came to."""

    tool_use_id: str
    content: str | list[MessagesBlock] | None = None
    is_error: Annotated[bool | None, no_effect("the text says it.")] = None
    cache_control: CacheControl = None

    def to_chat(self) -> dict[str, Any]:
        content = _content("" if self.content is None else self.content)
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


class ThinkingBlock(Strict, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning, of an answer."""

    thinking: str
    signature: Annotated[str | None, no_effect("reasoning is not signed.")] = None


class RedactedThinkingBlock(Strict, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: Annotated[str | None, no_effect("only who encrypted it can read it.")] = None


class MessagesTurn(Strict, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[MessagesBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock]

    def to_chat(self) -> list[dict[str, Any]]:
        """Returns the turn's messages: each result of a tool is one, what is left another."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results = [block.to_chat() for block in self.content if isinstance(block, ToolResultBlock)]
        texts = [block for block in self.content if isinstance(block, MessagesBlock)]
        calls = [block.to_chat() for block in self.content if isinstance(block, ToolUseBlock)]
        thoughts = [block.thinking for block in self.content if isinstance(block, ThinkingBlock)]
        said: dict[str, Any] = {"role": self.role, "content": _content(texts)}
        if calls:
            said["tool_calls"] = calls
        if thoughts:
            said["reasoning_content"] = "\n".join(thoughts)
        return [*results, said] if texts or calls or thoughts or not results else results


class MessagesTool(Strict, kw_only=True):
    """type: one that is not custom is a tool that nobody here runs, which is offered to no model."""

    name: str
    input_schema: Annotated[dict[str, Any] | None, Meta(description="A JSON schema.")] = None
    type: str | None = None
    description: str | None = None
    strict: Annotated[bool | None, Meta(description="Chosen calls are held to the schema too.")] = None
    cache_control: CacheControl = None

    def to_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": {**function, "strict": self.strict}}


class ChosenTool(Strict, kw_only=True):
    """auto, any or none of the tools, or the one of this name."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Annotated[bool | None, Meta(description="true: at most one call.")] = None

    def to_chat(self) -> dict[str, Any]:
        named = {"type": "function", "function": {"name": self.name or ""}}
        choice = {"any": "required", "tool": named}.get(self.type, self.type)
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


class Thinking(Strict, kw_only=True):
    """Whether the model is to reason, where its chat template can tell it (`enable_thinking`), and how much. adaptive:
    as the template has it."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Annotated[int, Meta(ge=0, le=2**31 - 1)] | None, Meta(description=BUDGET)] = None

    def to_chat(self) -> dict[str, Any]:
        is_on = self.type != "disabled"
        fields: dict[str, Any] = {"include_reasoning": is_on}
        if self.type != "adaptive":
            fields["chat_template_kwargs"] = {"enable_thinking": is_on}
        if is_on and self.budget_tokens is not None:
            fields["thinking_token_budget"] = self.budget_tokens
        return fields


class OutputForm(Strict, kw_only=True):
    type: Literal["json_schema"]
    schema: Annotated[dict[str, Any], Meta(description="A JSON schema.")]


class OutputConfig(Strict, kw_only=True):
    effort: Annotated[str | None, Meta(description="A variable of the chat template, for models that read it.")] = None
    format: Annotated[OutputForm | None, Meta(description="The answer is held to it.")] = None

    def to_chat(self) -> dict[str, Any]:
        fields: dict[str, Any] = {} if self.effort is None else {"reasoning_effort": EFFORTS.get(self.effort, "high")}
        if self.format is not None:
            form = {"name": "output", "schema": self.format.schema}
            fields["response_format"] = {"type": "json_schema", "json_schema": form}
        return fields


class CountTokensBody(Strict, kw_only=True):
    model: Annotated[str | None, Meta(description="A name from /v1/models; default: the model served.")] = None
    messages: Annotated[list[MessagesTurn], Meta(min_length=1)]
    system: str | list[MessagesBlock] | None = None
    tools: Annotated[list[MessagesTool] | None, Meta(description="That the model may call.")] = None
    tool_choice: ChosenTool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    context_management: Annotated[Any, hint("an input is never made shorter; send fewer messages")] = None

    def to_chat(self) -> dict[str, Any]:
        """Returns the fields of a chat's body that say what the model reads."""
        head = [] if self.system is None else [{"role": "system", "content": _content(self.system)}]
        turns = [message for turn in self.messages for message in turn.to_chat()]
        fields: dict[str, Any] = {"messages": [*head, *turns]}
        if self.model is not None:
            fields["model"] = self.model
        if turns[-1]["role"] == "assistant":
            fields["continue_final_message"] = True
        if tools := [tool.to_chat() for tool in self.tools or () if tool.type in CUSTOM]:
            fields["tools"] = tools
        for chosen in (self.tool_choice, self.thinking, self.output_config):
            fields |= {} if chosen is None else chosen.to_chat()
        return fields


class MessagesBody(CountTokensBody, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Annotated[dict[str, Any] | None, no_effect("labels of the client's.")] = None
    service_tier: Annotated[Label | None, no_effect("there is one tier.")] = None

    def to_chat(self) -> dict[str, Any]:
        """Returns a chat's body. A stream's chunks count tokens, since the first event tells those of the prompt."""
        names = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        if self.stream:
            fields["stream_options"] = {"continuous_usage_stats": True}
        return {**super().to_chat(), **fields}


def _content(given: str | Sequence[MessagesBlock]) -> Any:
    return given if isinstance(given, str) else [block.to_chat() for block in given]


def note_tools(body: CountTokensBody, ignored: Ignored | None) -> None:
    """Notes the tools that are left out. Raises `RequestError` for one that is asked for, or has no schema; without
    `ignored` for each."""
    chosen = None if body.tool_choice is None else body.tool_choice.name
    for index, tool in enumerate(body.tools or ()):
        at = f"tools[{index}]"
        if tool.type in CUSTOM:
            if tool.input_schema is None:
                raise RequestError(f"{at}.input_schema is missing", code="missing_field", param=f"{at}.input_schema")
        elif ignored is None or tool.name == chosen:
            said = f"{at} is of the type {tool.type!r}, which nobody here runs"
            raise RequestError(said, code="unsupported_field", param=f"{at}.type", value=tool.type, hint=ONLY_CUSTOM)
        else:
            ignored.add(f"tools[{index}]", "no tool of this type runs here, so that the model was offered none", "tool")


def chat_body(body: CountTokensBody) -> bytes:
    """Returns the chat's body that asks the same, as JSON: it is read as a client's own, with the same refusals."""
    return msgspec.json.encode(body.to_chat())
