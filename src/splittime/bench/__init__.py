"""Load for any OpenAI-compatible server, over HTTP alone: what is sent when, and what became of it."""
