"""Distributions by their text: `512`, `uniform:LOW:HIGH`, `lognormal:MEAN:CV`, `exponential:MEAN`.

Each is drawn by inversion, `at(u)` for uniform u, so that a spread of u (`randomness.spread`) covers its whole range.
With mean m and coefficient of variation c, the log-normal's logarithm has variance s^2 = ln(1 + c^2) and mean
ln m - s^2 / 2.

How long prompts and answers are comes from them, or from a file's rows, cut to what the model can hold. A request that
does not fit `max_model_len` is cut in proportion, prompt and answer alike, and counted: a load that is not the one
asked for must say so (`Fitter.note`).

Where all chance in a schedule comes from: streams of PCG64, one for each purpose, named by the seed and words.

Streams of different names are independent, so that another rate draws the same prompts, and more warm-up leaves what is
measured as it was. Inversion gives the same ranks for the same seed at another rate or mean.

What synthetic prompts are made of, token by token, and the salt that keeps a prefix cache from hitting by accident.

Token ids are drawn from the middle of the vocabulary: special ids stand at its ends (Mistral's first 768, Gemma's first
hundred or so; Llama 3's last 256, DeepSeek's last 1,280). Where a server takes no ids, words stand for tokens: about
one token each, not exactly.

A salt is a prompt's first tokens or characters, drawn from the seed, the run's salt and the prompt's own name. Blocks
are found by their prefix, so one differing token at the start makes the whole prompt a new one.
"""

import math
from collections.abc import Callable
from hashlib import blake2b
from statistics import NormalDist
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.random import PCG64, Generator, SeedSequence
from numpy.typing import NDArray

from splittime.core.errors import ConfigError

Floats = NDArray[np.float64]
Lengths = NDArray[np.int64]
SALT_TOKENS = 8
MIN_VOCAB_SIZE = 16
MAX_TOKENS = 250_000_000  # two gigabytes
_MOST_SPECIAL_AT_START = 1000

Ids = NDArray[np.uint32]

_WORDS = """
about after again all also and any around ask away back because been before began between both bring but by
came can change city close cold come could country cut day did different does done down each early earth end
every eye face family far father feet few find first follow food for form found four from garden gave get girl
give going good great ground group grow had half hand hard has have head hear help here high home house how
"""


def bit_stream(seed: int, *name: str) -> PCG64:
    """Returns random bits: the same for the same seed and name, on every machine."""
    words = blake2b("\0".join(name).encode(), digest_size=16).digest()
    return PCG64(SeedSequence([seed, *np.frombuffer(words, dtype="<u4").tolist()]))


def stream(seed: int, *name: str) -> Generator:
    return Generator(bit_stream(seed, *name))


def spread(rng: Generator, count: int) -> Floats:
    """Uniform numbers in [0, 1) in random order, exactly one in each of `count` equal parts: they reach both ends."""
    return np.asarray((rng.permutation(count) + rng.random(count)) / max(1, count))


def uniform(rng: Generator, count: int, evenly: bool) -> Floats:
    return spread(rng, count) if evenly else rng.random(count)


FORMS = "N, uniform:LOW:HIGH, lognormal:MEAN:CV or exponential:MEAN"
MAX_VALUE = 1e9
_NUM_NUMBERS = {"fixed": 1, "uniform": 2, "lognormal": 2, "exponential": 1}


class Distribution(msgspec.Struct, frozen=True):
    """`first` and `second` are the numbers of its text."""

    kind: str
    first: float
    second: float = 0.0

    @property
    def mean(self) -> float:
        return (self.first + self.second) / 2 if self.kind == "uniform" else self.first

    def at(self, u: Floats) -> Floats:
        """The values below which a share of u in [0, 1) of all lie."""
        return _INVERSES[self.kind](self, u)

    def whole_at(self, u: Floats) -> NDArray[np.int64]:
        """As whole numbers of at least 1; the uniform's ends are both as likely as what is between them."""
        if self.kind == "uniform":
            low, high = round(self.first), round(self.second)
            return (low + np.floor(u * (high - low + 1))).astype(np.int64)
        return np.maximum(1, np.rint(self.at(u))).astype(np.int64)


def _lognormal(dist: Distribution, u: Floats) -> Floats:
    variance = math.log1p(dist.second**2)
    normal = NormalDist(math.log(dist.first) - variance / 2, math.sqrt(variance))
    inside = np.clip(u, 2.0**-54, 1 - 2.0**-53)
    return np.array([math.exp(normal.inv_cdf(one)) for one in inside.tolist()])


