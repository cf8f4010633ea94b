"""The gateway: HTTP in, HTTP out, in front of any OpenAI-compatible servers, with one account a request."""
