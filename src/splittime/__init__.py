"""splittime: an LLM inference server that accounts for every nanosecond of every request."""