_INVERSES: dict[str, Callable[[Distribution, Floats], Floats]] = {
    "fixed": lambda dist, u: np.full(len(u), dist.first),
    "uniform": lambda dist, u: dist.first + u * (dist.second - dist.first),
    "lognormal": _lognormal,
    "exponential": lambda dist, u: -dist.first * np.log1p(-u),
}


def parse_distribution(text: str, param: str, lowest: float = 0.0) -> Distribution:
    """Raises `ConfigError` for a text that is none, or one that goes below `lowest`."""
    kind, *numbers = ("fixed", text) if ":" not in text else text.split(":")
    values = [_number(one) for one in numbers]
    if kind not in _NUM_NUMBERS or len(values) != _NUM_NUMBERS[kind] or any(one is None for one in values):
        raise ConfigError(f"{param} {text!r} is no distribution", param=param, value=text, limit=FORMS, hint=FORMS)
    dist = Distribution(kind, *(one for one in values if one is not None))
    _check(dist, text, param, lowest)
    return dist


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _check(dist: Distribution, text: str, param: str, lowest: float) -> None:
    if not lowest <= dist.first <= MAX_VALUE:
        limit = f"{lowest:g} to {MAX_VALUE:g}"
        raise ConfigError(f"{param} {text!r} is out of range", param=param, value=text, limit=limit, hint=limit)
    if dist.kind == "uniform" and not dist.first <= dist.second <= MAX_VALUE:
        hint = "The first number is the lower end, the second the upper."
        raise ConfigError(f"{param} {text!r} has its ends the wrong way round", param=param, value=text, hint=hint)
    if dist.kind == "lognormal" and not (dist.first > 0 and 0 < dist.second <= 100):
        hint = "The second number is the coefficient of variation, above 0; for no variation give the number alone."
        raise ConfigError(f"{param} {text!r} is no log-normal distribution", param=param, value=text, hint=hint)


MIN_MODEL_LEN = 2


