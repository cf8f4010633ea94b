"""A model that is a table: what follows depends on the last token alone. And an encoder of one byte a token."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from splittime.lab.quality.model import Dense, Reads, Sparse, chunks, log_softmax, pieces

VOCAB = 97


class Bytes:
    """Ids 1 to 96 of printable characters; 0 goes before each text where `bos` is set."""

    def __init__(self, bos: bool = False) -> None:
        self.bos = bos

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [1 + (ord(character) - 32) % (VOCAB - 1) for character in text]
        return [0, *ids] if self.bos and add_special_tokens else ids


class Table:
    """logits: [vocab, vocab], of what follows each token."""

    has_decode = True

    def __init__(self, logits, name="table", max_tokens=512, reads: Reads | None = None, answers=None) -> None:
        self.logprobs = log_softmax(np.asarray(logits, dtype=np.float32))
        self.name, self.vocab_size, self.max_tokens = name, len(logits), max_tokens
        self.facts = {"made of": "a table"}
        self.reads = Reads() if reads is None else reads
        self.answers = answers or {}
        self.asked: list[tuple[int, ...]] = []

    def predictions(self, token_ids, begin, decode_tokens):
        self.asked.append(tuple(token_ids))
        for chunk in chunks(len(token_ids) - 1, decode_tokens):
            for first, last in pieces(chunk, begin):
                yield Dense(first, self.logprobs[list(token_ids[first:last])])

    def continuations(self, prompt: Sequence[int], endings):
        found = []
        for ending in endings:
            whole = [prompt[-1], *ending]
            found.append(float(sum(self.logprobs[a, b] for a, b in pairwise(whole))))
        return found

    def generate(self, prompts, max_tokens, stop, tell):
        for number in range(len(prompts)):
            tell(number + 1)
        return [self.answers.get(prompt.split("Question: ")[-1].split("\n")[0], "none") for prompt in prompts]


class Telling(Table):
    """As a server tells it: the likeliest few alone, and nothing of what was read."""

    has_decode = False

    def __init__(self, logits, top=5, **more) -> None:
        super().__init__(logits, **more)
        self.reads, self.top = None, top

    def predictions(self, token_ids, begin, decode_tokens):
        for piece in super().predictions(token_ids, begin, 0):
            count = len(piece.logprobs)
            following = np.array([piece.logprobs[i, token_ids[piece.begin + 1 + i]] for i in range(count)])
            best = np.argsort(-piece.logprobs, axis=1)[:, : self.top]
            tops = [{int(t): float(line[t]) for t in ids} for line, ids in zip(piece.logprobs, best, strict=True)]
            yield Sparse(piece.begin, following, tops)


def random_logits(seed=0, spread=2.0):
    return np.random.default_rng(seed).normal(0, spread, (VOCAB, VOCAB))


def drawn_texts(logits, count, length, seed=1):
    """Documents that the table itself would write."""
    from splittime.lab.quality.documents import Document

    source = np.random.default_rng(seed)
    odds = np.exp(log_softmax(np.asarray(logits, dtype=np.float32)))
    found = []
    for number in range(count):
        ids = [1 + int(source.integers(VOCAB - 1))]
        while len(ids) < length:
            row = odds[ids[-1], 1:]
            ids.append(1 + int(source.choice(VOCAB - 1, p=row / row.sum())))
        found.append(Document(f"d{number}", "".join(chr(32 + token - 1) for token in ids)))
    return found


def silent(what: str, done: int, total: int) -> None:
    assert 0 <= done <= total
