"""What a prompt is made of, in a few numbers: parts cut by their content, each with a hash.

A part ends where a hash of the last `WINDOW` tokens is small, so that the same text falls into the same parts wherever
it stands: a JSON blob that comes after a longer greeting keeps all its parts but, at most, its first and its last.
(Content-defined chunking, as in LBFS, Muthitacharoen et al., SOSP 2001.) A cut within `MIN_TOKENS` of the one before is
left out, or a run of equal tokens would be cut at each. A part's hash says whether two are the same, not what they say.

    mixed[i] = hash(tokens[i - WINDOW + 1 .. i])        cut after i if mixed[i] < 2**64 / ODDS
    part     = sum of mixed over the part, modulo 2**64, of which the upper `HASH_BITS` bits

So it depends on the part's own tokens and on the WINDOW - 1 before it, the end of the cut. It is the same in every
process (`hash()` is not), and small enough to be exact in JavaScript. Parts of equal hash are the same text but for
chance: a million different ones hold about 0.1 such pairs.

Beside the parts stand hashes of the prompt's beginnings, one every `PREFIX_TOKENS`: which prompts could share KV cache,
and up to where, to a block's exactness.

A *lookup* guesses a token by what followed the last tokens where they stood before in the same text (prompt lookup;
`runner.suffix_drafter` without past answers). Here it is asked of each token of an answer but the first, which the
prompt's own step gives, with all before it known: the longest end of 8, 4 or 2 tokens that stood before, and there the
token that followed the last time. So it is known of a server that guesses nothing how often it would be right.

    a b c d   x   a b c e        behind "a b" c is guessed, and right; behind "b c" d is guessed, and wrong

It takes some sorting of the text's tokens once the answer has ended, so it is counted for one request in `SAMPLED`,
chosen by its id, and of texts of `MOST_TOKENS` at most; what was not counted is None.
"""

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

import numpy as np

PromptParts = tuple[tuple[int, int, int], ...]  # (hash, start, num_tokens)

SHORT_TOKENS = 64  # prompts below this have no parts
MAX_TOKENS = 16_384  # what lies beyond has none either
WINDOW = 4
MIN_TOKENS = 16
ODDS = 48  # cuts come on average every ODDS + MIN_TOKENS = 64 tokens
HASH_BITS = 52
PREFIX_TOKENS = 16
PREFIX_BYTES = 6

