"""Fields of vLLM's and llama.cpp's own APIs that this server takes at the value that changes nothing.

Clients made for those servers send them at their defaults. Any other value is refused by name, with what to do instead
(`FOREIGN`). With `--strict` they are refused whatever their value. Those that have an effect here are in `schema`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A body in which every field means something."""


def no_effect(description: str) -> Meta:
    """A field that is taken because ordinary clients send it and its API promises nothing that could be missed."""
    return Meta(description=f"No effect: {description}", extra_json_schema={"x-effect": "none"})


class ForeignFields(Strict, kw_only=True):
    """Those of both generation endpoints: first vLLM's, then llama.cpp's. `ChatBody` has those of chats alone."""

    best_of: Annotated[Literal[1] | None, no_effect("each answer is the only one drawn for it.")] = None
    use_beam_search: Annotated[Literal[False] | None, no_effect("there is no beam search.")] = None
    length_penalty: Annotated[float | None, no_effect("of beam search, which there is not.")] = None
    skip_special_tokens: Annotated[Literal[True] | None, no_effect("texts are without them.")] = None
    spaces_between_special_tokens: Annotated[bool | None, no_effect("texts are without special tokens.")] = None
    include_stop_str_in_output: Annotated[Literal[False] | None, no_effect("the text ends before it.")] = None
    detokenize: Annotated[Literal[True] | None, no_effect("every answer has its text.")] = None
    return_tokens_as_token_ids: Annotated[Literal[False] | None, no_effect("logprobs name tokens by text.")] = None
    bad_words: Annotated[list[Any], Meta(max_length=0)] | None = None
    prompt_logprobs: None = None
    truncate_prompt_tokens: None = None
    allowed_token_ids: None = None
    logits_processors: None = None
    structured_outputs: None = None
    guided_json: None = None
    guided_regex: None = None
    guided_choice: None = None
    guided_grammar: None = None
    guided_decoding_backend: None = None
    guided_whitespace_pattern: None = None
    kv_transfer_params: None = None
    vllm_xargs: None = None
    request_id: None = None
    cache_prompt: Annotated[Literal[True] | None, no_effect("every prompt's prefix is looked up.")] = None
    n_predict: None = None
    repeat_penalty: Annotated[Literal[1] | None, no_effect("1 is off.")] = None
    mirostat: Annotated[Literal[0] | None, no_effect("0 is off.")] = None
    typical_p: Annotated[Literal[1] | None, no_effect("1 is off.")] = None
    dynatemp_range: Annotated[Literal[0] | None, no_effect("0 is off.")] = None
    xtc_probability: Annotated[Literal[0] | None, no_effect("0 is off.")] = None
    dry_multiplier: Annotated[Literal[0] | None, no_effect("0 is off.")] = None
    timings_per_token: Annotated[Literal[False] | None, no_effect("X-Include-Timing asks for times.")] = None


_NO_FORM = "answers cannot be held to a form; ask for it in the prompt"
FOREIGN = {
    "best_of": "no answers are drawn to choose from; n asks for several",
    "use_beam_search": "beam search is not supported; temperature 0 takes the likeliest token at each place",
    "skip_special_tokens": "texts are without special tokens; return_token_ids gives the ids of all",
    "include_stop_str_in_output": "the text ends before a stop string; append it",
    "detokenize": "every answer has its text; return_token_ids gives its ids beside it",
    "return_tokens_as_token_ids": "logprobs name tokens by their text; return_token_ids gives the ids",
    "bad_words": "words cannot be forbidden; logit_bias -100 forbids a token",
    "prompt_logprobs": "echo with logprobs gives those of the prompt, at /v1/completions",
    "truncate_prompt_tokens": "prompts are never cut; /tokenize counts and cuts them",
    "allowed_token_ids": "tokens cannot be listed; logit_bias 100 and -100 chooses among them",
    "logits_processors": "logits processors are not supported; logit_bias is",
    "structured_outputs": _NO_FORM,
    "guided_json": _NO_FORM,
    "guided_regex": _NO_FORM,
    "guided_choice": _NO_FORM,
    "guided_grammar": _NO_FORM,
    "guided_decoding_backend": _NO_FORM,
    "guided_whitespace_pattern": _NO_FORM,
    "kv_transfer_params": "KV caches are not transferred between servers",
    "vllm_xargs": "there are no extensions to read it",
    "request_id": "the header X-Request-Id names a request",
    "cache_prompt": "prefixes are shared; a cache_salt of its own keeps a request from finding any",
    "n_predict": "max_tokens says how many tokens",
    "repeat_penalty": "repetition_penalty, presence_penalty and frequency_penalty are the ones here",
    "mirostat": "mirostat is not supported; temperature, top_p, top_k and min_p are",
    "typical_p": "typical_p is not supported; temperature, top_p, top_k and min_p are",
    "dynatemp_range": "the temperature does not change within an answer",
    "xtc_probability": "XTC is not supported; temperature, top_p, top_k and min_p are",
    "dry_multiplier": "DRY is not supported; repetition_penalty and frequency_penalty are",
    "timings_per_token": "the header X-Include-Timing, or stream_options.include_timing, asks for times",
    "echo": "a chat is not echoed; /v1/completions echoes its prompt",
    "include_reasoning": "reasoning is part of the text; it is not told apart",
    "chat_template": "the model's own template is used; chat_template_kwargs are its variables",
    "documents": "no template is given documents but as chat_template_kwargs",
    "mm_processor_kwargs": "only texts are supported",
}
