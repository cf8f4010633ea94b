"""Weights: reading safetensors, and fitting checkpoint tensors into the decoder's packed ones."""
