"""What an upstream is told in the head of a request: its own key, never the client's, and what is left of the time. A
server of ours is told whose request it is: the tenant whose key came, whatever its client says in such a header."""

import time

from splittime.gateway.decoded_answer import USER_AGENT
from splittime.gateway.endpoints import OF_ANTHROPIC
from splittime.gateway.upstreams import Upstream
from splittime.web import http
from splittime.web.tenants import tenant_of, told_tenant

now_ns = time.monotonic_ns
TRACE_HEADERS = (b"traceparent", b"tracestate")
ANTHROPIC_HEADERS = (b"anthropic-version", b"anthropic-beta")
ANTHROPIC_VERSION = "2023-06-01"
ANTHROPIC_KEY = "sk-ant-api"  # begins one, which Anthropic does not take as a bearer's
SLO_HEADER = "x-llm-d-slo-ttft-ms"


def sent_headers(
    scope: http.Scope, upstream: Upstream, attempt_id: str, until_ns: int, first_token_by_ns: int | None
) -> dict[str, str]:
    """Returns the headers of one attempt. until_ns, first_token_by_ns: the deadlines."""
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",
        "user-agent": USER_AGENT,
        "x-request-id": attempt_id,
        "x-request-deadline-ms": _left_ms(until_ns),
    }
    is_anthropics = scope["path"] in OF_ANTHROPIC
    headers |= key_headers(upstream.key, is_anthropics=is_anthropics)
    if upstream.keeps_accounts:
        headers |= {"x-include-timing": "1", **told_tenant(tenant_of(scope))}
    if first_token_by_ns is not None:
        headers[SLO_HEADER] = _left_ms(first_token_by_ns)
    for name in (*TRACE_HEADERS, *(ANTHROPIC_HEADERS if is_anthropics else ())):
        value = http.header(scope, name)
        if value is not None and value.isascii() and value.isprintable():  # else no header of ours
            headers[name.decode()] = value
    return headers


def key_headers(key: str | None, *, is_anthropics: bool) -> dict[str, str]:
    """Returns how an upstream knows the gateway. is_anthropics: the path is one of Anthropic's API."""
    headers = {"anthropic-version": ANTHROPIC_VERSION} if is_anthropics else {}
    if key is None:
        return headers
    is_its_key = is_anthropics and key.startswith(ANTHROPIC_KEY)
    return headers | ({"x-api-key": key} if is_its_key else {"authorization": f"Bearer {key}"})


def _left_ms(until_ns: int) -> str:
    return str(max(1, (until_ns - now_ns()) // 1_000_000))
