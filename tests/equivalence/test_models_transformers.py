"""Every architecture and its variants: logits and greedy tokens equal transformers', through the paged runner.

Logits are compared where nothing hides: float32, one prompt in chunks of odd sizes over shuffled blocks.
"""

import pytest
import torch
from driving import Driver, Sequence
from random_models import VARIANTS, make

from splittime.core.sampling import SamplingParams
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner

pytestmark = pytest.mark.sample(8)

PROMPT_TOKENS, LONG_PROMPT_TOKENS = 40, 300
NEW_TOKENS = 26
MAX_ABS_ERROR = 1e-4


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request, tmp_path_factory):
    """(transformers' model, the folder of its checkpoint)."""
    folder = tmp_path_factory.mktemp(request.param)
    return make(request.param, folder), folder


@pytest.fixture(scope="module")
def prompt(pair):
    """Longer for models that take it, so that it goes beyond their windows and their original contexts."""
    is_long = pair[0].config.max_position_embeddings > LONG_PROMPT_TOKENS + NEW_TOKENS
    num_tokens = LONG_PROMPT_TOKENS if is_long else PROMPT_TOKENS
    return torch.randint(0, 97, (num_tokens,), generator=torch.Generator().manual_seed(1)).tolist()


def load(folder, **settings) -> TorchRunner:
    return load_torch_runner(RunnerConfig(model_path=str(folder), max_num_seqs=4, **settings))


class Listener:
    """Collects the logits that a runner's decoder hands out, in order."""

    def __init__(self, runner: TorchRunner) -> None:
        self.seen: list[torch.Tensor] = []
        self.decoder = runner.decoder
        self.ops = runner.decoder.ops
        runner.decoder = self  # type: ignore[assignment]

    def forward(self, *args):
        hidden = self.decoder.forward(*args)
        self.seen.append(self.decoder.logits(hidden))
        return hidden

    def logits(self, hidden):
        return self.decoder.logits(hidden)


@pytest.mark.parametrize("kernels", ["native", "torch", "reference"])
def test_logits_equal_transformers(pair, prompt, kernels):
    model, folder = pair
    runner = load(folder, kernels=kernels)
    listener = Listener(runner)
    Driver(runner, shuffle_seed=3).prefill(Sequence("a", prompt), chunks=[9, 1, 17, 5, 200])
    with torch.no_grad():
        want = model(torch.tensor([prompt])).logits[0]
    assert (torch.cat(listener.seen) - want).abs().max() <= MAX_ABS_ERROR


def test_greedy_tokens_equal_transformers(pair, prompt):
    model, folder = pair
    got = Driver(load(folder), shuffle_seed=4).generate(Sequence("a", prompt), NEW_TOKENS, chunks=[3, 13, 7])
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert got == tokens[len(prompt) :]


def test_bfloat16_is_close_to_float32(pair, prompt):
    """Scores of the prompt in bfloat16 keep close to those in float32, on average."""
    _, folder = pair
    sampling = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=0)
    means = []
    for dtype in ("float32", "bfloat16"):
        sequence = Sequence("a", prompt, sampling)
        Driver(load(folder, dtype=dtype)).prefill(sequence)
        scores = [one.logprob for one in sequence.results[0].prompt_logprobs]
        means.append(torch.tensor(scores))
    assert len(means[0]) == len(prompt) - 1
    assert (means[0] - means[1]).abs().mean() < 0.25
    assert (means[0] - means[1]).mean().abs() < 0.1
