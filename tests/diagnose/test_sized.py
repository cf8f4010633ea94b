"""What a cure would gain: held against what the same requests do in truth, with the change made."""

import random
import re
from typing import Any

import msgspec
import pytest
from test_rules_queue import poisson
from ward import Case, Ward, ids

from splittime.diagnose.books import Books, make_books
from splittime.diagnose.doctor import diagnose, found_again
from splittime.diagnose.finding import Finding
from splittime.diagnose.sized import TTFT, _figure, helps, is_withdrawn, settings_of, sized
from splittime.simulate.change import PredictedFigure
from splittime.simulate.figures import figures

FEW_BLOCKS = {"num_blocks": 40, "max_model_len": 512}
LARGE_STEPS = {"max_prefill_tokens": 2048, "max_num_batched_tokens": 2048}


def mixed(rate: float, count: int, prompts: range, outputs: range, seed: int = 3) -> list[Case]:
    rng, at_ms, cases = random.Random(seed), 0.0, []
    for number in range(count):
        at_ms += rng.expovariate(rate) * 1e3
        cases.append(Case(at_ms, ids(rng.choice(prompts), number + 1000 * seed), rng.choice(outputs)))
    return cases


def long_among_chats() -> list[Case]:
    long = mixed(2.5, 50, range(300, 1200), range(2, 9), seed=4)
    return sorted([*mixed(3, 60, range(16, 200), range(40, 140)), *long], key=lambda case: case.at_ms)


def few_slots() -> list[Case]:
    return mixed(30, 200, range(10, 120), range(5, 50))


SICK: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "few slots": ("slot_bound", {"max_num_seqs": 4}, {}, few_slots),
    "few blocks": ("kv_bound", FEW_BLOCKS, {}, lambda: mixed(25, 120, range(40, 160), range(20, 90))),
    "a small budget": (
        "token_budget_bound",
        {"max_prefill_tokens": 24},
        {},
        lambda: mixed(4, 100, range(100, 500), range(2, 12)),
    ),
    "a large budget": ("prefill_interference", LARGE_STEPS, {"token_ms": 0.6}, long_among_chats),
    "static batches": (
        "static_batching",
        {"batching": "static", "max_num_seqs": 8},
        {},
        lambda: mixed(8, 80, range(16, 64), range(10, 150)),
    ),
}


def found(books: Books, name: str) -> Finding:
    return next(one for one in sized(books, diagnose(books)).findings if one.name == name)


@pytest.mark.parametrize("illness", SICK)
def test_the_interval_contains_what_the_change_does_in_truth(illness: str) -> None:
    name, settings, costs, cases = SICK[illness]
    books = Ward(settings=settings, **costs).run(*cases())
    finding = found(books, name)
    gain = finding.predicted
    assert gain is not None, finding.not_predicted
    truth = Ward(settings=settings | gain.settings, **costs).run(*cases())
    was, then = (figures(each.accounts, each.steps) for each in (books, truth))
    main = gain.figures[0]
    assert main.low <= then[main.name] / was[main.name] <= main.high
    assert main.own_high < 1
    assert main.recorded == was[main.name]
    assert helps(gain)
    assert finding.cure.flags
    assert "In brackets: where 78 % of runs with the change would lie, made in another hour." in gain.sentence
    assert "would help" in gain.sentence
    told = re.search(r"to [^()]*\), from ([\d.,]+) to ([\d.,]+)( ms)?", gain.sentence)
    absolute = [float(number.replace(",", "")) for number in told.groups()[:2]]
    assert absolute == pytest.approx([main.recorded, main.recorded * main.ratio], rel=0.01, abs=0.5)
    assert f"latest {len(books.accounts)} requests" in gain.sentence


