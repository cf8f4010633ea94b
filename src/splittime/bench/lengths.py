"""How long prompts and answers are: from distributions or from a file's rows, cut to what the model can hold.

A request that does not fit `max_model_len` is cut in proportion, prompt and answer alike, and counted: a load that is
not the one asked for must say so (`Fitter.note`).
"""

from typing import NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from splittime.bench.distributions import Distribution, uniform
from splittime.core.errors import ConfigError

Lengths = NDArray[np.int64]
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
