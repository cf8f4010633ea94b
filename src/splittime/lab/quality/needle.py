"""A fact hidden at a depth of a long text, and asked for at its end: does the cache still give it back?

    text ... "The pass code of Kestrel is 48213." ... text "The pass code of Kestrel is"  ->  " 48213"

The score is the log-probability of the answer's tokens, so that models too small to answer are measured too: what
counts is the candidate's less the base's, over the same texts. One text with its fact is a trial, and the unit of
resampling; each is asked at every depth. Without the fact the same question is asked once more: what the fact adds to
the answer's probability says whether the base finds it at all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from splittime.lab.quality.documents import DocumentTokens, Encoder
from splittime.lab.quality.margins import Check, Margins, judge
from splittime.lab.quality.model import Model
from splittime.lab.quality.texts import Tell
from splittime.stats import paired
from splittime.stats.paired import BootstrapEstimate, Floats

DEPTHS = (0, 25, 50, 75, 100)
TRIALS = 12
NAMES = ("Kestrel", "Harbour", "Juniper", "Mistral", "Sextant", "Quarry", "Lantern", "Bramble", "Cobalt", "Tundra")


@dataclass(frozen=True)
class NeedleTrial:
    """prompts: one for each depth, then one without the fact."""

    prompts: tuple[tuple[int, ...], ...]
    answer: tuple[int, ...]


class Depth(msgspec.Struct, frozen=True, kw_only=True):
    """depth: % of the text before the fact. difference: nats of each token of the answer, candidate less base."""

    depth: int
    base: float
    candidate: float
    difference: BootstrapEstimate


class Needle(msgspec.Struct, frozen=True, kw_only=True):
    """found: nats of each token that the fact adds to the base's answer; without it the base would only guess."""

    length: int
    trials: int
    depths: tuple[Depth, ...]
    found: BootstrapEstimate


def trials(
    texts: Sequence[DocumentTokens], encoder: Encoder, prefix: tuple[int, ...], length: int
) -> list[NeedleTrial]:
    """Texts of `length` tokens with their facts; each begins with another document."""
    source = np.random.default_rng(0)
    return [
        _trial(_text_from(texts, number, length), encoder, prefix, length, NAMES[number % len(NAMES)], code)
        for number, code in enumerate(source.integers(10_000, 100_000, TRIALS).tolist())
    ]


def _trial(
    text: list[int], encoder: Encoder, prefix: tuple[int, ...], length: int, name: str, code: int
) -> NeedleTrial:
    asked = encoder.encode(f"\nThe pass code of {name} is", add_special_tokens=False)
    answer = encoder.encode(f" {code}", add_special_tokens=False)
    fact = [*asked, *answer, *encoder.encode(".\n", add_special_tokens=False)]
    room = max(0, length - len(prefix) - len(fact) - len(asked) - len(answer))
    hay = text[:room]
    places = [len(hay) * depth // 100 for depth in DEPTHS]
    told = [(*prefix, *hay[:place], *fact, *hay[place:], *asked) for place in places]
    return NeedleTrial((*told, (*prefix, *text[: room + len(fact)], *asked)), tuple(answer))


def _text_from(texts: Sequence[DocumentTokens], start: int, length: int) -> list[int]:
    """Returns `length` tokens of the documents, one after the other, from number `start` on."""
    endless = (token for number in range(start, start + len(texts)) for token in texts[number % len(texts)].ids)
    return list(islice(endless, length))


def ask(model: Model, asked: Sequence[NeedleTrial], tell: Tell) -> Floats:
    """[trials, depths + 1]: the log-probability of a token of the answer, the last without the fact."""
    rows = []
    for number, trial in enumerate(asked):
        tell(f"needle, {model.name}", number, len(asked))
        scores = [model.continuations(prompt, [trial.answer])[0] / len(trial.answer) for prompt in trial.prompts]
        rows.append(scores)
    tell(f"needle, {model.name}", len(asked), len(asked))
    return np.array(rows)


def compare_needle(length: int, base: Floats, candidate: Floats, margins: Margins) -> tuple[Needle, Check]:
    """base, candidate: `ask` of both."""
    differences = (candidate - base)[:, :-1]
    depths = tuple(
        Depth(
            depth=depth,
            base=float(base[:, place].mean()),
            candidate=float(candidate[:, place].mean()),
            difference=paired.mean(differences[:, place]),
        )
        for place, depth in enumerate(DEPTHS)
    )
    found = paired.mean(base[:, :-1].mean(axis=1) - base[:, -1])
    overall = paired.mean(differences.mean(axis=1))
    check = judge("needle", f"{length} tokens", overall, -margins.needle)
    if found.low <= 0:
        note = "the base does not find the needle either: this says how far the answers moved, not what was forgotten"
        check = msgspec.structs.replace(check, note=note)
    return Needle(length=length, trials=len(base), depths=depths, found=found), check
