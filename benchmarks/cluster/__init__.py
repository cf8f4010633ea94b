"""Many servers, and what they do together."""
