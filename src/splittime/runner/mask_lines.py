"""The bits of masks, as the parser writes them and the sampler reads them."""

from collections.abc import Sequence

import llguidance
import numpy as np


class MaskLines:
    """Room for some masks. words: uint32 [N, vocab / 32], a bit for each token."""

    def __init__(self, count: int, vocab_size: int, eos_token_id: int) -> None:
        self.words = np.zeros((count, -(-vocab_size // 32)), np.uint32)
        self._bits, self._vocab_size, self._eos_token_id = self.words.reshape(-1).data, vocab_size, eos_token_id
        self._begin, self._num_bytes = self.words.ctypes.data, self.words.strides[0]

    def fill(self, matchers: Sequence[llguidance.LLMatcher], parser: llguidance.LLExecutor | None) -> None:
        """Asks each what may come where it stands; `parser` asks all at once."""
        if parser is not None:
            asked = [(one, line) for line, one in enumerate(matchers)]
            parser.unsafe_compute_mask_ptr(asked, self._begin, self._num_bytes, len(self.words))
            return
        for line, matcher in enumerate(matchers):
            self.ask(line, matcher)

    def put_ends(self, line: int, matcher: llguidance.LLMatcher, end_token_ids: tuple[int, ...]) -> bool:
        """Allows all tokens that end a request where the answer could end and none elsewhere, whatever the parser takes
        for its end. Returns whether one was taken away."""
        bits, begin, may_end, took = self._bits, line * self.words.shape[1], matcher.is_accepting(), 0
        for token in (self._eos_token_id, *end_token_ids):
            if token < self._vocab_size:
                word, bit = begin + token // 32, 1 << token % 32
                took |= bits[word] & bit
                bits[word] &= ~bit
        for token in end_token_ids if may_end else ():
            if token < self._vocab_size:
                bits[begin + token // 32] |= 1 << token % 32
        return bool(took)

    def ask(self, line: int, matcher: llguidance.LLMatcher) -> None:
        """Puts into this line what may come where the matcher stands."""
        matcher.unsafe_compute_mask_ptr(self._begin + line * self._num_bytes, self._num_bytes)
