"""From a body to an `Ask`: what is wanted, checked against every limit that can be checked before tokenising.

`Ask` is the one form that the rest of the server knows; completions and chats differ only in how they get here and in
how their answers are written (`answer.py`). Prompts may be texts or token ids: of ids the last ones may be all that is
kept.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from splittime.api.decode import decode_once
from splittime.api.limits import BodyLimits, ModelInfo, keep_last
from splittime.api.schema import (
    MAX_BAD_WORD_CHARS,
    MAX_STOP_CHARS,
    MOST_STOP_CHARS,
    ChatBody,
    CompletionBody,
    GenerationBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    TokenizeBody,
)
from splittime.api.tools import (
    LABELS_TOLD,
    ReasoningUse,
    ToolUse,
    as_template_reads,
    begins_with_labels,
    reasoning_use_of,
    tool_use_of,
)
from splittime.core.errors import NotFound, RequestError
from splittime.core.sampling import MAX_STOP_STRINGS, SamplingParams
from splittime.text import grammars
from splittime.text.answer_marks import AnswerMarks
from splittime.text.foreign_code import require_at_most
from splittime.text.process import KeptTokens, last_of

GivenPrompts = str | Sequence[str | int | list[int]]
Prompt = str | KeptTokens


def listed(given: GivenPrompts, param: str) -> Sequence[Any]:
    """Returns a list that is all texts, or all lists of token ids: what is given alone is the only one. Raises
    `RequestError` for a list that is neither."""
    if isinstance(given, str):
        return (given,)
    kinds = {type(entry) for entry in given}
    if len(kinds) != 1:
        raise RequestError(f"{param} {'mixes texts and token ids' if kinds else 'is an empty list'}", param=param)
    return [given] if kinds == {int} else given


def kept_of(
    lists: Sequence[Sequence[int]], keep_last: int | None, most_tokens: int, model: ModelInfo, param: str
) -> tuple[KeptTokens, ...]:
    """Returns what is kept of lists of token ids. Raises `RequestError`, which names one of several by its index, where
    that is more than `most_tokens`, or no token of the model."""
    params = [numbered(param, index, len(lists)) for index in range(len(lists))]
    each = [last_of(ids, keep_last) for ids in lists]
    for kept, name in zip(each, params, strict=True):
        require_at_most(len(kept.ids), most_tokens, name)
    for kept, name in zip(each, params, strict=True):
        check_token_ids(kept.ids, model.vocab_size, name)
    return tuple(each)


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> tuple[int, ...]:
    """Returns the ids. Raises `RequestError` unless all are of the vocabulary."""
    if ids:
        least, most = min(ids), max(ids)
        worst = least if least < 0 else most
        if not 0 <= worst < vocab_size:
            words, limit = f"{param} has a token id outside the vocabulary", [0, vocab_size - 1]
            raise RequestError(words, param=param, value=str(worst), limit=limit)
    return tuple(ids)


def numbered(name: str, index: int, count: int) -> str:
    """Returns how an error calls the entry of a field, which may be the only one."""
    return f"{name}[{index}]" if count > 1 else name


DEFAULT_COMPLETION_TOKENS = 16
MAX_CACHE_SALT_CHARS = 256
LEAST_TOP_P = 1e-6  # `top_p` 0: the likeliest token alone has more than this, in any vocabulary
MAX_PRIORITY = 2**31 - 1
_TOO_MANY = "asks for too many choices (prompts x n)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One HTTP request for generations.

    bad_words: that may not come; they become token ids where the prompts do.
    prompts: texts or token ids; a chat has none yet, its prompt is rendered from `messages`, by `template_options`.
    sampling: validated; `max_tokens` None means "to the end of the context"; `seed` is set.
    echo_only: the prompt is all that was wanted (max_tokens 0); the engine's one token is dropped.
    keep_last: so many last tokens of each prompt; None is all.
    shown_ids: special tokens that are part of the text, as marks in it.
    left_out: what of the messages no template is given, in words.
    """

    endpoint: str
    model: str
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    template_options: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingParams
    bad_words: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    include_timing: bool = False
    return_token_ids: bool = False
    echo: bool = False
    echo_only: bool = False
    priority: int = 0
    cache_salt: str = ""
    keep_last: int | None = None
    tool_use: ToolUse | None = None
    reasoning: ReasoningUse | None = None
    shown_ids: frozenset[int] = frozenset()
    left_out: tuple[str, ...] = ()

    @property
    def is_chat(self) -> bool:
        return bool(self.messages)

    @property
    def num_choices(self) -> int:
        return self.n * max(1, len(self.prompts))

    def sampling_of(self, sample: int, max_tokens: int) -> SamplingParams:
        """Parameters of the `sample`-th answer to a prompt: each has a seed of its own."""
        seed = self.sampling.seed or 0
        wrapped = (seed + sample + 2**63) % 2**64 - 2**63
        return msgspec.structs.replace(self.sampling, seed=wrapped, max_tokens=max_tokens)


