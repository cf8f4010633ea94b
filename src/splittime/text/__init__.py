"""Text to token ids and back: tokenizers, chat templates, detokenising, stop strings, the processes that do it."""
