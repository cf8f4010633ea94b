"""Making checkpoints smaller: quantise or prune a layer at a time, write what other loaders read (`job.quantize`)."""
