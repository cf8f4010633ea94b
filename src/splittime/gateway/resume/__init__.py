"""A stream that breaks off in its middle goes on at another upstream."""
