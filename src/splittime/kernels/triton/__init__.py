"""The backend for one NVIDIA card: kernels in Triton over the paged KV cache, cuBLAS through torch for dense products."""
