"""The backend for an NVIDIA card: kernels in Triton over the paged KV cache, cuBLAS for dense products."""
