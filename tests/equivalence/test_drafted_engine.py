"""Drafts change no token: an engine whose rows verify guesses gives what plain decode gives, on the packaged model.

The guesses are right, right up to some place, or wholly wrong; requests are greedy, drawn with a seed, and penalised.
"""

import copy
import time
from collections.abc import Mapping, Sequence

import msgspec
import pytest
from driving import Driver
from driving import Sequence as Driven
from guessing import Guesser
from test_engine_equivalence import MODEL, load_runner, make_prompts

from splittime.assemble.model_source import load_tokenizer
from splittime.core.clock import SystemClock
from splittime.core.errors import ConfigError
from splittime.core.request import Request
from splittime.core.sampling import SamplingParams
from splittime.core.step import Runner, StepPlan, StepResult
from splittime.drive.crank import Crank, EngineParts
from splittime.engine.engine import Engine
from splittime.runner.compose import RunnerThread
from splittime.runner.drafting import Draft, DraftingRunner, Look
from splittime.runner.grammars import Grammars
from splittime.runner.ranks.members import Lead
from splittime.runner.suffix_drafter import SuffixDrafter
from splittime.runner.torch_runner import TorchRunner
from splittime.scheduler.config import SchedulerConfig
from splittime.scheduler.scheduler import Scheduler
from splittime.text import grammars

MAX_TOKENS = 40
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.4}
KINDS = (
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, seed=0, logprobs=2),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, seed=0, ignore_eos=True, **PENALTIES),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.9, seed=5),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=1.1, top_k=30, min_tokens=20, seed=9, logprobs=0, **PENALTIES),
)


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return load_runner()


def generate(runner: Runner, num_blocks: int, ahead: RunnerThread | None = None) -> tuple[dict[str, list], Scheduler]:
    """Tokens, each with its log-probability where it is asked for, by request; and how each ended."""
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256, num_blocks=num_blocks)
    scheduler = Scheduler(config)
    crank = Crank(EngineParts(Engine(scheduler, plans_ahead=ahead is not None), ahead or runner), SystemClock())
    found: dict[str, list] = {}
    for i, prompt in enumerate(make_prompts()):
        fields = {"sampling": KINDS[i % len(KINDS)], "eos_token_ids": (0, 2), "submitted_ns": time.monotonic_ns()}
        crank.submit(Request(request_id=f"r{i}", prompt_token_ids=prompt, **fields), time.monotonic_ns())
        found[f"r{i}"] = []
    while crank.has_work:
        output = crank.turn()
        scheduler.check()
        for one in output.outputs if output else ():
            assert one.error is None, one.error
            logprobs = [(entry.token_id, round(entry.logprob, 3), entry.rank) for entry in one.logprobs]
            found[one.request_id] += logprobs or list(one.token_ids)
            if one.finish_reason is not None:
                found[one.request_id].append(one.finish_reason)
    return found, scheduler


@pytest.fixture(scope="module")
def plain(runner: TorchRunner) -> dict[str, list]:
    return generate(runner, runner.resolved.num_blocks)[0]


class Oracle(Guesser):
    """Guesses by what plain decode gave."""

    def __init__(self, plain: dict[str, list]) -> None:
        super().__init__(self._given, 4096)
        self._outputs = {
            name: [one[0] if isinstance(one, tuple) else one for one in found[:-1]] for name, found in plain.items()
        }
        self._prompts = {f"r{i}": len(prompt) for i, prompt in enumerate(make_prompts())}

    def _given(self, request_id: str, token_ids: Sequence[int], count: int) -> list[int]:
        done = len(token_ids) - self._prompts[request_id]
        return self._outputs[request_id][done : done + count]


@pytest.mark.parametrize("num_blocks", [None, 30])
def test_drafted_is_decoded_one_by_one(runner: TorchRunner, plain: dict[str, list], num_blocks: int | None) -> None:
    """Also with so few blocks that requests are preempted."""
    oracle = Oracle(plain)
    found, scheduler = generate(DraftingRunner(runner, oracle), num_blocks or runner.resolved.num_blocks)
    assert found == plain
    assert scheduler.counts.draft_tokens > scheduler.counts.accepted_draft_tokens > 30
    assert bool(scheduler.counts.num_preemptions) is (num_blocks is not None)


def test_drafted_and_planned_ahead_is_decoded_one_by_one(runner: TorchRunner, plain: dict[str, list]) -> None:
    drafting = DraftingRunner(runner, Oracle(plain))
    found, scheduler = generate(drafting, runner.resolved.num_blocks, RunnerThread(drafting.run))
    assert found == plain
    assert scheduler.counts.accepted_draft_tokens > 30