def prescribed(books: Books, *flags: str, name: str = "slot_bound") -> Finding:
    """The first finding, as if its cure were these flags, with its gain."""
    diagnosis = diagnose(books)
    first = diagnosis.findings[0]
    cure = msgspec.structs.replace(first.cure, flags=flags)
    one = msgspec.structs.replace(first, name=name, cure=cure)
    answer = sized(books, msgspec.structs.replace(diagnosis, findings=(one, *diagnosis.findings[1:])))
    return next(finding for finding in answer.findings if finding.name == name)


@pytest.fixture(scope="module")
def crowded() -> Books:
    return Ward(settings={"max_num_seqs": 4}).run(*few_slots())


def test_a_cure_that_does_nothing_is_withdrawn_and_steps_back(crowded: Books) -> None:
    diagnosis = diagnose(crowded)
    first = diagnosis.findings[0]
    useless = msgspec.structs.replace(
        first, name="useless", cure=msgspec.structs.replace(first.cure, flags=("--starvation-bound-ms", "900"))
    )
    answer = sized(crowded, msgspec.structs.replace(diagnosis, findings=(useless, first)))
    assert [finding.name for finding in answer.findings] == ["slot_bound", "useless"]
    last = answer.findings[-1]
    assert is_withdrawn(last)
    assert (last.cure.flags, last.cure.command) == ((), None)
    assert "--starvation-bound-ms 900 is withdrawn" in last.cure.sentence
    assert "it would not help" in last.predicted.sentence
    assert (last.claim, last.evidence, last.is_limit) == (first.claim, first.evidence, False)
    assert answer.exit_code == diagnosis.exit_code == 1


def test_fewer_slots_harm(crowded: Books) -> None:
    finding = prescribed(crowded, "--max-num-seqs", "2")
    assert finding.predicted.figures[0].own_low > 1.2
    assert is_withdrawn(finding)


def test_what_is_prescribed_is_what_was_replayed(crowded: Books) -> None:
    """Sixteen slots wait to be filled, of which steps with four rows tell nothing."""
    (wanted, *_), finding = diagnose(crowded).findings, found(crowded, "slot_bound")
    assert wanted.cure.flags == ("--max-num-seqs", "16")
    assert finding.cure.flags == ("--max-num-seqs", "8")
    assert finding.predicted.settings == settings_of(finding, crowded) == {"max_num_seqs": 8}
    assert "--max-num-seqs 16 may be right in the end" in finding.cure.sentence
    assert "Ask again with this set" in finding.cure.sentence
    assert "with all 8 slots taken" in finding.cost
    assert finding.counter_check.startswith("With --max-num-seqs 8 and")
    assert "with max_num_seqs 8 changes" in finding.predicted.sentence


def test_a_first_step_that_helps_nobody_is_not_prescribed(crowded: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splittime.diagnose.sized.helps", lambda gain: False)
    finding = found(crowded, "slot_bound")
    assert (finding.cure, finding.predicted) == (diagnose(crowded).findings[0].cure, None)
    assert "a step would have" in finding.not_predicted
    assert "a replay with --max-num-seqs 8 does not show that it helps" in finding.not_predicted


@pytest.mark.parametrize("illness", ["few slots", "few blocks", "a small budget"])
@pytest.mark.parametrize("most", [1.5, 2.0, 4.0])
def test_a_cure_goes_no_further_than_it_may(illness: str, most: float) -> None:
    name, settings, costs, cases = SICK[illness]
    books = Ward(settings=settings, **costs).run(*cases())
    now = books.facts.settings
    finding = found_again(msgspec.structs.replace(books, most_times=most), name)
    whole = next(one for one in diagnose(books).findings if one.name == name)
    assert finding.name == name
    for setting, value in settings_of(finding, books).items():
        if setting != "max_num_batched_tokens":  # must hold what prompts may take, twice
            assert now[setting] < value <= most * now[setting] * 1.1
            assert value <= settings_of(whole, books)[setting]


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--num-threads", "2"), "no replay can change --num-threads"),
        (("--max-num-seqs", "0"), "max_num_seqs = 0 must be"),
        (("--policy", "best"), "bad setting"),
    ],
)
def test_what_cannot_be_told_says_why_and_changes_nothing_else(crowded: Books, flags: Any, why: str) -> None:
    finding = prescribed(crowded, *flags)
    assert why in finding.not_predicted
    assert finding.predicted is None
    assert finding.cure.flags == flags