def ask_of(
    body: ChatBody | CompletionBody, model: ModelInfo, limits: BodyLimits, include_timing: bool, marks: AnswerMarks
) -> Ask:
    """include_timing: a header asks for it. marks: of the model's chats. Raises `RequestError`."""
    model.require_generating()
    if isinstance(body, ChatBody):
        return _ask_chat(body, model, limits, include_timing, marks)
    return _ask_completion(body, model, limits, include_timing)


def _ask_completion(body: CompletionBody, model: ModelInfo, limits: BodyLimits, include_timing: bool) -> Ask:
    default = min(DEFAULT_COMPLETION_TOKENS, model.default_sampling.get("max_tokens", DEFAULT_COMPLETION_TOKENS))
    max_tokens = int(default) if body.max_tokens is None else _to_the_end(body.max_tokens, limits)
    echo_only = max_tokens == 0 and bool(body.echo)
    require(max_tokens != 0 or echo_only, "max_tokens", 0, "0 needs echo: nothing else would be answered")
    ask = _ask("completions", body, model, limits, include_timing)
    echo, max_tokens = bool(body.echo), 1 if echo_only else max_tokens
    sampling = _sampling(body, model, limits, max_tokens=max_tokens, logprobs=body.logprobs, echo=echo)
    kept = keep_last(body.truncate_prompt_tokens, model, max_tokens or 1)
    prompts = _prompts(body.prompt, model, limits.max_choices, kept)
    ask = replace(ask, prompts=prompts, keep_last=kept, echo=echo, echo_only=echo_only, sampling=sampling)
    return _check_against_model(ask, model, limits)


