"""Which texts are tokenised on the event loop itself: those that surely take less than handing them to another process
costs. Only texts for a tokenizer that is known to be quick (`engine.text_pieces`) come into question, and no chats: a
template is a program that may never end.

How long a text takes is learnt from the texts before it, by the character, as an exponential mean; what a call costs
however short its text is counts as that of `FLOOR_CHARS`. A slow tokenizer so leaves the loop after its first text.
"""

INLINE_NS = 2_000_000  # the loop's other requests wait for so long
FLOOR_CHARS = 1024
WEIGHT = 0.2  # of the latest text


class InlineTokenizing:
    """max_chars: longer texts never are."""

    def __init__(self, max_chars: int) -> None:
        self.max_chars = max_chars
        self._ns_per_char = 0.0

    def takes(self, num_chars: int) -> bool:
        return num_chars <= self.max_chars and max(num_chars, FLOOR_CHARS) * self._ns_per_char <= INLINE_NS

    def learn(self, num_chars: int, took_ns: int) -> None:
        latest = took_ns / max(num_chars, FLOOR_CHARS)
        self._ns_per_char += WEIGHT * (latest - self._ns_per_char) if self._ns_per_char else latest
