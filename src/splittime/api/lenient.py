"""What of a body is taken though nothing here reads it.

A client may be newer than this server, or made for another one: a field that is unknown here is left out, and so is one
that is `null` where a value is meant. What would change the meaning of an answer is refused by name all the same
(`WAYS_OUT`). Of a known field that is only a hint (`schema.hint`) any value is taken. What was left out is told
in notices, by the places of the fields; `--strict` refuses it.

A body is read by its class first, which knows neither nulls nor new fields: only one that fails comes here, as plain
values.

What is refused by name, and what to do instead: fields of our bodies at a value that would change the answer
(`UNSUPPORTED`; `RESPONSES_UNSUPPORTED` of the Responses API's), and fields of other servers' APIs that our bodies do
not have (`WAYS_OUT`). Of these, what is only a hint is taken, with a notice that says why it has no effect (`HINTS`).
"""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

UNSUPPORTED = {
    **dict.fromkeys(
        ("function_call", "functions"), "the older form of calls is not supported; tools and tool_choice are"
    ),
    "best_of": "no answers are drawn to choose from; n asks for several",
    "use_beam_search": "beam search is not supported; temperature 0 takes the likeliest token at each place",
    "skip_special_tokens": "texts are without special tokens; return_token_ids gives the ids of all",
    "include_stop_str_in_output": "the text ends before a stop string; append it",
    "return_tokens_as_token_ids": "logprobs name tokens by their text; return_token_ids gives the ids",
    "prompt_logprobs": "echo with logprobs gives those of the prompt, at /v1/completions",
    "logits_processors": "logits processors are not supported; logit_bias is",
    "n_predict": "max_tokens says how many tokens",
    "mirostat": "mirostat is not supported; temperature, top_p, top_k and min_p are",
    "typical_p": "typical_p is not supported; temperature, top_p, top_k and min_p are",
    "dynatemp_range": "the temperature does not change within an answer",
    "xtc_probability": "XTC is not supported; temperature, top_p, top_k and min_p are",
    "dry_multiplier": "DRY is not supported; repetition_penalty and frequency_penalty are",
    "echo": "a chat is not echoed; /v1/completions echoes its prompt",
    "chat_template": "the model's own template is used; chat_template_kwargs are its variables",
    "documents": "no template is given documents but as chat_template_kwargs",
    "add_special_tokens": "a prompt given as a text gets special tokens, a chat gets its template's; give token ids",
    "suffix": "infilling is not supported",
    "audio": "audio is not supported",
    "modalities": "only text is supported",
    "type": "only text parts are supported",
}


RESPONSES_UNSUPPORTED = {
    "background": "a response is made while its client waits; stream it",
    "conversation": "conversations have no names; previous_response_id goes on from a stored response",
    "top_logprobs": "/v1/chat/completions answers with logprobs",
    "prompt": "prompts are not stored; send instructions and input",
    "tool_choice": 'auto, none, required and {"type": "function", "name": ..} are the choices',
}

_ONE_SAMPLER = "temperature, top_p, top_k and min_p choose among the tokens"
_ONE_PENALTY = "repetition_penalty, presence_penalty and frequency_penalty are the ones here"
_IN_PROMPT = "write it into the prompt; infilling is not supported"

WAYS_OUT = {
    "rank_fields": "documents are texts; write what counts of each into it",
    **dict.fromkeys(("dynatemp_exponent", "xtc_threshold", "mirostat_tau", "mirostat_eta"), _ONE_SAMPLER),
    **dict.fromkeys(("samplers", "min_keep", "top_n_sigma"), _ONE_SAMPLER),
    **dict.fromkeys(
        ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "repeat_last_n"), _ONE_PENALTY
    ),
    **dict.fromkeys(("input_prefix", "input_suffix", "input_extra"), _IN_PROMPT),
    "prompt_embeds": "prompts are texts or token ids",
    "structural_tag": "guided_grammar holds an answer to any grammar in Lark's form",
    "grammar": "guided_grammar takes a grammar in Lark's form",
    "json_schema": "guided_json takes a JSON schema, and so does response_format",
    "n_probs": "logprobs says how many alternatives are listed",
    "lora": "model names an adapter, one for a request",
    "image_data": "only texts are supported",
    "thinking_token_budget": "/v1/chat/completions tells reasoning apart, and takes it",
}

HINTS = {
    "num_ctx": "the server's --max-model-len bounds a context",
    "n_keep": "truncate_prompt_tokens cuts a prompt before it is computed, and nothing does later",
    "n_indent": "guided_regex can hold lines to an indent",
    "post_sampling_probs": "logprobs are those of the model, before any sampling",
    "t_max_predict_ms": "the header X-Request-Deadline-Ms ends a request in time",
    "id_slot": "the scheduler chooses; cache_salt keeps prefixes apart",
    "return_tokens": "return_token_ids adds the ids",
    "return_progress": "the account says what was computed when; X-Include-Timing asks for it",
    "response_fields": "every answer has all its fields",
    "reasoning_format": "include_reasoning false leaves it out; --reasoning-parser none leaves it in the text",
    "parse_tool_calls": "the text is answered as it is",
    "media_io_kwargs": "only texts are supported",
}


MOST_TOLD = 8
MAX_PLACE_CHARS = 96
_ODD = re.compile(r"[^A-Za-z0-9_.\[\]-]")


