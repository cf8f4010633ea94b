"""The logical KV cache: which block belongs to whom, and which prefixes are still there. No tensors."""
