"""What comes back, in JSON Schema: enough for a reader and for a generated client, checked against real answers in a
test. An answer may carry more fields than are listed."""

from typing import Any

Schema = dict[str, Any]


def _object(required: Schema, **optional: Schema) -> Schema:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
OBJECT: Schema = {"type": "object"}
_FINISH: Schema = {"enum": ["stop", "length", None]}
_IDS = _list(WHOLE)

_HEAD = {"id": TEXT, "created": WHOLE, "model": TEXT}
_CHOICE = {"index": WHOLE, "finish_reason": _FINISH}
_MORE = {
    "token_ids": {**_IDS, "description": "With return_token_ids."},
    "timing": {**OBJECT, "description": "With X-Include-Timing: the account, in nanoseconds."},
}
_BESIDE = {"timing": _MORE["timing"], "notices": {**_list(TEXT), "description": "What was changed to fit."}}


def _generation(kind: str, choice: Schema) -> Schema:
    head = {"object": {"const": kind}, **_HEAD, "choices": _list(choice), "usage": _ref("Usage")}
    return _object(head, **_BESIDE)


ANSWER_SCHEMAS: Schema = {
    "Usage": _object(
        {"prompt_tokens": WHOLE, "completion_tokens": WHOLE, "total_tokens": WHOLE},
        prompt_tokens_details=_object({"cached_tokens": WHOLE}),
    ),
    "Completion": _generation(
        "text_completion", _object({**_CHOICE, "text": TEXT, "logprobs": _or_null(OBJECT)}, **_MORE)
    ),
    "ChatCompletion": _generation(
        "chat.completion",
        _object(
            {**_CHOICE, "message": _object({"role": TEXT, "content": TEXT}), "logprobs": _or_null(OBJECT)}, **_MORE
        ),
    ),
    "ServerSentEvent": {
        **_object({"data": TEXT}),
        "description": "`data` is a chunk in OpenAI's form, an error, or [DONE] at the end.",
    },
    "Model": _object(
        {"id": TEXT, "object": {"const": "model"}, "created": WHOLE, "owned_by": TEXT, "max_model_len": WHOLE}
    ),
    "Models": _object({"object": {"const": "list"}, "data": _list(_ref("Model"))}),
    "Tokens": _object({"count": WHOLE, "max_model_len": WHOLE, "tokens": _IDS}, token_strs=_list(TEXT)),
    "Text": _object({"prompt": TEXT}),
    "Error": _object(
        {
            "error": _object(
                {"message": TEXT, "type": TEXT, "code": _or_null(TEXT)},
                param=_or_null(TEXT),
                value={},
                limit={},
                hint=TEXT,
                retry_after_s=NUMBER,
                reason=TEXT,
                queued=WHOLE,
                predicted_wait_ms=_or_null(NUMBER),
            )
        }
    ),
}
