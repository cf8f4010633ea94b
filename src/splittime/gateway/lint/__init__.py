"""Text in prompts that serves nothing: `faults` of one request, and a `sampler` of those that pass."""
