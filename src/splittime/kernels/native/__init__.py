"""The CPU kernels in C++ (`csrc`), built at install without torch, and their binding: `library` (ctypes), `ops`."""
