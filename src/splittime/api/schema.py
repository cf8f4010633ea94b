"""The bodies that the API reads. What else is in one is left out, with a notice (`lenient`); `--strict` refuses it.

Each field has one of four fates, which `/docs` and docs/reference/fields.md show:

    honoured          the answer depends on it
    no effect         the API promises nothing that a client could miss (a label); `--strict` refuses it
    hint              it asks for what is not done here, and the answer means the same without: any value is taken, and
                      a notice says that it has no effect; `--strict` refuses it
    refused           only the value that is true without effect is taken (`null`, an empty list, `{"type": "text"}`);
                      any other is refused by name, with the reason in `lenient.UNSUPPORTED`

Fields of vLLM's and llama.cpp's own APIs (`ForeignFields`) are taken at the value that changes nothing, since clients
made for those servers send them at their defaults; any other value is refused by name, with what to do instead.

`openapi` makes the documentation from these classes. What needs the model's limits is checked in `params.py`;
`decode.py` makes values of bytes.
"""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from splittime.api.limits import KeepLast
from splittime.core.sampling import MAX_BAD_WORDS
from splittime.text.chat_forms import ROLES

MAX_STOP_CHARS, MOST_STOP_CHARS = 1024, 4096  # of one string, and of all together
MAX_BAD_WORD_CHARS = 64
MAX_ALLOWED = 2**14  # token ids in one list
MAX_DETOKENIZED = 2**18  # ids in one body of /detokenize


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body in which every field means something."""


def no_effect(description: str) -> Meta:
    """A field that is taken because ordinary clients send it and its API promises nothing that could be missed."""
    return Meta(description=f"No effect: {description}", extra_json_schema={"x-effect": "none"})


def hint(why: str, *neutral: Any) -> Meta:
    """A field of which any value is taken, and none has an effect; one that is not neutral is told in a notice."""
    return Meta(description=why, extra_json_schema={"x-effect": "hint", "x-neutral": list(neutral)})


MAX_LABEL_CHARS = 512
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]  # of the client's: answers repeat some, more than once

Choices = Annotated[list[str], Meta(min_length=1)]
REPEATS = "Another name of repetition_penalty, which goes before it."
A_FORM = "The answer is held to it. One form at most, and not with ignore_eos."


def _number(description: str, **bounds: float) -> Meta:
    """A documented range that `SamplingParams.validate` checks, so that its error can say value and limit."""
    return Meta(description=description, extra_json_schema=bounds)


class StructuredOutputs(Strict, kw_only=True):
    """vLLM's way to ask for a form: one of these. Another would be a form that the answer does not have."""

    is_closed: ClassVar[bool] = True  # as `lenient` reads it

    json: Annotated[dict[str, Any] | str | None, Meta(description="A JSON schema.")] = None
    regex: Annotated[str | None, Meta(description="A regular expression, of the whole answer.")] = None
    choice: Annotated[Choices | None, Meta(description="The answer is one of these.")] = None
    choices: Annotated[Choices | None, Meta(description="Another name of choice.")] = None
    grammar: Annotated[str | None, Meta(description="In Lark's form.")] = None
    json_object: Annotated[bool | None, Meta(description="Any JSON object.")] = None