def _ask_chat(body: ChatBody, model: ModelInfo, limits: BodyLimits, include_timing: bool, marks: AnswerMarks) -> Ask:
    max_tokens = _to_the_end(_max_tokens(body, limits), limits)
    require(body.top_logprobs is None or bool(body.logprobs), "top_logprobs", body.top_logprobs, "needs logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    ask = _ask("chat", body, model, limits, include_timing)
    sampling = _sampling(body, model, limits, max_tokens=max_tokens, logprobs=logprobs, echo=False)
    tool_use = tool_use_of(body, marks, sampling.grammar)
    told = {} if tool_use is None else {"tools": tool_use.told}
    ask = replace(
        ask,
        tool_use=tool_use,
        reasoning=reasoning_use_of(body, marks, tool_use.tools if tool_use else ()),
        shown_ids=marks.shown_ids if tool_use or marks.reasoning else frozenset(),
        messages=as_template_reads(body, marks),
        left_out=(LABELS_TOLD,) if begins_with_labels(body) else (),
        template_options=template_options(body) | told,
        keep_last=keep_last(body.truncate_prompt_tokens, model, max_tokens or 1),
        sampling=_held_to_calls(sampling, tool_use),
    )
    return _check_against_model(ask, model, limits)


def _max_tokens(body: ChatBody, limits: BodyLimits) -> int | None:
    """`max_tokens` under either of its names; under both only if they agree."""
    older, newer = body.max_tokens, body.max_completion_tokens
    if older is not None and newer is not None:
        agree = older == newer and not limits.strict
        require(agree, "max_tokens", older, "differs from max_completion_tokens; give one of them", newer)
    return older if newer is None else newer


def _to_the_end(max_tokens: int | None, limits: BodyLimits) -> int | None:
    """None, "to the end of the context", for the -1 by which llama.cpp and others write it."""
    return None if max_tokens == -1 and not limits.strict else max_tokens


def _held_to_calls(sampling: SamplingParams, tool_use: ToolUse | None) -> SamplingParams:
    if tool_use is None:
        return sampling
    held = msgspec.structs.replace(sampling, grammar=tool_use.grammar)
    held.validate()
    return held


def template_options(body: ChatBody | TokenizeBody) -> dict[str, Any]:
    """Returns what the chat template is told besides the messages."""
    continues = bool(body.continue_final_message)
    opens = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    require(not (opens and continues), "continue_final_message", True, "cannot be true with add_generation_prompt")
    effort = getattr(body, "reasoning_effort", None)
    more = ({"reasoning_effort": effort} if effort else {}) | ({"enable_thinking": False} if effort == "none" else {})
    more |= body.chat_template_kwargs or {}
    return {"add_generation_prompt": opens, "continue_final_message": continues, "variables": more}


def _check_against_model(ask: Ask, model: ModelInfo, limits: BodyLimits) -> Ask:
    """Returns what concerns the whole ask: number of choices, and token ids that the model has."""
    count, limit = ask.num_choices, limits.max_choices
    require(count <= limit, "n" if ask.n > 1 else "prompt", count, _TOO_MANY, limit)
    check_lists(ask.sampling, model.vocab_size)
    return ask


def check_lists(sampling: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError for a token id that the model does not have."""
    check_token_ids(sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids(tuple(sampling.logit_bias), vocab_size, "logit_bias")
    check_token_ids(sampling.allowed_token_ids, vocab_size, "allowed_token_ids")
    for run in sampling.bad_token_ids:
        check_token_ids(run, vocab_size, "bad_token_ids")


def _ask(endpoint: str, body: GenerationBody, model: ModelInfo, limits: BodyLimits, include_timing: bool) -> Ask:
    """The fields that both kinds share; `sampling` is filled in by the caller."""
    check_model(body.model, model)
    stream = bool(body.stream)
    require(stream or body.stream_options is None, "stream_options", None, "needs stream")
    options = body.stream_options
    n = 1 if body.n is None else body.n
    require(1 <= n <= limits.max_n, "n", n, f"must be 1 to {limits.max_n}", [1, limits.max_n])
    priority = body.priority or 0
    require(abs(priority) <= MAX_PRIORITY, "priority", str(priority), "out of range", [-MAX_PRIORITY, MAX_PRIORITY])
    salt = body.cache_salt or ""
    require(len(salt) <= MAX_CACHE_SALT_CHARS, "cache_salt", len(salt), "is too long", MAX_CACHE_SALT_CHARS)
    return Ask(
        endpoint=endpoint,
        model=body.model or model.name,
        sampling=SamplingParams(),
        bad_words=_bad_words(body),
        n=n,
        stream=stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        include_timing=include_timing or (options is not None and options.include_timing),
        return_token_ids=bool(body.return_token_ids),
        priority=priority,
        cache_salt=salt,
    )


def _sampling(
    body: GenerationBody,
    model: ModelInfo,
    limits: BodyLimits,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool,
) -> SamplingParams:
    """Sampling parameters with every absent field at the model's default, or its own, validated."""
    stop = _stop_strings(body.stop, limits)
    for text in stop:
        require(len(text) <= MAX_STOP_CHARS, "stop", len(text), "has a string that is too long", MAX_STOP_CHARS)
    require((size := sum(map(len, stop))) <= MOST_STOP_CHARS, "stop", size, "is too long together", MOST_STOP_CHARS)
    given: dict[str, Any] = {name: value for name, value in model.default_sampling.items() if name != "max_tokens"}
    asked = {name: getattr(body, name) for name in _SAME_NAME}
    asked |= {"repetition_penalty": body.repeat_penalty} if body.repetition_penalty is None else {}
    given |= {name: value for name, value in asked.items() if value is not None}
    given["top_k"] = 0 if given.get("top_k") == -1 else given.get("top_k", 0)
    if given.get("top_p") == 0.0 and not limits.strict:
        given["top_p"] = LEAST_TOP_P
    sampling = SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(62) if body.seed is None else body.seed,
        logit_bias=_logit_bias(body.logit_bias or {}),
        grammar=grammar_of(body),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        **given,
    )
    sampling.validate()
    require(not (sampling.grammar and body.bad_words), "bad_words", None, "beside a form: write it into the form")
    wrong = limits.strict and max_tokens is not None and sampling.min_tokens > max_tokens
    require(not wrong, "min_tokens", sampling.min_tokens, "is above max_tokens", max_tokens)
    return sampling


def _stop_strings(stop: str | Sequence[str] | None, limits: BodyLimits) -> tuple[str, ...]:
    """The stop strings; an empty one stops nothing, and is refused by `SamplingParams` where `--strict` keeps it."""
    listed = (stop,) if isinstance(stop, str) else tuple(stop or ())
    require(len(listed) <= MAX_STOP_STRINGS, "stop", len(listed), "has too many strings", MAX_STOP_STRINGS)
    return listed if limits.strict else tuple(text for text in listed if text)


def _bad_words(body: GenerationBody) -> tuple[str, ...]:
    words = tuple(body.bad_words or ())
    for word in words:
        require(bool(word.strip()), "bad_words", word, "has a word that is empty")
        require(len(word) <= MAX_BAD_WORD_CHARS, "bad_words", len(word), "has a word too long", MAX_BAD_WORD_CHARS)
    return words


_SAME_NAME = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"),
)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        require(key.isascii() and key.isdigit() and len(key) <= 10, "logit_bias", key, "has a key that is no token id")
        bias[int(key)] = value
    return bias


