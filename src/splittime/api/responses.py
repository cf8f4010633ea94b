"""OpenAI's Responses API as an adapter: a body becomes that of a chat (`ResponsesBody.to_chat`). What a chat's answer
becomes is in `response_answers`, what the input may hold is in `response_items`.

`Conversation` is one as it is kept: its items as they are listed, and the chat that they make. It never changes: what
goes on from it shares what it has, and costs what is new. Its input is listed in pages, the latest item first unless
asked otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import orjson
from msgspec import Meta

from splittime.api import schema as bodies
from splittime.api.decode import MAX_PARTS, convert_part
from splittime.api.lenient import Ignored
from splittime.api.response_items import (
    KINDS,
    ChatMessage,
    Item,
    ItemCall,
    ResponsesPart,
    chat_messages,
    instructed,
    refused,
    require_calls,
)
from splittime.core.errors import RequestError

MAX_METADATA = 16
ONLY_FUNCTIONS = "offer it as a function that your program carries out; there are no built-in tools"
CHAT_NAMES = (  # of a chat's fields, and what they are called here
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
)
SAME_NAMES = (
    *("model", "temperature", "top_p", "top_k", "seed", "stop", "presence_penalty", "frequency_penalty"),
    *("parallel_tool_calls", "chat_template_kwargs"),
)


class SchemaForm(ResponsesPart, kw_only=True, tag_field="type", tag="json_schema"):
    """A JSON value that a schema allows."""

    name: Annotated[str, Meta(description="A label of the client's.")]
    schema: Annotated[dict[str, Any], Meta(description="A JSON schema.")]
    description: Annotated[str | None, Meta(description="For the client; the model is told by the prompt.")] = None
    strict: Annotated[bool | None, Meta(description="The answer is held to the schema whatever this says.")] = None

    def to_chat(self) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": self.name, "schema": self.schema}}


class ResponsesText(ResponsesPart, kw_only=True):
    format: Annotated[
        bodies.TextFormat | bodies.JsonObjectFormat | SchemaForm | None, Meta(description="A form to hold to.")
    ] = None
    verbosity: Annotated[Any, bodies.hint("say in instructions how long an answer is to be", "medium")] = None


class OfferedFunction(bodies.FunctionTool, ResponsesPart, kw_only=True):
    """A function that the model may call. Its schema holds the calls of it, unless `strict` is false."""

    type: Literal["function"]
    namespace: Annotated[str | None, Meta(description="That it is of, which a call of it names.")] = None

    @property
    def is_strict(self) -> bool:
        return self.strict is not False

    def to_chat(self, name: str) -> dict[str, Any]:
        given = {"description": self.description, "parameters": self.parameters}
        told = {name: value for name, value in given.items() if value is not None}
        return {"type": "function", "function": {"name": name, "strict": self.is_strict, **told}}


Functions = Mapping[str, OfferedFunction]  # by the name that the model is told


class NamedFunction(ResponsesPart, kw_only=True):
    """This function is called."""

    type: Literal["function"]
    name: str


class ResponsesReasoning(ResponsesPart, kw_only=True):
    effort: Annotated[
        bodies.Effort | None, Meta(description="A variable of the chat template, for models that read it.")
    ] = None
    summary: Annotated[Any, bodies.hint("reasoning is told whole", "auto")] = None
    generate_summary: Annotated[Any, bodies.hint("reasoning is told whole", "auto")] = None


class ResponsesStreamOptions(ResponsesPart, kw_only=True):
    include_obfuscation: Annotated[bool | None, bodies.hint("events are not padded")] = None


class ResponsesBody(ResponsesPart, kw_only=True):
    model: Annotated[str | None, Meta(description="A name from /v1/models; default: the model served.")] = None
    input: Annotated[str | Annotated[list[dict[str, Any]], Meta(min_length=1)], Meta(description="A text, or items.")]
    instructions: Annotated[str | None, Meta(description="For the model, before all items; of this response only.")] = (
        None
    )
    previous_response_id: Annotated[str | None, Meta(description="Goes on from a stored response of this key.")] = None
    store: Annotated[bool | None, Meta(description="false: not kept; default: kept, if the server keeps any.")] = None
    metadata: Annotated[
        Annotated[
            dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
            Meta(max_length=MAX_METADATA),
        ]
        | None,
        Meta(description="Labels that the response carries."),
    ] = None
    max_output_tokens: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="Default: to the end of the context.")
    ] = None
    temperature: Annotated[float | None, Meta(description="0 is greedy.")] = None
    top_p: Annotated[float | None, Meta(description="Nucleus; 0 leaves the likeliest.")] = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    text: ResponsesText | None = None
    tools: Annotated[list[dict[str, Any]] | None, Meta(description="Functions that the model may call.")] = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: at most one.")] = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    user: Annotated[bodies.Label | None, bodies.no_effect("a label of the client's.")] = None
    safety_identifier: Annotated[bodies.Label | None, bodies.no_effect("a label of the client's.")] = None
    prompt_cache_key: Annotated[bodies.Label | None, bodies.no_effect("every prompt's prefix is looked up.")] = None
    prompt_cache_retention: Annotated[bodies.Label | None, bodies.no_effect("prefixes stay while there is room.")] = (
        None
    )
    service_tier: Annotated[bodies.Label | None, bodies.no_effect("there is one tier.")] = None
    background: Annotated[Literal[False] | None, refused("background")] = None
    include: Annotated[Any, bodies.hint("nothing is added to a response; /v1/chat/completions has logprobs")] = None
    reasoning: ResponsesReasoning | None = None
    truncation: Annotated[Any, bodies.hint("an input is never cut; send fewer items", "disabled")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description=bodies.TEMPLATE_VARIABLES)] = None
    seed: int | None = None
    stop: Annotated[str | list[str] | None, Meta(description="Cut from the text where first found.")] = None
    top_k: int | None = None
    top_logprobs: Annotated[Literal[0] | None, refused("top_logprobs")] = None
    client_metadata: Annotated[Any, bodies.no_effect("labels of the client's.")] = None
    max_tool_calls: Annotated[Any, bodies.hint("no tool is called here, so that none are counted")] = None
    conversation: Annotated[None, refused("conversation")] = None
    prompt: Annotated[None, refused("prompt")] = None
    context_management: Annotated[Any, bodies.hint("an input is never made shorter; send fewer items")] = None

    def to_chat(self, messages: Sequence[ChatMessage], functions: Functions) -> dict[str, Any]:
        """Returns a chat's body of these messages, those of earlier responses included. A stream counts its tokens at
        its end."""
        chat = {name: value for name in SAME_NAMES if (value := getattr(self, name)) is not None}
        chat["messages"] = [_flattened(message, functions) for message in instructed(messages, self.instructions)]
        if self.max_output_tokens is not None:
            chat["max_tokens"] = self.max_output_tokens
        if functions:
            chat["tools"] = [function.to_chat(name) for name, function in functions.items()]
        if self.tool_choice is not None:
            chat["tool_choice"] = _choice(self.tool_choice)
        if self.reasoning is not None and self.reasoning.effort is not None:
            chat["reasoning_effort"] = self.reasoning.effort
        if self.stream:
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        return chat | self._form()

    def _form(self) -> dict[str, Any]:
        asked = None if self.text is None else self.text.format
        if asked is None or isinstance(asked, bodies.TextFormat):
            return {}
        form = asked.to_chat() if isinstance(asked, SchemaForm) else {"type": "json_object"}
        return {"response_format": form}


def _flattened(message: ChatMessage, functions: Functions) -> ChatMessage:
    """Returns the message, its calls with the names that the model is told."""
    if not any("namespace" in call["function"] for call in message.get("tool_calls", ())):
        return message
    named = [
        {**call, "function": _as_offered(**call["function"], functions=functions)} for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": named}


def _as_offered(name: str, arguments: str, functions: Functions, namespace: str = "") -> dict[str, str]:
    is_it = not namespace or (name in functions and functions[name].namespace == namespace)
    return {"name": name if is_it else f"{namespace}__{name}", "arguments": arguments}


def _choice(asked: str | NamedFunction) -> Any:
    return asked if isinstance(asked, str) else {"type": "function", "function": {"name": asked.name}}


def functions_of(body: ResponsesBody, ignored: Ignored | None) -> Functions:
    """Returns the functions of a body's tools, those of namespaces among them: of these one whose name is taken has its
    namespace's before it. A tool of another type is left out, with a notice. Raises RequestError, which names it, where
    nothing may be ignored or a call is required."""
    found: dict[str, OfferedFunction] = {}
    for index, given in enumerate(body.tools or ()):
        each, inner = [(given, f"tools[{index}]")], given.get("tools")
        if given.get("type") == "namespace" and isinstance(inner, list):
            space, parts = {"namespace": given.get("name")}, (one for one in inner if isinstance(one, dict))
            each = [({**one, **space}, f"tools[{index}].tools[{at}]") for at, one in enumerate(parts)]
        for one, at in each:
            if (function := _function(one, at, body.tool_choice, ignored)) is not None:
                is_told_apart = function.namespace and function.name in found
                name = f"{function.namespace}__{function.name}" if is_told_apart else function.name
                if name in found:
                    raise RequestError(f"{at}: there are two of the name {name!r}", param=at)
                found[name] = function
    return found


def _function(given: dict[str, Any], at: str, choice: Any, ignored: Ignored | None) -> OfferedFunction | None:
    named = given.get("type")
    if named is not None and named != "function":
        if ignored is not None and choice in (None, "auto", "none"):
            ignored.add(at, "no tool of this type runs here, so that the model was offered none", "tool")
            return None
        raise RequestError(
            f"{at} is of the type {named!r}, which is not supported",
            code="unsupported_field",
            param=f"{at}.type",
            value=named,
            limit=["function"],
            hint=ONLY_FUNCTIONS,
        )
    return convert_part(given, OfferedFunction, at, ignored)


def error(body: bytes) -> bytes:
    """Returns a chat's error with its fields called as they are here."""
    told = orjson.loads(body)
    found = told["error"]
    for name, here in CHAT_NAMES:
        if (found["param"] or "").startswith(name):
            found["param"] = here + found["param"].removeprefix(name)
            found["message"] = found["message"].replace(name, here, 1)
            break
    return orjson.dumps(told)


