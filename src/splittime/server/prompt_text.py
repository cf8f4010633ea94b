"""What is to be tokenised for a request, and what can be said of its length before it is.

A prompt given as token ids has its length. A text has a least number of tokens, which is proved (`engine.token_bound`):
what cannot fit by it is refused at once. And it has a likely number, learnt from the texts before it
(`Admission.estimate_tokens`), which counts in the queue until the true one is known. A long text counts as nothing
until then: it waits among its like (`engine.text_workers`), and may be refused in the end.
"""

from splittime.engine.text_work import Encode, Render, TextWork
from splittime.engine.text_workers import SHORT_CHARS
from splittime.engine.token_bound import num_bytes, require_at_most
from splittime.engine.tokenizer import Tokenizer
from splittime.server.admission import Admission
from splittime.server.config import ModelInfo
from splittime.server.params import Ask


class PromptText:
    """work: what makes token ids of it; None for a prompt that is `token_ids` already."""

    def __init__(self, ask: Ask, model: ModelInfo, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._most_tokens = tokenizer, max(0, model.max_model_len - 1)
        texts = tuple(prompt for prompt in ask.prompts if isinstance(prompt, str))
        self.token_ids = tuple(prompt for prompt in ask.prompts if not isinstance(prompt, str))
        self.work: TextWork | None = None
        if ask.is_chat:
            self.work = Render(ask.messages, ask.template_options, most_tokens=self._most_tokens)
        elif texts:
            self.work = Encode(texts, most_tokens=self._most_tokens)

    @property
    def is_long(self) -> bool:
        return self.work is not None and self.work.size > SHORT_CHARS

    def require_possible(self) -> None:
        """Raise `RequestError` if a text cannot fit the model's context. A chat passes: its template decides how
        long it becomes."""
        bound = self._tokenizer.bound
        if isinstance(self.work, Encode) and bound is not None:
            for text in self.work.texts:
                require_at_most(bound.least_tokens(text), self._most_tokens)

    def estimate_tokens(self, admission: Admission) -> int:
        """Returns the tokens of all its prompts together, as far as they are known now."""
        if self.work is None:
            return sum(map(len, self.token_ids))
        if self.is_long:
            return 0
        sizes = [num_bytes(text) for text in self.work.texts] if isinstance(self.work, Encode) else [self.work.size]
        return sum(min(admission.estimate_tokens(size), self._most_tokens) for size in sizes)