def check_model(name: str | None, model: ModelInfo) -> None:
    if name is not None and name not in model.served_names:
        raise NotFound(
            f"no model {name!r} here",
            code="model_not_found",
            param="model",
            value=name,
            hint=f"served: {', '.join(model.served_names)}",
        )


def _prompts(given: GivenPrompts, model: ModelInfo, most: int, kept: int | None) -> tuple[Prompt, ...]:
    """Returns the prompts, of which `kept` token ids stay where they are such."""
    prompts = listed(given, "prompt")
    if isinstance(prompts[0], str):
        return tuple(prompts)
    require(len(prompts) <= most, "prompt", len(prompts), _TOO_MANY, most)  # before any of them is looked at
    return kept_of(prompts, kept, model.max_model_len - 1, model, "prompt")


def require(holds: bool, param: str, value: Any, why: str, limit: Any = None) -> None:
    if not holds:
        raise RequestError(f"{param} {why}", param=param, value=value, limit=limit)


def grammar_of(body: GenerationBody) -> str:
    """Returns the grammar of what the body asks for; "" where it asks for a text. Raises RequestError for two forms,
    and for one that is too large or cannot be."""
    found = dict(_grammars(body))
    if len(found) > 1:
        first, second, *_ = found
        raise RequestError(f"{second}: {first} asks for a form already; give one of them", param=second)
    return next(iter(found.values()), "")


def _grammars(body: GenerationBody) -> Any:
    """Yields each field that asks for a form, with its grammar."""
    asked = body.response_format
    if isinstance(asked, JsonObjectFormat):
        allowed = {"type": "object"} if asked.schema is None else asked.schema
        yield "response_format", grammars.of_json_schema(allowed, "response_format.schema")
    elif isinstance(asked, JsonSchemaFormat):
        schema = True if asked.json_schema.schema is None else asked.json_schema.schema
        yield "response_format", grammars.of_json_schema(schema, "response_format.json_schema.schema")
    if body.structured_outputs is not None:
        yield from _written_forms(body.structured_outputs, "", "structured_outputs.")
        if body.structured_outputs.json_object:
            yield "structured_outputs.json_object", grammars.of_json_object()
    yield from _written_forms(body, "guided_", "guided_")


def _written_forms(asked: StructuredOutputs | GenerationBody, before: str, at: str) -> Any:
    """Yields each form that is written in a field of its own, of a name that begins so."""
    for name, grammar in _WRITTEN_FORMS.items():
        if (given := getattr(asked, before + name, None)) is not None:
            yield at + name, grammar(given, at + name)


def _schema(given: dict[str, Any] | str, param: str) -> Any:
    """A schema may come as a text of JSON."""
    if not isinstance(given, str):
        return given
    try:
        schema = decode_once(given.encode(), Any)  # bounded as a body is
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{param} is no JSON: {error}", param=param) from None
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{param} is no JSON schema: an object, true or false", param=param)
    return schema


_WRITTEN_FORMS: dict[str, Callable[[Any, str], str]] = {
    "json": lambda given, at: grammars.of_json_schema(_schema(given, at), at),
    "regex": grammars.of_regex,
    **dict.fromkeys(("choice", "choices"), grammars.of_choice),
    "grammar": grammars.of_lark,
}
