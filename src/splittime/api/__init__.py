"""The OpenAI-compatible API as values: request bodies, their checks, answers, the OpenAPI page. No sockets."""
