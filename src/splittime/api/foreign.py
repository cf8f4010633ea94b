"""What is refused by name, and what to do instead: fields of our bodies at a value that would change the answer
(`UNSUPPORTED`; `RESPONSES_UNSUPPORTED` of the Responses API's), and fields of other servers' APIs that our bodies do
not have (`WAYS_OUT`). Of these, what is only a hint is taken, with a notice that says why it has no effect (`HINTS`).
"""

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
    "repeat_penalty": "repetition_penalty, presence_penalty and frequency_penalty are the ones here",
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
