"""What a request gets does not depend on what else is in its steps, on its blocks, on chunks, or on a preemption."""

import random

import pytest
from driving import GREEDY, Driver, Sequence
from random_models import make

from splittime.core.sampling import SamplingParams
from splittime.runner.compose import load_torch_runner
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner

NEW_TOKENS = 24
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7, frequency_penalty=0.3, repetition_penalty=1.1)


VARIED = (
    "qwen3-moe",
    "qwen2-moe-window-plain-layers",
    "gpt-oss-yarn",
    "glm-moe-groups",
    "gemma2",
    "gemma3",
    "gemma4-experts",
    "gemma4-layer-inputs",
    "hunyuan",
    "hunyuan-moe",
    "olmo3",
    "ministral3",
    "cohere-head-norms",
    "cohere2",
    "starcoder2",
)


@pytest.fixture(scope="module", params=["llama", "mistral-window", *VARIED])
def runner(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make(request.param, folder)
    return load_torch_runner(RunnerConfig(model_path=str(folder), max_num_seqs=12))


def prompt_of(number: int) -> list[int]:
    source = random.Random(number)
    return [source.randrange(3, 97) for _ in range(source.choice([1, 2, 5, 17, 33, 60, 110]))]


def sampling_of(number: int) -> SamplingParams:
    return GREEDY if number % 2 else SEEDED


def alone(runner: TorchRunner, number: int, num_tokens: int = NEW_TOKENS) -> list[int]:
    sequence = Sequence(f"alone-{number}", prompt_of(number), sampling_of(number))
    return Driver(runner).generate(sequence, num_tokens)


def test_batched_equals_alone_with_arrivals_chunks_and_shuffled_blocks(runner):
    driver = Driver(runner, shuffle_seed=11)
    source = random.Random(2)
    sequences = [Sequence(f"batched-{n}", prompt_of(n), sampling_of(n)) for n in range(9)]
    for step in range(400):
        live = [s for place, s in enumerate(sequences) if place * 2 <= step and len(s.outputs) < NEW_TOKENS]
        if not live:
            break
        source.shuffle(live)
        driver.step({s: source.randint(1, len(s.tokens) - s.num_computed) for s in live})
    for number, sequence in enumerate(sequences):
        assert sequence.outputs == alone(runner, number), f"sequence {number} of {sequence.prompt_len} tokens"


def test_preempted_and_readmitted_gives_the_same_tokens(runner):
    driver = Driver(runner, shuffle_seed=12)
    sequences = [Sequence(f"preempted-{n}", prompt_of(n), sampling_of(n)) for n in (3, 4, 5, 6)]
    for sequence in sequences:
        driver.prefill(sequence)
    for step in range(NEW_TOKENS - 1):
        if step in (4, 5, 15):
            driver.preempt(sequences[step % 4])
        driver.step({s: len(s.tokens) - s.num_computed for s in sequences})
    for number, sequence in zip((3, 4, 5, 6), sequences, strict=True):
        assert sequence.outputs == alone(runner, number)


@pytest.mark.parametrize("number", [3, 4, 5, 6])
def test_drafts_give_the_tokens_of_plain_decode_whatever_they_guess(runner, number):
    """Right, wrong from some place on, and wholly wrong; greedy, and drawn with penalties."""
    wanted = alone(runner, number)
    driver, source = Driver(runner, shuffle_seed=number), random.Random(number)
    sequence = Sequence(f"drafted-{number}", prompt_of(number), sampling_of(number))
    driver.prefill(sequence)
    while len(sequence.outputs) < NEW_TOKENS:
        done = len(sequence.outputs)
        num_right = source.choice([0, 1, 3, 20])
        guess = wanted[done : done + num_right]
        guess += [(token + 1) % 97 for token in wanted[done + num_right :][: source.choice([0, 1, 2])]]
        right = min(num_right, len(wanted) - done)
        result = driver.verify(sequence, guess)
        assert len(result.token_ids) == (right if right == len(guess) else min(right, len(guess))) + 1
    assert sequence.outputs[:NEW_TOKENS] == wanted


def test_prompt_logprobs_do_not_depend_on_chunks(runner):
    sampling = SamplingParams(temperature=0.0, seed=0, prompt_logprobs=3)
    whole, chunked = (Sequence(name, prompt_of(6) * 2, sampling) for name in ("whole", "chunked"))
    driver = Driver(runner, shuffle_seed=1)
    driver.prefill(whole)
    driver.prefill(chunked, chunks=[1, 6, 3])
    assert len(whole.results[0].prompt_logprobs) == whole.prompt_len - 1
    pieces = [one for result in chunked.results for one in result.prompt_logprobs]
    for one, other in zip(whole.results[0].prompt_logprobs, pieces, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert len(one.top) == 3
