"""Responses that upstreams keep: which upstream has which, and what else is asked for them than to make one."""
