"""What a request gets does not depend on what else is in its steps, on its blocks, on chunks, or on a preemption."""

import random

import pytest
from driving import GREEDY, Driver, Sequence
from random_models import make

from splittime.core.sampling import SamplingParams
from splittime.runner.config import RunnerConfig
from splittime.runner.torch_runner import TorchRunner

NEW_TOKENS = 24
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=40, seed=7, frequency_penalty=0.3, repetition_penalty=1.1)


@pytest.fixture(scope="module", params=["llama", "mistral-window", "qwen3-moe"])
def runner(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    make(request.param, folder)
    return TorchRunner.load(RunnerConfig(model_path=str(folder), max_num_seqs=12))


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


def test_copied_block_continues_like_its_source(runner):
    """A second request takes a copy of the first one's half-filled block and goes on from there."""
    prompt = prompt_of(5)[:1] * 3 + [9, 8, 7, 6]
    driver = Driver(runner)
    first = Sequence("source", prompt)
    driver.generate(first, 5)
    copy = Sequence("copy", first.tokens[:-1])
    target = driver.free.pop()
    from splittime.core.plan import Admitted, Row, StepPlan

    start = len(copy.tokens) - 1
    row = Row("copy", start, tuple(copy.tokens[start:]), (target,), True)
    admitted = Admitted("copy", tuple(copy.tokens), 0, GREEDY, ())
    result = runner.run(StepPlan(99, (row,), (admitted,), copies=((first.blocks[0], target),)))
    assert result.rows[0].token_ids == (first.tokens[-1],)
    assert (result.step_id, result.device_ns > 0, result.sample_ns > 0) == (99, True, True)


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
