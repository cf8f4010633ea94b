"""Which requests may go on at another upstream when their stream breaks off, and what that one is asked.

    token_ids   between splittime servers: the prompt is the first one's token ids with those of the answer so far. The
                first says them in its chunks (`return_token_ids`), for a chat too, so that the second needs no template
                and no tokenizer to stand where the first stood.
    text        between other servers, of a completion whose prompt is a text: the prompt is that text and the answer
                so far. Its tokens may be cut differently there: it goes on well, and is not promised to be the same.

What would not be the same is not continued: penalties that count an answer's tokens, a seed (draws go by their place in
the answer), logprobs, several answers, stop strings between splittime servers (a half of one may be held back). Only
fields that are known to mean the same at the other upstream are passed on; a request with any other is not continued.
"""

from typing import Any

import msgspec

from splittime.core.errors import RequestError
from splittime.gateway.config import UpstreamConfig
from splittime.gateway.endpoints import CHAT, COMPLETIONS, WITH_CHOICES
from splittime.gateway.forwarded import ForwardedRequest

TOKEN_IDS, TEXT = "token_ids", "text"
KEPT = frozenset(
    ("model", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
) | frozenset(
    ("logit_bias", "stop_token_ids", "ignore_eos", "priority", "cache_salt", "user", "safety_identifier", "metadata")
)
SETTLED = frozenset(("prompt", "max_tokens", "max_completion_tokens", "min_tokens", "return_token_ids", "n"))
OF_THE_TEMPLATE = frozenset(
    ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "reasoning_effort")
)
WITHOUT_EFFECT = {"echo": False, "logprobs": False, "presence_penalty": 0, "frequency_penalty": 0, "tools": []}
NO_STOP: tuple[Any, ...] = (None, "", [])


def body_of(request: ForwardedRequest) -> dict[str, Any]:
    """Returns the body's fields. It is an object, and no name stands in it twice: `forwarded` has seen to it."""
    try:
        fields: dict[str, Any] = msgspec.json.decode(request.body)
    except (msgspec.DecodeError, RecursionError) as error:  # of a field that nobody had to read before
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    return {name: value for name, value in fields.items() if value is not None}


def way_of(upstream: UpstreamConfig) -> str:
    return TOKEN_IDS if upstream.kind == "splittime" else TEXT


def why_not(path: str, body: dict[str, Any], way: str) -> str:
    """Returns why a stream of this request is not continued if it breaks off; "" if it is."""
    if path not in WITH_CHOICES:
        return "only chats and completions go on elsewhere"
    if way == TEXT and path == CHAT:
        return "only splittime servers tell where in its template a chat stood"
    if way == TEXT and not isinstance(body.get("prompt"), str):
        return "its prompt is not one text"
    if way == TOKEN_IDS and not _is_one(body.get("prompt", "")):
        return "it has several prompts"
    if way == TOKEN_IDS and path == COMPLETIONS and "max_tokens" not in body:
        return "it has no max_tokens, and the server's own is not known"
    if body.get("n", 1) != 1:
        return "it asks for several answers"
    if type(body.get("min_tokens", 0)) is not int:
        return "its min_tokens is no whole number"
    if "seed" in body and body.get("temperature") != 0:
        return "a seed's draws go by their place in the answer"
    return _unknown_field(body, way)


def _is_one(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(type(one) is int for one in prompt))


def _unknown_field(body: dict[str, Any], way: str) -> str:
    for name, value in body.items():
        is_known = name in KEPT or name in SETTLED or name in OF_THE_TEMPLATE
        if is_known or (name in WITHOUT_EFFECT and value == WITHOUT_EFFECT[name]):
            continue
        if name == "stop" and (way == TEXT or value in NO_STOP):
            continue
        return f"it has {name[:64]!r}, which another upstream cannot be asked to go on with"
    return ""


def telling(request: ForwardedRequest, body: dict[str, Any]) -> ForwardedRequest:
    """Returns the request that has its answer's token ids told."""
    encoded = msgspec.json.encode({**body, "return_token_ids": True})
    return msgspec.structs.replace(request, body=encoded)


def continued(
    request: ForwardedRequest, body: dict[str, Any], way: str, prompt: str | list[int], num_tokens: int
) -> ForwardedRequest:
    """Returns what another upstream is asked after so many tokens. prompt: the request's own and the answer so far."""
    fields = {name: value for name, value in body.items() if name in KEPT}
    fields |= {"prompt": prompt, "stream": True, "max_tokens": _left(body, num_tokens)}
    if fields["max_tokens"] is None:
        del fields["max_tokens"]
    if "min_tokens" in body:
        fields["min_tokens"] = max(0, body["min_tokens"] - num_tokens)
    if way == TOKEN_IDS:
        fields["return_token_ids"] = True
    elif body.get("stop") not in NO_STOP:
        fields["stop"] = body["stop"]
    return msgspec.structs.replace(request, path=COMPLETIONS, body=msgspec.json.encode(fields))


def most_tokens(body: dict[str, Any]) -> int | None:
    """Returns the most tokens that the answer may have; None for the rest of the context (-1), or the server's own."""
    told = body.get("max_completion_tokens", body.get("max_tokens"))
    return told if isinstance(told, int) and told >= 0 else None


def _left(body: dict[str, Any], num_tokens: int) -> int | None:
    most = most_tokens(body)
    if most is not None:
        return max(1, most - num_tokens)
    return -1 if "messages" in body or "max_tokens" in body else None
