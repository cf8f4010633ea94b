"""How much of the answers a drafter would have guessed right at the least, by the hashes that the books keep.

The books hold no text and no tokens, but a hash of each prompt and its answer up to every 16th token
(`ledger.prompt_parts`): a sum, so what two that follow each other differ by is a hash of the 16 tokens between them and
the 3 before. Such a *block* is guessed here as a drafter by suffix guesses tokens (Oliaro et al. 2024,
"SuffixDecoding"): by what followed where the block before it stood the last time. That is looked for in the request's
own prompt and answer, then in the answers to the same `cache_salt` that had ended when it began.

A drafter finds more, since 2 tokens are enough for it wherever they stood: a text that comes again is seen here only
where it lies in the same places of 16. So what is found is a lower bound, and often a low one.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from splittime.ledger.account import ClosedAccount
from splittime.ledger.prompt_parts import PREFIX_BYTES, PREFIX_TOKENS, prefix_list

HASHES = 1 << 8 * PREFIX_BYTES

Followers = dict[int, int]  # by block, the one that followed it the last time


def tokens_guessed(accounts: Sequence[ClosedAccount], has_corpus: bool) -> dict[str, int]:
    """Returns for each request how many tokens of its answer were in blocks that are guessed right. has_corpus: past
    answers count too."""
    found: dict[str, int] = {}
    corpora: dict[str, Followers] = {}
    ended: list[ClosedAccount] = sorted(accounts, key=lambda account: -account.end_ns)  # the next to end is the last
    for account in sorted(accounts, key=lambda account: account.start_ns):
        while has_corpus and ended and ended[-1].end_ns <= account.start_ns:
            _add_answer(ended.pop(), corpora)
        corpus = corpora.get(account.cache_salt, {})
        num_right = blocks_guessed(blocks_of(account), first_of_answer(account), corpus)
        found[account.request_id] = PREFIX_TOKENS * num_right
    return found


def blocks_of(account: ClosedAccount) -> list[int]:
    """Returns the hashes of the 16s of tokens of prompt and answer. Those of equal tokens differ by 1 at most: the
    sums' lower bits are not kept."""
    sums = [int.from_bytes(mark, "big") for mark in prefix_list(account.prefixes + account.answer_prefixes)]
    return [(after - before) % HASHES for before, after in pairwise([0, *sums])]


def first_of_answer(account: ClosedAccount) -> int:
    """Returns the number of the first block that has nothing of the prompt."""
    return -(-account.prompt_tokens // PREFIX_TOKENS)


def blocks_guessed(blocks: Sequence[int], first: int, corpus: Mapping[int, int]) -> int:
    """Returns how many blocks from the first one on were what had followed the block before them the last time that it
    stood in the text, or else in the corpus."""
    followers: Followers = {}
    num_right = 0
    for place, (before, block) in enumerate(pairwise(blocks), 1):
        if place >= first:
            guess = followers.get(_key(followers, before), corpus.get(_key(corpus, before)))
            num_right += guess is not None and _is_same(guess, block)
        followers[_key(followers, before)] = block
    return num_right


def _add_answer(account: ClosedAccount, corpora: dict[str, Followers]) -> None:
    corpus = corpora.setdefault(account.cache_salt, {})
    for before, block in pairwise(blocks_of(account)[first_of_answer(account) :]):
        corpus[_key(corpus, before)] = block


def _key(followers: Mapping[int, int], block: int) -> int:
    """Returns the hash under which such a block is known; its own where it is new."""
    near = (block, (block + 1) % HASHES, (block - 1) % HASHES)
    return next((one for one in near if one in followers), block)


def _is_same(one: int, other: int) -> bool:
    return (one - other + 1) % HASHES <= 2