# odd, so that each bit of a token counts in the upper bits: multiply-shift hashing (Dietzfelbinger et al., 1997)
_WEIGHTS = np.array([0x1F35A7BD8C2E6B13, 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D, 0x369DEA0F31A53F85], np.int64)
_SHIFT = np.uint64(29)
_THRESHOLD = np.uint64(2**64 // ODDS)


class PromptHashes(NamedTuple):
    """parts: contiguous from 0; () for fewer than `SHORT_TOKENS` tokens. prefixes: `PREFIX_BYTES` for each
    `PREFIX_TOKENS` whole tokens: a hash of all tokens up to there. total: of which the last of these is the upper
    bits, so that an answer's go on from it."""

    parts: PromptParts = ()
    prefixes: bytes = b""
    total: int = 0


NO_HASHES = PromptHashes()


def prompt_hashes(token_ids: Sequence[int]) -> PromptHashes:
    """Returns the hashes of the first `MAX_TOKENS` tokens."""
    count = len(token_ids)
    if count < PREFIX_TOKENS:
        return NO_HASHES
    if count > MAX_TOKENS:
        token_ids, count = token_ids[:MAX_TOKENS], MAX_TOKENS
    mixed = _mixed(_array(token_ids))
    sums = np.cumsum(mixed)[PREFIX_TOKENS - WINDOW :: PREFIX_TOKENS]
    return PromptHashes(_parts(mixed, count) if count >= SHORT_TOKENS else (), _prefixes(sums), int(sums[-1]))


def answer_hashes(prompt_ids: Sequence[int], answer_ids: Sequence[int], known: PromptHashes | None = None) -> bytes:
    """Returns the hashes of the beginnings that end within the answer, as `prompt_hashes` would give them for a prompt
    that goes on so. known: what it gave for this one, which is then not read again, however long it is."""
    num_known, count = len(prompt_ids) // PREFIX_TOKENS, min(len(prompt_ids) + len(answer_ids), MAX_TOKENS)
    if count // PREFIX_TOKENS <= num_known:
        return b""
    known = known or prompt_hashes(prompt_ids)
    begin = max(0, num_known * PREFIX_TOKENS - WINDOW + 1)
    rest = [*prompt_ids[begin:], *answer_ids[: count - len(prompt_ids)]]
    first = (num_known + 1) * PREFIX_TOKENS - WINDOW - begin
    return _prefixes((np.cumsum(_mixed(_array(rest))) + np.uint64(known.total))[first::PREFIX_TOKENS])


def salt_hash(salt: str) -> str:
    """Returns what tells a salt from others, and does not tell it."""
    return blake2b(salt.encode(), digest_size=PREFIX_BYTES).hexdigest() if salt else ""


def prefix_list(prefixes: bytes) -> list[bytes]:
    """Returns the hash of the first `PREFIX_TOKENS` tokens, of twice as many, ..."""
    return [prefixes[at : at + PREFIX_BYTES] for at in range(0, len(prefixes), PREFIX_BYTES)]


def _prefixes(sums: np.ndarray) -> bytes:
    """Sums of all windows up to each edge; each window holds `WINDOW` tokens in their order."""
    return sums.astype(">u8").view(np.uint8).reshape(-1, 8)[:, :PREFIX_BYTES].tobytes()


def _parts(mixed: np.ndarray, count: int) -> PromptParts:
    firsts = _first_windows(mixed)
    sums = np.add.reduceat(mixed, firsts).tolist()
    starts = [0, *[first + WINDOW - 1 for first in firsts[1:]]]
    parts = zip(sums, starts, [*starts[1:], count], strict=True)
    return tuple([(total >> 64 - HASH_BITS, start, end - start) for total, start, end in parts])


def _array(token_ids: Sequence[int]) -> np.ndarray:
    return np.frombuffer(struct.Struct(f"{len(token_ids)}q").pack(*token_ids), np.int64)


def _mixed(tokens: np.ndarray) -> np.ndarray:
    """uint64 [count - WINDOW + 1], of the windows that end at token WINDOW - 1 and after it."""
    mixed = np.correlate(tokens, _WEIGHTS).view(np.uint64)
    mixed ^= mixed >> _SHIFT  # or a part's sum would hardly depend on the order of its tokens
    return mixed


def _first_windows(mixed: np.ndarray) -> list[int]:
    """Returns for each part the index in `mixed` of the first window that is summed: 0, and after each cut but the
    last."""
    firsts, before = [0], -MIN_TOKENS
    for cut in (mixed[:-1] < _THRESHOLD).nonzero()[0].tolist():
        if cut - before >= MIN_TOKENS:
            firsts.append(cut + 1)
        before = cut
    return firsts


SAMPLED = 8
MOST_TOKENS = 8192  # of prompt and answer: two or three milliseconds
ENDS = (8, 4, 2)  # tokens that must have stood before, the longest first

_ODD = np.uint64(0x9E3779B97F4A7C15)
_LOOKUP_SHIFT = np.uint64(32)


class Lookup(NamedTuple):
    """guesses: tokens of the answer of which there was a guess; right: those of which it was what came."""

    guesses: int | None = None
    right: int | None = None


def is_sampled(request_id: str) -> bool:
    """Returns whether this request is counted: by its name alone, whatever it says and however long it took."""
    return crc32(request_id.encode()) % SAMPLED == 0


def sampled_lookup(request_id: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Lookup:
    """Returns what a lookup would have guessed of the answer; nothing where that is not counted."""
    if not is_sampled(request_id) or not answer_ids or len(prompt_ids) + len(answer_ids) > MOST_TOKENS:
        return Lookup()
    return lookup(prompt_ids, answer_ids)


def lookup(prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> Lookup:
    """Returns what a lookup would have guessed of each token of the answer but the first, all before it known."""
    tokens = np.array([*prompt_ids, *answer_ids], np.int64)
    guesses = np.full(len(tokens), -1, np.int64)  # by place: the place of the token that is guessed for it
    for length in ENDS:
        found = _followers(tokens, length)
        guesses = np.where(guesses < 0, found, guesses)
    asked = np.arange(len(tokens)) > len(prompt_ids)
    guessed = asked & (guesses >= 0)
    return Lookup(int(guessed.sum()), int((tokens[guesses] == tokens)[guessed].sum()))


def _followers(tokens: np.ndarray, length: int) -> np.ndarray:
    """Returns for each place the one that followed the last time that the `length` tokens before it stood, or -1."""
    found = np.full(len(tokens), -1, np.int64)
    if len(tokens) <= length:
        return found
    keys = _hashes(tokens, length)  # of the end at place + length
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    found[order[1:][same] + length] = order[:-1][same] + length
    return found


def _hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """uint64 [count - length], of the tokens from each place on; the last end has no token behind it."""
    values, count = tokens.view(np.uint64), len(tokens) - length
    mixed = np.zeros(count, np.uint64)
    for place in range(length):
        mixed = (mixed ^ values[place : place + count]) * _ODD
        mixed ^= mixed >> _LOOKUP_SHIFT
    return mixed