class ForeignFields(Strict, kw_only=True):
    """Fields of vLLM and then of llama.cpp that both endpoints take. `ChatBody` has those of chats alone."""

    best_of: Annotated[Literal[1] | None, no_effect("each answer is the only one drawn for it.")] = None
    use_beam_search: Annotated[Literal[False] | None, no_effect("there is no beam search.")] = None
    length_penalty: Annotated[float | None, no_effect("of beam search, which there is not.")] = None
    skip_special_tokens: Annotated[Literal[True] | None, no_effect("texts are without them.")] = None
    spaces_between_special_tokens: Annotated[bool | None, no_effect("texts are without special tokens.")] = None
    include_stop_str_in_output: Annotated[Literal[False] | None, no_effect("the text ends before it.")] = None
    detokenize: Annotated[bool | None, hint("every answer has its text", True)] = None
    return_tokens_as_token_ids: Annotated[Literal[False] | None, no_effect("logprobs name tokens by text.")] = None
    prompt_logprobs: None = None
    truncate_prompt_tokens: KeepLast = None
    logits_processors: None = None
    structured_outputs: Annotated[StructuredOutputs | None, Meta(description=A_FORM)] = None
    guided_json: Annotated[dict[str, Any] | str | None, Meta(description=A_FORM)] = None
    guided_regex: Annotated[str | None, Meta(description=A_FORM)] = None
    guided_choice: Annotated[Choices | None, Meta(description=A_FORM)] = None
    guided_grammar: Annotated[str | None, Meta(description=A_FORM)] = None
    guided_decoding_backend: Annotated[Any, hint("there is one way to hold answers to a form")] = None
    guided_whitespace_pattern: Annotated[Any, hint("white space between JSON's parts is bounded")] = None
    kv_transfer_params: Annotated[Any, hint("blocks are fetched from the servers that kv_peers names")] = None
    vllm_xargs: Annotated[Any, hint("there are no extensions to read it")] = None
    request_id: Annotated[Any, hint("the header X-Request-Id names a request")] = None
    cache_prompt: Annotated[bool | None, hint("a cache_salt of its own keeps a prompt from finding any", True)] = None
    n_predict: None = None
    repeat_penalty: Annotated[float | None, _number(REPEATS, exclusiveMinimum=0, maximum=10)] = None
    mirostat: Annotated[Literal[0] | None, no_effect("0 is off.")] = None
    typical_p: Annotated[Literal[1] | None, no_effect("1 is off.")] = None
    dynatemp_range: Annotated[Literal[0] | None, no_effect("0 is off.")] = None
    xtc_probability: Annotated[Literal[0] | None, no_effect("0 is off.")] = None
    dry_multiplier: Annotated[Literal[0] | None, no_effect("0 is off.")] = None
    timings_per_token: Annotated[bool | None, hint("the header X-Include-Timing asks for times")] = None


MOST_LISTED = (
    "Alternatives listed beside each token. An answer that is not streamed has at most 2,097,152 log-probabilities: "
    "one for each token, and one for each alternative."
)
OPENS_ANSWER = "The template writes what begins the answer; default: true, unless the last message is continued."
CONTINUES = "The model goes on with the last message, which is left open; not with add_generation_prompt."
TEMPLATE_VARIABLES = "More that the model's chat template may read, as {'enable_thinking': false}."


class StreamOptions(Strict, kw_only=True):
    include_usage: Annotated[
        bool, Meta(description="A chunk before the end mark counts the tokens of all choices.")
    ] = False
    continuous_usage_stats: Annotated[
        bool, Meta(description="vLLM's: each chunk carries `usage`, the tokens of its own choice so far.")
    ] = False
    include_timing: Annotated[bool, Meta(description="The last chunk carries the request's account.")] = False


class TextFormat(Strict, kw_only=True, tag_field="type", tag="text"):
    """No form."""


