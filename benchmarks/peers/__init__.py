"""The comparison with other engines on the same machine, in the same minutes. Start at `run.py`."""