class Ignored:
    """The fields of one body that had no effect, by their places, each with why. kinds: of each how many."""

    def __init__(self) -> None:
        self._whys: dict[str, str] = {}
        self.kinds: Counter[str] = Counter()

    def add(self, place: str, why: str, kind: str) -> None:
        self._whys.setdefault(_ODD.sub("?", place)[:MAX_PLACE_CHARS], why)
        self.kinds[kind] += 1

    def notices(self) -> list[str]:
        """Returns a line for each field, of many for the first ones. Names are the client's, and go into headers."""
        told = [f"{place} has no effect: {why}" for place, why in list(self._whys.items())[:MOST_TOLD]]
        more = len(self._whys) - len(told)
        return [*told, f"{more} more fields have no effect"] if more else told


def taken(value: Any, kind: type[msgspec.Struct], ignored: Ignored, at: str = "") -> Any:
    """Returns a body's plain values without what its class does not know. at: its place; "" for a whole body."""
    return _taken(value, _shape(kind), at, ignored)


def note_hints(body: msgspec.Struct, ignored: Ignored, at: str) -> None:
    """Note each hint of the body, and of its parts that are in no list, which asks for what is not done here."""
    for place, value, mark in _marked(body, at, ("hint",)):
        neutral = mark["x-neutral"]
        if value not in (None, *neutral) if neutral else value:
            ignored.add(place, mark["description"], "hint")


def without_effect(body: msgspec.Struct, at: str) -> str | None:
    """Returns the place of a field of the body, at any depth, that is given and has no effect."""
    given = (place for place, value, _ in _marked(body, at, ("none", "hint"), is_deep=True) if value is not None)
    return next(given, None)


def _marked(
    value: object, at: str, effects: tuple[str, ...], *, is_deep: bool = False
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields the fields declared to have one of these effects, each with its place, value and declaration. is_deep:
    also those within lists."""
    if is_deep and isinstance(value, list):
        for index, each in enumerate(value):
            yield from _marked(each, f"{at}[{index}]", effects, is_deep=True)
    elif isinstance(value, msgspec.Struct):
        for name, mark in _marks(type(value)).items():
            each, place = getattr(value, name), f"{at}.{name}".lstrip(".")
            if mark.get("x-effect") in effects:
                yield place, each, mark
            else:
                yield from _marked(each, place, effects, is_deep=is_deep)


def _taken(value: Any, shape: inspect.Type, at: str, ignored: Ignored) -> Any:
    form = _form(shape, value)
    if isinstance(form, inspect.StructType) and isinstance(value, dict):
        return _taken_fields(value, form, at, ignored)
    if isinstance(form, inspect.ListType) and isinstance(value, list) and _has_fields(form.item_type):
        return [_taken(each, form.item_type, f"{at}[]", ignored) for each in value]
    return value


def _taken_fields(value: dict[str, Any], form: inspect.StructType, at: str, ignored: Ignored) -> dict[str, Any]:
    fields = {field.encode_name: field for field in form.fields}
    found = {}
    for name, each in value.items():
        place, field = f"{at}.{name}".lstrip("."), fields.get(name)
        is_refused = getattr(form.cls, "is_closed", False) or (not at and name in WAYS_OUT)
        if name == form.tag_field or (field is None and each and is_refused):
            found[name] = each
        elif field is None:
            if each not in (None, "", [], {}):
                why = HINTS.get(name) or f"there is no such field here{_meant(name, fields, ignored)}"
                ignored.add(place, why, "hint" if name in HINTS else "unknown")
        elif isinstance(field.type, inspect.NoneType) and each in ("", [], {}):
            continue
        elif each is not None or field.required or _takes_null(field.type):
            found[name] = _taken(each, field.type, place, ignored)
    return found


def _meant(name: str, fields: Iterable[str], ignored: Ignored) -> str:
    near = ignored.kinds["unknown"] < MOST_TOLD and difflib.get_close_matches(name[:MAX_PLACE_CHARS], fields, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _form(shape: inspect.Type, value: Any) -> inspect.Type:
    """Returns which member of a union the value is to be, of those that have parts."""
    while isinstance(shape, inspect.Metadata):
        shape = shape.type
    if isinstance(shape, inspect.UnionType):
        for each in shape.types:
            form = _form(each, value)
            if isinstance(form, inspect.ListType) and isinstance(value, list):
                return form
            is_object = isinstance(form, inspect.StructType) and isinstance(value, dict)
            if is_object and value.get(form.tag_field) == form.tag:  # type: ignore[attr-defined]  # or both are None
                return form
    return shape


def _has_fields(shape: inspect.Type) -> bool:
    """Returns whether a value of this shape may be, or hold, an object of ours."""
    if isinstance(shape, inspect.Metadata):
        return _has_fields(shape.type)
    if isinstance(shape, inspect.UnionType):
        return any(map(_has_fields, shape.types))
    return isinstance(shape, inspect.StructType) or (
        isinstance(shape, inspect.ListType) and _has_fields(shape.item_type)
    )


def _takes_null(shape: inspect.Type) -> bool:
    if isinstance(shape, inspect.Metadata):
        return _takes_null(shape.type)
    if isinstance(shape, inspect.UnionType):
        return any(map(_takes_null, shape.types))
    return isinstance(shape, inspect.NoneType | inspect.AnyType)


@cache
def _shape(kind: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(kind)


@cache
def _marks(kind: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """Returns the fields that have an effect declared, or may hold some, each with what is declared."""
    form = _shape(kind)
    assert isinstance(form, inspect.StructType)
    declared = {
        field.name: (field.type.extra_json_schema or {}) if isinstance(field.type, inspect.Metadata) else {}
        for field in form.fields
    }
    holds = {field.name for field in form.fields if _has_fields(field.type)}
    return {name: mark for name, mark in declared.items() if "x-effect" in mark or name in holds}