DESCRIBED = (ResponsesBody, *KINDS.values(), OfferedFunction)


def describe(schemas: dict[str, Any]) -> None:
    """Says in a description of the API what the lists of a body hold."""
    fields = schemas["ResponsesBody"]["properties"]
    kinds = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in KINDS.values()]
    fields["input"]["anyOf"][1]["items"] = {"anyOf": kinds}
    fields["tools"]["anyOf"][0]["items"] = {"$ref": f"#/components/schemas/{OfferedFunction.__name__}"}


MOST_BODIES = 2  # as much as so many may bring: each turn has all of it rendered
ITEM_BYTES = 512  # that an item takes beside its texts, as it is listed and in the chat
MOST_ITEMS, USUAL_ITEMS = 100, 20  # of a page
ORDERS = ("desc", "asc")
QUERY: tuple[dict[str, Any], ...] = (
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MOST_ITEMS}},
    {"name": "order", "in": "query", "schema": {"enum": list(ORDERS)}},
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "An item's id: those behind it."},
)
FIELDS = tuple(each["name"] for each in QUERY)


class KeptItem(NamedTuple):
    """An item in JSON. item_id: "" for one that has none."""

    body: bytes
    item_id: str


class Conversation(NamedTuple):
    """messages: of the chat without instructions, which are those of one response alone. called: the ids of the calls
    that each part of it makes. num_bytes: of its items in JSON."""

    items: tuple[KeptItem, ...] = ()
    messages: tuple[ChatMessage, ...] = ()
    called: tuple[frozenset[str], ...] = ()
    num_bytes: int = 0

    @property
    def size(self) -> int:
        """Returns the bytes that it takes in memory, where its texts are twice."""
        return 2 * self.num_bytes + ITEM_BYTES * len(self.items)

    def gone_on(self, items: Sequence[Item]) -> "Conversation":
        """Returns it with these items behind it. Raises `RequestError` for an output of a call that it does not make,
        and for more items than a body may have."""
        if len(self.items) + len(items) > MAX_PARTS:
            raise _too_large(f"{MAX_PARTS} items", MAX_PARTS)
        require_calls(items, self.called)
        kept = [KeptItem(msgspec.json.encode(item), item.id or "") for item in items]
        called = frozenset(item.call_id for item in items if isinstance(item, ItemCall))
        return Conversation(
            (*self.items, *kept),
            tuple(chat_messages(None, items, self.messages)),
            (*self.called, called) if called else self.called,
            self.num_bytes + sum(len(each.body) for each in kept),
        )

    def require_at_most(self, max_bytes: int) -> None:
        """Raises `RequestError` for more than that of items in JSON."""
        if self.num_bytes > max_bytes:
            raise _too_large(f"{max_bytes} bytes", max_bytes)


