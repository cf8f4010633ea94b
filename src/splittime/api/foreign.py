"""What is refused by name, and what to do instead: fields of our bodies at a value that would have an effect
(`UNSUPPORTED`; `RESPONSES_UNSUPPORTED` of the Responses API's), and fields of other servers' APIs that our bodies do
not have (`WAYS_OUT`).

`OF_SERVERS` lists what vLLM's and llama.cpp's APIs add to OpenAI's; docs/reference/foreign_fields.md shows what becomes
of each here.
"""

UNSUPPORTED = {
    **dict.fromkeys(
        (
            "guided_decoding_backend",
            "guided_whitespace_pattern",
        ),
        "there is one way to hold answers to a form; white space between JSON's parts is bounded",
    ),
    **dict.fromkeys(
        ("function_call", "functions"),
        "the older form of calls is not supported; tools and tool_choice are",
    ),
    "best_of": "no answers are drawn to choose from; n asks for several",
    "use_beam_search": "beam search is not supported; temperature 0 takes the likeliest token at each place",
    "skip_special_tokens": "texts are without special tokens; return_token_ids gives the ids of all",
    "include_stop_str_in_output": "the text ends before a stop string; append it",
    "detokenize": "every answer has its text; return_token_ids gives its ids beside it",
    "return_tokens_as_token_ids": "logprobs name tokens by their text; return_token_ids gives the ids",
    "prompt_logprobs": "echo with logprobs gives those of the prompt, at /v1/completions",
    "logits_processors": "logits processors are not supported; logit_bias is",
    "kv_transfer_params": "a server fetches blocks from those that its own kv_peers names",
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
    "chat_template": "the model's own template is used; chat_template_kwargs are its variables",
    "documents": "no template is given documents but as chat_template_kwargs",
    "mm_processor_kwargs": "only texts are supported",
    "add_special_tokens": "a prompt given as a text gets special tokens, a chat gets its template's; give token ids",
    "store": "answers are not stored",
    "suffix": "infilling is not supported",
    "refusal": "refusals are not supported",
    "annotations": "annotations are not supported",
    "audio": "audio is not supported",
    "modalities": "only text is supported",
    "type": "only text parts are supported",
    "prediction": "predicted outputs are not supported",
    "verbosity": "verbosity is not supported",
    "web_search_options": "web search is not supported",
}


RESPONSES_UNSUPPORTED = {
    "background": "a response is made while its client waits; stream it",
    "conversation": "conversations have no names; previous_response_id goes on from a stored response",
    "include": "nothing is added to a response; /v1/chat/completions answers with logprobs",
    "reasoning": "how much a model reasons is not set here; chat_template_kwargs at /v1/chat/completions may set it",
    "summary": "reasoning is not summed up; send what was reasoned as content, or leave it out",
    "encrypted_content": "what another server has encrypted cannot be read; leave the item out",
    "truncation": "an input is never cut; send fewer items, and /tokenize counts them",
    "top_logprobs": "/v1/chat/completions answers with logprobs",
    "max_tool_calls": "no tool is called here, so that none are counted; parallel_tool_calls false allows one call",
    "prompt": "prompts are not stored; send instructions and input",
    "context_management": "an input is never made shorter; send fewer items",
    "include_obfuscation": "events are not padded",
    "verbosity": "say in instructions how long an answer is to be",
    "tool_choice": 'auto, none, required and {"type": "function", "name": ..} are the choices',
    "annotations": "a text has no annotations",
    "logprobs": "a text is sent back without logprobs",
    "namespace": "functions have no namespaces",
    "caller": "calls are the model's own",
}

_ONE_SAMPLER = "temperature, top_p, top_k and min_p choose among the tokens"
_ONE_PENALTY = "repetition_penalty, presence_penalty and frequency_penalty are the ones here"
_IN_PROMPT = "write it into the prompt; infilling is not supported"

WAYS_OUT = {
    **dict.fromkeys(("dynatemp_exponent", "xtc_threshold", "mirostat_tau", "mirostat_eta"), _ONE_SAMPLER),
    **dict.fromkeys(("samplers", "min_keep", "top_n_sigma"), _ONE_SAMPLER),
    **dict.fromkeys(
        ("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "repeat_last_n"), _ONE_PENALTY
    ),
    **dict.fromkeys(("input_prefix", "input_suffix", "input_extra"), _IN_PROMPT),
    "prompt_embeds": "prompts are texts or token ids",
    "media_io_kwargs": "only texts are supported",
    "structural_tag": "guided_grammar holds an answer to any grammar in Lark's form",
    "grammar": "guided_grammar takes a grammar in Lark's form",
    "json_schema": "guided_json takes a JSON schema, and so does response_format",
    "n_keep": "truncate_prompt_tokens cuts a prompt before it is computed, and nothing does later",
    "n_indent": "guided_regex can hold lines to an indent",
    "n_probs": "logprobs says how many alternatives are listed",
    "post_sampling_probs": "logprobs are those of the model, before any sampling",
    "t_max_predict_ms": "the header X-Request-Deadline-Ms ends a request in time",
    "id_slot": "the scheduler chooses; cache_salt keeps prefixes apart",
    "return_tokens": "return_token_ids adds the ids",
    "return_progress": "the account says what was computed when; X-Include-Timing asks for it",
    "response_fields": "every answer has all its fields",
    "lora": "model names an adapter, one for a request",
    "image_data": "only texts are supported",
    "reasoning_format": "include_reasoning false leaves it out; --reasoning-parser none leaves it in the text",
    "thinking_token_budget": "/v1/chat/completions tells reasoning apart, and takes it",
    "parse_tool_calls": "the text is answered as it is",
}

OF_SERVERS = {
    "vLLM": (
        *("best_of", "use_beam_search", "top_k", "min_p", "repetition_penalty", "length_penalty", "stop_token_ids"),
        *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens", "detokenize"),
        *("spaces_between_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "allowed_token_ids"),
        *("bad_words", "echo", "suffix", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("documents", "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "priority", "request_id", "logits_processors"),
        *("return_tokens_as_token_ids", "return_token_ids", "cache_salt", "kv_transfer_params", "vllm_xargs"),
        *("include_reasoning", "thinking_token_budget", "prompt_embeds"),
    ),
    "llama.cpp": (
        *("dynatemp_range", "dynatemp_exponent", "top_k", "min_p", "n_predict", "n_indent", "n_keep", "typical_p"),
        *("repeat_penalty", "repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length"),
        *("dry_penalty_last_n", "dry_sequence_breakers", "xtc_probability", "xtc_threshold", "top_n_sigma"),
        *("mirostat", "mirostat_tau", "mirostat_eta", "grammar", "json_schema", "ignore_eos", "logit_bias"),
        *("n_probs", "min_keep", "t_max_predict_ms", "id_slot", "cache_prompt", "return_tokens", "samplers"),
        *("timings_per_token", "return_progress", "post_sampling_probs", "response_fields", "lora"),
        *("input_prefix", "input_suffix", "input_extra", "image_data", "chat_template_kwargs"),
        *("reasoning_format", "parse_tool_calls"),
    ),
}