class Fitter:
    """Cuts lengths to the model's limit, and counts what it cut."""

    def __init__(self, max_model_len: int | None) -> None:
        if max_model_len is not None and max_model_len < MIN_MODEL_LEN:
            raise ConfigError("no request fits", param="max_model_len", value=max_model_len, limit=MIN_MODEL_LEN)
        self.max_model_len = max_model_len
        self.num_cut = 0

    def fit(self, inputs: Lengths, outputs: Lengths) -> tuple[Lengths, Lengths]:
        """Both at least 1, together at most the limit; what fits is not touched."""
        inputs, outputs = np.maximum(1, inputs), np.maximum(1, outputs)
        limit = self.max_model_len
        if limit is None:
            return inputs, outputs
        too_long = inputs + outputs > limit
        self.num_cut += int(too_long.sum())
        shorter = np.clip(inputs * limit // (inputs + outputs), 1, limit - 1)
        return np.where(too_long, shorter, inputs), np.where(too_long, limit - shorter, outputs)

    def note(self) -> list[str]:
        if not self.num_cut:
            return []
        return [f"{self.num_cut} requests were longer than max_model_len {self.max_model_len} and were cut to it"]


class LengthRows(NamedTuple):
    """Lengths of real requests; prompt and answer of one row belong together."""

    inputs: Lengths
    outputs: Lengths

    def scaled(self, scale: float) -> "LengthRows":
        return LengthRows(*(np.maximum(1, np.rint(one * scale)).astype(np.int64) for one in self))

    def draw(self, rng: Generator, count: int, evenly: bool) -> "LengthRows":
        """Returns rows by chance; `evenly` takes them spread over the order of their prompts' lengths."""
        order = np.argsort(self.inputs, kind="stable")
        chosen = order[(uniform(rng, count, evenly) * len(order)).astype(np.int64)]
        return LengthRows(self.inputs[chosen], self.outputs[chosen])


def draw_lengths(
    inputs: Distribution, outputs: Distribution, rng: Generator, count: int, evenly: bool = False
) -> LengthRows:
    """Independent of each other; `evenly` spreads both over their whole range."""
    input_at = uniform(rng, count, evenly)
    return LengthRows(inputs.whole_at(input_at), outputs.whole_at(uniform(rng, count, evenly)))


def check_fixed(inputs: Distribution, outputs: Distribution, max_model_len: int | None) -> None:
    """Lengths that never fit are refused; those that sometimes do not are cut."""
    if max_model_len is None:
        return
    least = sum(round(one.first) for one in (inputs, outputs) if one.kind in ("fixed", "uniform"))
    if least > max_model_len:
        raise ConfigError(
            f"prompts and answers together have {least} tokens or more; the model holds {max_model_len}",
            param="input_tokens",
            value=least,
            limit=max_model_len,
            hint="Make --input-tokens or --output-tokens smaller.",
        )


class Alphabet(msgspec.Struct, frozen=True):
    """Symbols [low, high). `symbols` are shared objects: a prompt of a million tokens costs 8 bytes for each."""

    low: int
    high: int
    symbols: NDArray[Any]

    def draw(self, rng: Generator, count: int) -> Ids:
        if count > MAX_TOKENS:
            hint = "Make the run shorter, or give --length-scale below 1."
            what = f"{count:,} tokens of prompts are too many to be drawn beforehand"
            raise ConfigError(what, param="num_requests", value=count, limit=MAX_TOKENS, hint=hint)
        return rng.integers(self.low, self.high, count, dtype=np.uint32)

    def prompt(self, ids: Ids) -> tuple[int, ...] | str:
        chosen = self.symbols[ids].tolist()
        return " ".join(chosen) if isinstance(self.symbols[self.low], str) else tuple(chosen)

    def text(self, ids: Ids) -> str:
        return " ".join(map(str, self.symbols[ids].tolist()))


def token_ids(vocab_size: int | None) -> Alphabet:
    """Ids away from the vocabulary's ends."""
    if vocab_size is None:
        hint = "Give --prompt-form text or chat."
        raise ConfigError("the size of the server's vocabulary is not known", param="prompt_form", hint=hint)
    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"a vocabulary of {vocab_size} has too few ids", param="vocab_size", value=vocab_size, limit=MIN_VOCAB_SIZE
        )
    low = min(_MOST_SPECIAL_AT_START, max(3, vocab_size // 32))
    return Alphabet(low, vocab_size - max(1, vocab_size // 50), np.arange(vocab_size).astype(object))


def words() -> Alphabet:
    known = _WORDS.split()
    return Alphabet(0, len(known), np.array(known, dtype=object))


class Salt(msgspec.Struct, frozen=True):
    """`run` differs between runs that are to find nothing of each other; `is_off` where reuse is asked for."""

    seed: int
    run: str | None = None
    is_off: bool = False

    def ids(self, alphabet: Alphabet, *name: str, count: int = 1) -> Ids:
        """`count` rows of the first tokens of prompts of this name."""
        rng = stream(self.seed, "salt", self.run or "", *name)
        return alphabet.draw(rng, count * SALT_TOKENS).reshape(count, SALT_TOKENS)

    def text(self, *name: str) -> str:
        """The first characters of a prompt; empty if off."""
        if self.is_off:
            return ""
        name_text = "\0".join((str(self.seed), self.run or "", *name))
        return f"[{blake2b(name_text.encode(), digest_size=6).hexdigest()}] "

    def put_on(self, ids: Ids, salt_ids: Ids, at: int = 0) -> None:
        """Overwrite, in place, the tokens from `at` on: the length stays as it was."""
        if not self.is_off:
            room = ids[at : at + SALT_TOKENS]
            room[:] = salt_ids[: len(room)]


class BlockIds:
    """Token ids of the blocks of a trace: the same block id gives the same tokens, in any order, within one salt.

    A block has a place of its own in one stream of bits. Raw words are scaled to the alphabet, so that a place is as
    long for every block: with 32 bits for a token, no symbol is likelier than another by more than 1 in 10,000.
    """

    def __init__(self, alphabet: Alphabet, salt: Salt, tokens_per_block: int, name: str) -> None:
        run = "" if salt.is_off else f"salted {salt.run or ''}"
        self._bits = bit_stream(salt.seed, "blocks", run, name)
        self._at_word = 0
        self._alphabet = alphabet
        self._words_per_block = (tokens_per_block + 1) // 2

    def of(self, first_id: int, count: int) -> Ids:
        """A row for each of `count` consecutive blocks; jumping costs more than drawing, so they are drawn at once."""
        begin, num_words = first_id * self._words_per_block, count * self._words_per_block
        self._bits.advance((begin - self._at_word) % 2**128)
        self._at_word = begin + num_words
        halves = self._bits.random_raw(num_words).astype("<u8", copy=False).view("<u4").astype(np.uint64)
        width = np.uint64(self._alphabet.high - self._alphabet.low)
        ids = ((halves * width) >> np.uint64(32)).astype(np.uint32) + np.uint32(self._alphabet.low)
        return ids.reshape(count, -1)