def test_other_arithmetic_verifies_as_well(plain: dict[str, list]) -> None:
    """Products of torch, whose sums may depend in their last bits on how many rows a batch has; so only greedy ones."""
    runner = load_runner(kernels="torch")
    wanted, _ = generate(runner, runner.resolved.num_blocks)
    found, scheduler = generate(DraftingRunner(runner, Oracle(wanted)), runner.resolved.num_blocks)
    assert [one for one, *_ in found["r0"][:-1]] == [one for one, *_ in wanted["r0"][:-1]]
    assert scheduler.counts.accepted_draft_tokens > 30


def test_a_runner_that_verifies_no_drafts_is_refused_when_it_is_made_to_draft(
    runner: TorchRunner, plain: dict[str, list]
) -> None:
    ranks = copy.copy(runner)
    ranks.lead = object.__new__(Lead)
    with pytest.raises(ConfigError, match="TorchRunner does not verify drafts"):
        DraftingRunner(ranks, Oracle(plain))


class AllTaken(SuffixDrafter):
    """Tells no chance, so that what is verified does not hang on the machine's pace."""

    def draft(self, plan: StepPlan, result: StepResult, look: Look) -> Mapping[str, Draft]:
        drafts = super().draft(msgspec.structs.replace(plan, least_survival=0.0), result, Look.EVERYWHERE) or {}
        return {name: Draft(draft.token_ids, ()) for name, draft in drafts.items()}


@pytest.mark.parametrize("kind", [SuffixDrafter, AllTaken])
def test_drafts_from_the_text_and_past_answers_change_no_token(
    runner: TorchRunner, plain: dict[str, list], kind: type[SuffixDrafter]
) -> None:
    """The second time the same is asked, past answers are what comes."""
    drafting = DraftingRunner(runner, kind(16, 256))
    found, first = generate(drafting, runner.resolved.num_blocks)
    again, second = generate(drafting, runner.resolved.num_blocks)
    assert found == again == plain
    if kind is AllTaken:
        assert second.counts.accepted_draft_tokens > first.counts.accepted_draft_tokens
        assert second.counts.accepted_draft_tokens > 100


def letter(text: str) -> int:
    (token_id,) = load_tokenizer(MODEL).encode(text, add_special_tokens=False)
    return token_id


def prefers(token_id: int, first: int, **fields: object) -> SamplingParams:
    """It writes the first token where only that may come, and this one before any other."""
    return SamplingParams(temperature=0.0, seed=0, logit_bias={token_id: 100.0, first: 50.0}, **fields)


def dead_ends(good: int, bad: int) -> dict[str, tuple[dict[str, object], str]]:
    """By name: parameters by which nothing may come behind the second token, and what is said there."""
    lists = {"allowed_token_ids": (good, bad), "bad_token_ids": ((bad, good), (bad, bad))}
    words = " | ".join(f'"{number:04}"' for number in range(4000))
    return {
        "lists": (lists, "leave no token"),
        "form": ({"grammar": grammars.of_lark('start: "y"+ ("x" (<[0]> | <[1]>) "z")?', "g")}, "allows no token"),
        "parser": ({"grammar": grammars.of_lark(f'start: "y"+ v?\nv: "x" w\nw: {words}', "g")}, "items"),
    }


@pytest.mark.parametrize("kind", ["lists", "form", "parser"])
def test_a_draft_behind_which_nothing_may_come_ends_a_request_only_if_it_is_right(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As without drafts: a wrong one changes nothing, and behind a right one its token is told before the error is."""
    monkeypatch.setattr(runner.slots, "grammars", Grammars(load_tokenizer(MODEL).to_json, 4096))
    good, bad = letter("y"), letter("x")
    fields, said = dead_ends(good, bad)[kind]
    if "grammar" in fields:
        runner.slots.grammars.compile(fields["grammar"])
    driver = Driver(runner)
    wrong = Driven("wrong", make_prompts()[0], prefers(good, good, **fields))
    driver.prefill(wrong)
    result = driver.verify(wrong, (bad, good))
    assert (result.error, result.token_ids) == (None, (good,))
    assert driver.verify(wrong, (good, good)).token_ids == (good, good, good)
    right = Driven("right", (*make_prompts()[0], good), prefers(bad, good, **fields))
    right.prompt_len -= 1  # an output that it has already
    driver.step({right: right.prompt_len})
    assert driver.verify(right, (bad, good)).token_ids == (bad,)
    error = driver.verify(right, ()).error
    assert error is not None
    assert said in error.message
    runner.slots.update(("wrong", "right"), ())