class JsonObjectFormat(Strict, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object, or what a schema allows, as llama.cpp has it."""

    schema: dict[str, Any] | None = None


class NamedSchema(Strict, kw_only=True):
    name: Annotated[str, Meta(description="A label of the client's.")]
    schema: Annotated[dict[str, Any] | None, Meta(description="A JSON schema; null: any JSON value.")] = None
    description: Annotated[str | None, Meta(description="For the client; the model is told by the prompt.")] = None
    strict: Annotated[bool | None, Meta(description="The answer is held to the schema whatever this says.")] = None


class JsonSchemaFormat(Strict, kw_only=True, tag_field="type", tag="json_schema"):
    """A JSON value that a schema allows."""

    json_schema: NamedSchema


Effort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh"],
    Meta(description="A variable of the chat template, for models that read it."),
]
AnswerFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class GenerationBody(ForeignFields, kw_only=True):
    """What both generation endpoints take."""

    model: Annotated[str | None, Meta(description="A name from /v1/models; default: the model served.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[
        int | None, _number("Most output tokens; -1, or more than the context has left: all that is left.", minimum=-1)
    ] = None
    min_tokens: Annotated[int | None, _number("No end and no stop counts before so many.", minimum=0)] = None
    temperature: Annotated[float | None, _number("0 is greedy.", minimum=0, maximum=100)] = None
    top_p: Annotated[float | None, _number("Nucleus; 0 leaves the likeliest.", minimum=0, maximum=1)] = None
    top_k: Annotated[int | None, _number("0 or -1 is off.", minimum=-1)] = None
    min_p: Annotated[float | None, _number("Relative to the likeliest token.", minimum=0, maximum=1)] = None
    seed: Annotated[int | None, _number("Same seed, same tokens, whatever the batch.")] = None
    presence_penalty: Annotated[float | None, _number("", minimum=-2, maximum=2)] = None
    frequency_penalty: Annotated[float | None, _number("", minimum=-2, maximum=2)] = None
    repetition_penalty: Annotated[float | None, _number("1 is off.", exclusiveMinimum=0, maximum=10)] = None
    logit_bias: Annotated[dict[str, float] | None, Meta(description="Token id to bias, -100 to 100.")] = None
    allowed_token_ids: Annotated[
        Annotated[list[int], Meta(max_length=MAX_ALLOWED)] | None,
        Meta(description="No other token comes; not even an end that is not in it. Not with a form."),
    ] = None
    bad_words: Annotated[
        Annotated[list[str], Meta(max_length=MAX_BAD_WORDS)] | None,
        Meta(description="Their tokens do not come, as a text begins or behind a space. Not with a form."),
    ] = None
    n: Annotated[int | None, _number("Answers to each prompt.", minimum=1)] = None
    stop: Annotated[str | list[str] | None, Meta(description="Cut from the text where first found.")] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int | None, Meta(description="Lower goes first, under the priority policy.")] = None
    cache_salt: Annotated[Label | None, Meta(description="Cached prefixes are shared within one salt.")] = None
    return_token_ids: Annotated[bool | None, Meta(description="Adds token_ids to each choice.")] = None
    response_format: Annotated[AnswerFormat | None, Meta(description=A_FORM)] = None
    store: Annotated[bool | None, hint("chats are not stored; /v1/responses can store")] = None
    user: Annotated[Label | None, no_effect("a label of the client's.")] = None
    safety_identifier: Annotated[Label | None, no_effect("a label of the client's.")] = None
    prompt_cache_key: Annotated[Label | None, no_effect("every prompt's prefix is looked up; see cache_salt.")] = None
    metadata: Annotated[dict[str, str] | None, no_effect("labels for stored answers; none are stored.")] = None
    service_tier: Annotated[Label | None, no_effect("there is one tier.")] = None


class CompletionBody(GenerationBody, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int | None, _number(MOST_LISTED, minimum=0, maximum=20)] = None
    add_special_tokens: Annotated[Literal[True] | None, no_effect("the prompt gets them.")] = None
    suffix: Literal[""] | None = None


CacheControl = Annotated[dict[str, Any] | None, no_effect("every prompt's prefix is looked up without being told.")]


class TextPart(Strict, kw_only=True):
    type: Literal["text"]
    text: str
    cache_control: CacheControl = None


class GivenFunction(Strict, kw_only=True):
    name: str
    arguments: Annotated[str | dict[str, Any], Meta(description="JSON, as it came in the answer; or an object.")]


class GivenCall(Strict, kw_only=True):
    id: str | None = None
    type: Literal["function"] = "function"
    function: GivenFunction
    index: Annotated[int | None, no_effect("its place says it.")] = None

    def to_template(self) -> dict[str, Any]:
        """Returns it as `chat_forms.with_arguments_read` takes it."""
        named = {} if self.id is None else {"id": self.id}
        return {"type": "function", "function": msgspec.structs.asdict(self.function), **named}


class Message(Strict, kw_only=True):
    role: Annotated[str, Meta(description="Or one that the model's template knows.", extra_json_schema={"enum": ROLES})]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: Annotated[str | None, Meta(description="For the templates that write it.")] = None
    cache_control: CacheControl = None
    reasoning: Annotated[str | None, Meta(description="Another name of reasoning_content.")] = None
    refusal: Annotated[str | None, Meta(description="Of an answer: what it said in place of its content.")] = None
    annotations: Annotated[Any, Meta(description="Of an earlier answer, whose text is what is read.")] = None
    audio: None = None
    tool_calls: Annotated[list[GivenCall] | None, Meta(description="Of an answer: what it called.")] = None
    tool_call_id: Annotated[str | None, Meta(description="Of a tool's answer: the call's id.")] = None
    function_call: None = None

    @property
    def text(self) -> str:
        """Returns its text parts, joined by line breaks."""
        content = self.content or self.refusal or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    def to_template(self) -> dict[str, Any]:
        """As templates read it: with absent fields absent."""
        optional: dict[str, Any] = {"name": self.name, "reasoning_content": self.reasoning_content or self.reasoning}
        optional["tool_call_id"] = self.tool_call_id
        optional["tool_calls"] = [call.to_template() for call in self.tool_calls] if self.tool_calls else None
        given = {name: value for name, value in optional.items() if value is not None}
        return {"role": self.role, "content": self.text, **given}


class FunctionTool(Strict, kw_only=True):
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}$")]
    description: Annotated[str | None, Meta(description="For the model.")] = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="A JSON schema; default: any object.")] = None
    strict: Annotated[bool | None, Meta(description="Chosen calls are held to the schema too.")] = None


class ToolGiven(Strict, kw_only=True):
    type: Literal["function"]
    function: FunctionTool


class ToolName(Strict, kw_only=True):
    name: str


class NamedTool(Strict, kw_only=True):
    """This tool is called."""

    type: Literal["function"] = "function"
    function: ToolName


TOOL_CHOICE = "auto (the default): the model chooses; required: it calls some; an object: it calls this one; none."
BOUND = (
    "Reasoning tokens, without its marks, behind which the reasoning is closed and the answer goes on; -1: no bound."
)


class ChatBody(GenerationBody, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: Annotated[bool | None, Meta(description=OPENS_ANSWER)] = None
    add_special_tokens: Annotated[Literal[False] | None, no_effect("the template writes them.")] = None
    continue_final_message: Annotated[bool | None, Meta(description=CONTINUES)] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description=TEMPLATE_VARIABLES)] = None
    max_completion_tokens: Annotated[int | None, _number("The newer name of max_tokens.", minimum=-1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, _number("Needs logprobs.", minimum=0, maximum=20)] = None
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[ToolGiven] | None, Meta(description="Functions that the model may call.")] = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | NamedTool | None, Meta(description=TOOL_CHOICE)] = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="false: at most one.")] = None
    echo: Annotated[Literal[False] | None, no_effect("no chat is echoed.")] = None
    include_reasoning: Annotated[bool | None, Meta(description="false: reasoning is counted, and left out.")] = None
    thinking_token_budget: Annotated[int | None, _number(BOUND, minimum=-1)] = None
    chat_template: None = None
    documents: None = None
    mm_processor_kwargs: Annotated[Any, hint("only texts are supported")] = None
    functions: None = None
    function_call: Annotated[Literal["none", "auto"] | None, no_effect("there are no functions.")] = None
    audio: None = None
    prediction: Annotated[Any, hint("drafts are taken from the prompt, not from predicted outputs")] = None
    reasoning_effort: Effort | None = None
    verbosity: Annotated[Any, hint("say in the prompt how long an answer is to be", "medium")] = None
    web_search_options: Annotated[Any, hint("nobody searches the web here")] = None


class TokenizeBody(Strict, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="Default: true for prompt, false for messages.")] = None
    add_generation_prompt: Annotated[bool | None, Meta(description=OPENS_ANSWER)] = None
    continue_final_message: Annotated[bool | None, Meta(description=CONTINUES)] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description=TEMPLATE_VARIABLES)] = None
    return_token_strs: bool = False
    cache_control: CacheControl = None


class DetokenizeBody(Strict, kw_only=True):
    model: str | None = None
    tokens: Annotated[list[int], Meta(max_length=MAX_DETOKENIZED)]
    skip_special_tokens: bool = False


AdapterName = Annotated[str, Meta(max_length=128, description="Of the adapter: requests name it as their model.")]


class LoadAdapterBody(Strict):
    lora_name: AdapterName
    lora_path: Annotated[
        str, Meta(min_length=1, max_length=4096, description="Its folder, below --lora-root: relative, or whole.")
    ]


class UnloadAdapterBody(Strict):
    lora_name: AdapterName
