"""A vocabulary to try grammars on: the packaged model's, with marks added to it as tokens."""

from pathlib import Path

import llguidance
import tokenizers

import splittime


def vocabulary(*added: str) -> tuple[tokenizers.Tokenizer, llguidance.LLTokenizer]:
    """Returns the tokenizer, and the same as grammars know it."""
    folder = Path(splittime.__file__).parent / "packaged" / "code"
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in added])
    return backend, llguidance.LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size())
