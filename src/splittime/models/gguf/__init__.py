"""GGUF, the one-file format of llama.cpp: container (`file`), blocks of integers (`blocks`), names, config, weights.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. `file` and `cursor` know no torch, so
that the server process, which has none, reads the tokenizer out of the same file (`assemble.model_source`).
"""