def test_books_that_cannot_be_replayed_say_why(crowded: Books) -> None:
    ahead = msgspec.structs.replace(
        crowded,
        facts=msgspec.structs.replace(crowded.facts, settings={**crowded.facts.settings, "async_scheduling": True}),
    )
    assert "plans ahead" in found(ahead, "slot_bound").not_predicted
    assert (
        "it takes their steps, facts" in found(msgspec.structs.replace(crowded, facts=None), "slot_bound").not_predicted
    )


def test_a_replay_that_is_unlike_the_record_is_not_believed(crowded: Books) -> None:
    """All requests came at once and the first have long gone: what is kept has no queue before it."""
    cases = [Case(number / 10, ids(30, number), 30) for number in range(200)]
    books = Ward(settings={"max_num_seqs": 4}).run(*cases)
    late = make_books(books.facts, books.accounts[100:], books.steps[len(books.steps) // 2 :], "a stretch")
    diagnosis = diagnose(late)
    one = msgspec.structs.replace(diagnose(crowded).findings[0], name="slot_bound")
    (finding,) = sized(late, msgspec.structs.replace(diagnosis, findings=(one,))).findings
    assert "too far off to go by" in finding.not_predicted
    assert finding.cure == one.cure


def test_a_shorter_queue_says_how_many_it_would_refuse() -> None:
    gain = found(Ward(step_ms=0.1, token_ms=2.0).run(*poisson(16, 100)), "overload").predicted
    assert gain is not None
    refused = next(figure for figure in gain.figures if figure.name == "refused")
    assert (refused.before, refused.ratio) == (0, None)
    assert refused.after > 5
    assert f"It would refuse {refused.after:.0f} requests, where 0 are refused without." in gain.sentence


def test_flags_are_settings(crowded: Books) -> None:
    finding = diagnose(crowded).findings[0]

    def of(*flags: str) -> dict[str, Any]:
        return settings_of(
            msgspec.structs.replace(finding, cure=msgspec.structs.replace(finding.cure, flags=flags)), crowded
        )

    assert of("--max-num-seqs", "16") == {"max_num_seqs": 16}
    assert of("--policy", "shortest_prefill", "--enable-chunked-prefill") == {
        "policy": "shortest_prefill",
        "enable_chunked_prefill": True,
    }
    assert of("--no-enable-prefix-caching") == {"enable_prefix_caching": False}
    assert of("--kv-cache-memory-bytes", "20MiB") == {"num_blocks": 20 * 2**20 // (16 * 4096)}


def test_an_interval_is_wider_by_the_replays_own_error() -> None:
    class Told:
        def figure(self, name: str) -> PredictedFigure:
            return PredictedFigure(name, 100.0, 110.0, 50.0, 0.5, 0.3, 0.8, 30.0, 80.0, 0.4, 0.6)

    figure = _figure(Told(), TTFT)  # type: ignore[arg-type]
    assert (figure.own_low, figure.own_high) == (pytest.approx(0.4 / 1.1), pytest.approx(0.6 * 1.1))
    assert (figure.low, figure.high) == (0.3, 0.8)


def test_the_healthy_are_not_replayed() -> None:
    books = Ward().run(*poisson(8, 80, output=40))
    said: list[str] = []
    diagnosis = diagnose(books)
    assert sized(books, diagnosis, lambda words, share: said.append(words)) == diagnosis
    assert said == []


def test_progress_goes_to_the_end(crowded: Books) -> None:
    said: list[float] = []
    answer = sized(crowded, diagnose(crowded), lambda words, share: said.append(share))
    assert said[-1] == 1.0
    assert sorted(said) == said or any("Ask again" in one.cure.sentence for one in answer.findings)
