"""What prompts carry for nothing: `faults` (of one request), `sampler` (of those that pass), `paths` (who tells it)."""
