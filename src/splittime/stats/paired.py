"""Estimates with intervals, for figures whose unit of chance is a document, and for paired answers.

Tokens of one text are not independent, so all resampling draws whole documents, with all their tokens (the cluster
bootstrap; Davison and Hinkley, Bootstrap Methods and their Application, 1997, 3.8). The plain percentile interval is
too narrow for few documents; here its tails are moved out as in Hesterberg, What Teachers Should Know About the
Bootstrap (2015), 5.3: to take the percentiles Phi(-+ sqrt(n / (n - 1)) t_{n-1}) rather than 2.5 and 97.5 %, which is
the t interval's correction for n documents.

Answers of two models to the same questions are compared by the questions on which they differ: McNemar's test, exact
(1947), and the interval of Bonett and Price (2012) for the difference of two paired proportions.
`tests/stats/test_paired.py` checks coverage on synthetic data. scipy is imported where it is called, so that who
only measures a model does without.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class BootstrapEstimate:
    """A figure, its standard error, and the interval that holds the truth in `CONFIDENCE` of all such experiments."""

    value: float
    standard_error: float
    low: float
    high: float

    def mapped_by_exp(self) -> "BootstrapEstimate":
        """Returns the figure itself, if this is of its logarithm; its standard error by the delta method."""
        value = math.exp(self.value)
        return BootstrapEstimate(value, value * self.standard_error, math.exp(self.low), math.exp(self.high))


def ratio_of_sums(sums: Floats, counts: Floats, seed: int = 0) -> BootstrapEstimate:
    """Returns sum(sums) / sum(counts), both one a document: the mean over all tokens."""
    weights = _weights(len(sums), seed)
    drawn = (weights @ sums) / (weights @ counts)
    return _estimate(float(sums.sum() / counts.sum()), drawn, len(sums))


def quantile_of_tokens(values: Floats, documents: NDArray[np.int64], share: float, seed: int = 0) -> BootstrapEstimate:
    """Returns the smallest value that at least `share` of all tokens do not exceed; documents: of each token, 0, 1,
    ..."""
    order = np.argsort(values, kind="stable")
    ranked, owners = values[order], documents[order]
    drawn = [_weighted_quantile(ranked, line[owners], share) for line in _weights(int(documents.max()) + 1, seed)]
    whole = _weighted_quantile(ranked, np.ones(len(ranked)), share)
    return _estimate(whole, np.array(drawn), int(documents.max()) + 1)


def mean(values: Floats, seed: int = 0) -> BootstrapEstimate:
    """Returns the mean of independent values."""
    return ratio_of_sums(values, np.ones(len(values)), seed)


def means(columns: Floats, seed: int = 0) -> list[BootstrapEstimate]:
    """Returns the mean of each column of independent rows; each resample draws the same rows for all columns."""
    drawn = _weights(len(columns), seed) @ columns / len(columns)
    values = columns.mean(axis=0)
    return [_estimate(float(value), line, len(columns)) for value, line in zip(values, drawn.T, strict=True)]


def mcnemar(only_first: int, only_second: int) -> float:
    """Returns the two-sided p-value of answers that only one of two got right being split like that by a fair coin."""
    from scipy import stats

    count = only_first + only_second
    return 1.0 if count == 0 else float(stats.binomtest(only_first, count, 0.5).pvalue)


def paired_difference(only_first: int, only_second: int, count: int) -> BootstrapEstimate:
    """Returns the second's share of right answers less the first's, over `count` questions that both answered."""
    from scipy import stats

    value = (only_second - only_first) / count
    gains, losses = (only_second + 1) / (count + 2), (only_first + 1) / (count + 2)
    middle = gains - losses
    error = math.sqrt(max(0.0, gains + losses - middle**2) / (count + 2))
    reach = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * error
    return BootstrapEstimate(value, error, max(-1.0, middle - reach), min(1.0, middle + reach))


def binomial_bounds(successes: int, count: int) -> tuple[float, float]:
    """Returns Clopper and Pearson's interval of a share."""
    from scipy import stats

    found = stats.binomtest(successes, count).proportion_ci(CONFIDENCE)
    return float(found.low), float(found.high)


def _weights(documents: int, seed: int) -> Floats:
    """[RESAMPLES, documents]: how often each document is in each resample."""
    source = np.random.default_rng(seed)
    return source.multinomial(documents, np.full(documents, 1 / documents), size=RESAMPLES).astype(np.float64)


def _estimate(value: float, drawn: Floats, documents: int) -> BootstrapEstimate:
    """Returns the estimate. One document says nothing of how documents differ: its interval is the whole line."""
    if documents < 2:
        return BootstrapEstimate(value, math.inf, -math.inf, math.inf)
    tail = _tail(documents)
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return BootstrapEstimate(
        value, float(drawn.std(ddof=1)) * math.sqrt(documents / (documents - 1)), float(low), float(high)
    )


def _tail(documents: int) -> float:
    from scipy import stats

    reach = stats.t.ppf((1 + CONFIDENCE) / 2, documents - 1) * math.sqrt(documents / (documents - 1))
    return float(stats.norm.cdf(-reach))


def _weighted_quantile(ranked: Floats, weights: Floats, share: float) -> float:
    sums = np.cumsum(weights)
    place = int(np.searchsorted(sums, share * sums[-1] * (1 - 1e-12)))
    return float(ranked[min(place, len(ranked) - 1)])