def _too_large(what: str, limit: int) -> RequestError:
    said, hint = f"the conversation has more than {what}", "begin another, with what matters of this one as input"
    return RequestError(said, code="body_too_large", status=413, param="input", limit=limit, hint=hint)


def input_items(response_id: str, items: Sequence[KeptItem], query: Mapping[str, str]) -> bytes:
    """Returns a page in JSON. items: the conversation before the output, of which those of the page alone are read.
    Raises RequestError for a query that cannot be meant."""
    limit, order = _limit(query), query.get("order", ORDERS[0])
    unknown = next((name for name in query if name not in FIELDS), None)
    if unknown is not None:
        raise RequestError(f"{unknown[:64]}: a list of items takes {', '.join(FIELDS)}", param=unknown[:64])
    if order not in ORDERS:
        raise RequestError("order is asc or desc", param="order", value=order[:64], limit=list(ORDERS))
    step = -1 if order == "desc" else 1
    ids = [item.item_id or f"{response_id}_{index}" for index, item in enumerate(items)][::step]
    begin = _behind(ids, query.get("after"))
    shown = zip(items[::step][begin : begin + limit], ids[begin : begin + limit], strict=True)
    page = [_listed(orjson.loads(item.body), item_id) for item, item_id in shown]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return orjson.dumps({"object": "list", "data": page, **ends, "has_more": len(ids) - begin > limit})


def _limit(query: Mapping[str, str]) -> int:
    asked = query.get("limit", str(USUAL_ITEMS))
    if not (asked.isascii() and asked.isdigit() and len(asked) <= 3 and 1 <= int(asked) <= MOST_ITEMS):
        said = f"limit is no number from 1 to {MOST_ITEMS}"
        raise RequestError(said, param="limit", value=asked[:64], limit=[1, MOST_ITEMS])
    return int(asked)


def _behind(ids: list[str], after: str | None) -> int:
    """Returns where a page begins."""
    if after is None:
        return 0
    if after not in ids:
        raise RequestError("after names no item of this response", param="after", value=after[:64])
    return ids.index(after) + 1


def _listed(item: dict[str, Any], own_id: str) -> dict[str, Any]:
    """Returns an item as it is listed: with an id, without what was not said, a message's content in parts."""
    said = {name: value for name, value in item.items() if value is not None}
    if isinstance(said.get("content"), str):
        kind = "output_text" if said.get("role") == "assistant" else "input_text"
        said["content"] = [{"type": kind, "text": said["content"]}]
    return {"id": own_id, "status": "completed", **said}
