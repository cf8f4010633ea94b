"""Tokens at drafted positions are drawn from the model's distribution, filters and penalties included: counted over
many seeds, and compared with what numpy makes of the model's logits.

The first step verifies a draft behind the prompt; whose draft was wrong draws its second token in a step of its own.
What is counted is the pair of tokens, so a draft that is accepted too often, or too seldom, shows in either.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import tiny_checkpoint

from lazily import scipy_stats as stats
from splittime.core.sampling import SamplingParams
from splittime.core.step import Admitted, Row, StepPlan
from splittime.kernels.native.library import LibraryMissing, library
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner

PROMPT = (7, 23, 7, 41)
NUM_SEEDS, TOGETHER = 3000, 60
LEAST_COUNT = 5.0  # expected in a cell; smaller ones are put together
LEAST_P = 1e-3
FILTERED = SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.03, seed=0)
PENALISED = SamplingParams(
    temperature=0.9, top_k=8, seed=0, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.5
)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> TorchRunner:
    try:
        library()
    except LibraryMissing as error:
        pytest.skip(str(error))
    folder: Path = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint.write(folder)
    settings = {"max_model_len": 64, "block_size": 8, "max_num_seqs": TOGETHER, "num_threads": 1, "packed_cache": "off"}
    return load_torch_runner(RunnerConfig(model_path=str(folder), kernels="native", **settings))


def logits_behind(runner: TorchRunner, token_ids: Sequence[int]) -> np.ndarray:
    found: list[np.ndarray] = []
    runner.on_hidden = lambda batch, hidden: found.append(runner.decoder.logits(hidden[-1:])[0].double().numpy())
    admitted = Admitted("asks", tuple(token_ids), 0, SamplingParams(temperature=0.0, seed=0), ())
    runner.run(StepPlan(1, (Row("asks", 0, tuple(token_ids), (0,), 1),), (admitted,)))
    runner.on_hidden = None
    runner.slots.update(("asks",), ())
    return found[0]


def target(logits: np.ndarray, sampling: SamplingParams, outputs: Sequence[int]) -> np.ndarray:
    """Returns the chance of each token, by the definitions of `runner.penalties` and `runner.sampler`."""
    for token in {*PROMPT, *outputs} if sampling.repetition_penalty != 1 else ():
        logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
    for token, count in Counter(outputs).items():
        logits[token] -= sampling.presence_penalty + sampling.frequency_penalty * count
    logits = logits / sampling.temperature
    order = np.argsort(-logits)
    kept = order[: sampling.top_k or len(order)]
    kept = kept[logits[kept] >= logits[order[0]] + np.log(max(sampling.min_p, 1e-300))]
    chances = np.exp(logits[kept] - logits[order[0]])
    before = np.cumsum(chances / chances.sum()) - chances / chances.sum()
    chances = np.where(before < sampling.top_p, chances, 0.0)
    found = np.zeros(len(logits))
    found[kept] = chances / chances.sum()
    return found


def pairs(runner: TorchRunner, sampling: SamplingParams, draft: int) -> Iterator[tuple[int, int]]:
    """Yields the first two tokens of each seed, where this draft was verified in the first one's step."""
    for begin in range(0, NUM_SEEDS, TOGETHER):
        names = [str(seed) for seed in range(begin, begin + TOGETHER)]
        asked = [msgspec.structs.replace(sampling, seed=1000 + int(name)) for name in names]
        admitted = tuple(Admitted(name, PROMPT, 0, one, ()) for name, one in zip(names, asked, strict=True))
        rows = tuple(Row(name, 0, PROMPT, (place,), 2, (draft,)) for place, name in enumerate(names))
        first = runner.run(StepPlan(2, rows, admitted)).rows
        told = {row.request_id: list(row.token_ids) for row in first}
        rows = tuple(Row(name, len(PROMPT), tuple(some), (), 1) for name, some in told.items() if len(some) == 1)
        for row in runner.run(StepPlan(3, rows)).rows:
            told[row.request_id] += row.token_ids
        runner.slots.update(tuple(names), ())
        yield from ((some[0], some[1]) for some in told.values())


def expected(runner: TorchRunner, sampling: SamplingParams) -> dict[tuple[int, int], float]:
    """By pair, how many of the seeds should give it."""
    first = target(logits_behind(runner, PROMPT), sampling, ())
    found = {}
    for token in map(int, np.flatnonzero(first)):
        second = target(logits_behind(runner, (*PROMPT, token)), sampling, (token,))
        for other in map(int, np.flatnonzero(second)):
            found[token, other] = NUM_SEEDS * first[token] * second[other]
    return found


def p_value(counted: Counter[tuple[int, int]], wanted: dict[tuple[int, int], float]) -> float:
    rare = [pair for pair, count in wanted.items() if count < LEAST_COUNT]
    often = [pair for pair in wanted if pair not in rare]
    cells = [(counted[pair], wanted[pair]) for pair in often]
    cells.append((sum(counted[pair] for pair in rare), sum(wanted[pair] for pair in rare)))
    got, due = zip(*(cell for cell in cells if cell[1] > 0), strict=True)
    return float(stats.chisquare(got, due).pvalue)


@pytest.mark.parametrize("sampling", [FILTERED, PENALISED], ids=["filtered", "penalised"])
@pytest.mark.parametrize("rank", [0, 2, -1], ids=["likeliest", "third", "impossible"])
def test_pairs_have_the_model_s_distribution(runner: TorchRunner, sampling: SamplingParams, rank: int) -> None:
    wanted = expected(runner, sampling)
    first = target(logits_behind(runner, PROMPT), sampling, ())
    draft = int(np.argsort(-first)[rank])
    counted = Counter(pairs(runner, sampling, draft))
    assert set(counted) <= set(wanted)
    assert (not first[draft]) == (rank == -1)
    assert p_value(counted, wanted) > LEAST_P
