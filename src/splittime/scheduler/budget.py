"""What one step may still compute: tokens, and how prompts are cut to fit them."""


class StepBudget:
    """`tokens` left in the step. With chunking, a prompt takes what is left; without, it goes whole or not at all,
    except that one prompt longer than the whole budget may go as the step's only prefill."""

    __slots__ = ("enable_chunked_prefill", "has_prefill", "tokens")

    def __init__(self, tokens: int, enable_chunked_prefill: bool) -> None:
        self.tokens = tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.has_prefill = False

    def chunk(self, num_pending: int) -> int:
        """How many of a request's pending tokens fit now; 0: none."""
        if self.enable_chunked_prefill:
            return min(num_pending, self.tokens)
        fits = num_pending <= self.tokens or not self.has_prefill
        return num_pending if fits and self.tokens > 0 else 0

    def spend(self, num_tokens: int) -> None:
        self.tokens = max(self.tokens - num_tokens, 0)
        self.has_prefill = True
