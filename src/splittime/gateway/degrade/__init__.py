"""A lesser answer in place of a refusal, while the queue is long; each says that it is one, and why."""
