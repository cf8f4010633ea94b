"""Text in prompts that serves nothing: a `sampler` of those that pass, and its faults in `words`."""
