"""Three trained models with answers worked out in float64: greedy ids, first-step logits, and mean NLL."""

import json
from pathlib import Path

import pytest
from driving import Driver, Sequence

from splittime.core.sampling import SamplingParams
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig

MODELS = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "models"
NAMES = ("stories260K", "babyllama105", "babyllama361")
pytestmark = pytest.mark.skipif(not MODELS.exists(), reason=f"no models in {MODELS}")


@pytest.fixture(params=NAMES)
def case(request):
    """(a driver of the model, its expected answers)."""
    folder = MODELS / request.param
    runner = load_torch_runner(RunnerConfig(model_path=str(folder), max_num_seqs=4))
    runner.warm_up()
    return Driver(runner, shuffle_seed=5), json.loads((folder / "expected.json").read_text())


def test_greedy_ids_and_first_logits(case):
    driver, expected = case
    for number, want in enumerate(expected["greedy"]):
        sampling = SamplingParams(temperature=0.0, seed=0, logprobs=5)
        sequence = Sequence(f"greedy-{number}", want["prompt_ids"], sampling)
        assert driver.generate(sequence, len(want["greedy_ids"]), chunks=[3, 2]) == want["greedy_ids"]
        first = next(result for result in sequence.results if result.token_ids).logprobs[0]
        assert [token for token, _ in first.top] == [token for token, _ in want["first_step_top5"]]
        best_logit = want["first_step_top5"][0][1]
        for (_, logprob), (_, logit) in zip(first.top, want["first_step_top5"], strict=True):
            assert logprob - first.top[0][1] == pytest.approx(logit - best_logit, abs=2e-4)
        assert (first.token_id, first.rank) == (want["greedy_ids"][0], 1)


def test_mean_nll(case):
    driver, expected = case
    want = expected["nll"]
    tokenizers = pytest.importorskip("tokenizers")
    folder = Path(driver.runner.resolved.model_path)
    text_ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(want["text"]).ids
    ids = [1, *(token for token in text_ids if token != 1)]
    assert len(ids) == want["tokens"]
    sequence = Sequence("nll", ids, SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0))
    driver.prefill(sequence, chunks=[31, 64])
    scores = [one for result in sequence.results for one in result.prompt_logprobs]
    assert [one.token_id for one in scores] == ids[1:]
    assert -sum(one.logprob for one in scores) / len(scores) == pytest.approx(want["mean_nll_nats"], abs=1e-4)
