"""The machine around the model."""

import msgspec
import pytest
from test_rules_queue import names, poisson
from ward import MS, Case, Ward, ids

from splittime.core.errors import ErrorInfo
from splittime.diagnose.doctor import diagnose
from splittime.diagnose.rules.start import cold_start
from splittime.ledger.facts import Process


def with_process(books, **facts):
    engine = msgspec.structs.replace(books.facts.process("engine"), **facts)
    others = tuple(process for process in books.facts.processes if process.name != "engine")
    return msgspec.structs.replace(books, facts=msgspec.structs.replace(books.facts, processes=(engine, *others)))


def test_a_host_that_keeps_the_device_waiting():
    first = diagnose(Ward(step_ms=1, token_ms=0.01, gap_ms=2).run(*poisson(10, 80))).findings[0]
    assert first.name == "host_bound"
    assert "between steps" in first.claim


def with_host(books, host_ns):
    """The same steps; of each one's device time so much was the host's, by the tokens of its answers so far."""
    prompts = {account.request_id: account.prompt_tokens for account in books.accounts}
    steps = []
    for step in books.steps:
        answered = sum(max(0, start - prompts[name]) for name, start, _ in step.rows)
        took_ns = min(step.device_ns, host_ns(len(step.rows), answered))
        steps.append(
            msgspec.structs.replace(step, device_ns=step.device_ns - took_ns, commit_ns=step.commit_ns + took_ns)
        )
    return msgspec.structs.replace(books, steps=tuple(steps))


@pytest.mark.parametrize(
    ("host_ns", "grows"),
    [
        (lambda rows, answered: 200_000 * answered, True),
        (lambda rows, answered: 3 * MS + 150_000 * answered, True),
        (lambda rows, answered: 14 * MS, False),
        (lambda rows, answered: 3 * MS + 10 * MS * rows, False),
        (lambda rows, answered: 13 * MS + 20_000 * answered, False),
    ],
)
def test_a_host_that_takes_longer_the_longer_an_answer_is(host_ns, grows):
    """Not that it takes longer with more requests at once, or all the time."""
    books = with_host(Ward(step_ms=20).run(*poisson(0.3, 40, output=120)), host_ns)
    first = diagnose(books).illnesses[0]
    assert first.name == "host_bound"
    assert ("grows with the answers' length" in first.claim) is grows
    assert first.cure.flags == (() if grows else ("--num-threads", "1"))
    assert ("goes through the whole answer" in first.cure.sentence) is grows


@pytest.mark.parametrize(
    ("kernels", "quantization", "flag"),
    [
        ("torch", None, "--kernels"),
        ("native", None, "--num-threads"),
        ("triton", None, "--num-threads"),
        ("reference", "fp8", "--num-threads"),
    ],
)
def test_native_kernels_are_prescribed_where_they_would_be_taken(kernels, quantization, flag):
    told = {"kernels": kernels, "quantization": quantization}
    books = Ward(step_ms=1, token_ms=0.01, gap_ms=2, told=told).run(*poisson(10, 80))
    assert diagnose(books).findings[0].cure.flags[:1] == (flag,)


def test_how_long_the_prompts_are_is_not_how_long_the_answers_are():
    cases = [Case(3000 * i, ids(50 + 900 * (i % 3), i), 120) for i in range(40)]
    books = with_host(Ward(step_ms=20, token_ms=0).run(*cases), lambda rows, answered: 200_000 * answered)
    assert "99% of that grows with the answers' length" in diagnose(books).illnesses[0].claim


def test_a_quick_host():
    assert names(Ward(step_ms=1, token_ms=0.01, gap_ms=0.1).run(*poisson(10, 80))) == []


def test_long_pauses_are_named_and_short_ones_not():
    books = Ward().run(*poisson(10, 80))
    begin_ns = books.accounts[10].start_ns
    felt = tuple((begin_ns + 300 * i * MS, 60 * MS) for i in range(20))
    assert names(with_process(books, pauses=felt)) == ["gc_pauses"]
    short = tuple((begin_ns + 300 * i * MS, MS) for i in range(20))
    assert names(with_process(books, pauses=short)) == []
    before = tuple((books.accounts[0].start_ns - 10**9 + i * MS, 200 * MS) for i in range(3))
    assert names(with_process(books, pauses=before)) == []


def test_texts_that_take_longer_to_tokenise_than_to_compute():
    cases = [Case(200 * i, ids(200, i), 1, tokenize_ms=30) for i in range(40)]
    assert names(Ward().run(*cases))[0] == "slow_tokenizing"


@pytest.mark.parametrize(
    ("render_ms", "begins", "cure"),
    [
        (26, "The chat template, by 87%", "--chat-template FILE"),
        (4, "Tokenising", "token ids"),
        (0, "Tokenising", "token ids"),
    ],
)
def test_a_template_that_takes_longer_than_the_tokenizer(render_ms, begins, cure):
    books = Ward().run(*[Case(200 * i, ids(200, i), 1, tokenize_ms=29.94) for i in range(40)])
    accounts = tuple(msgspec.structs.replace(account, render_ns=render_ms * MS) for account in books.accounts)
    first = diagnose(msgspec.structs.replace(books, accounts=accounts)).findings[0]
    assert first.name == "slow_tokenizing"
    assert first.claim.startswith(begins)
    assert cure in first.cure.sentence


def test_slow_first_steps_after_the_start():
    """The first five seconds cost five times as much."""
    cold, warm = Ward(step_ms=20), Ward(step_ms=4)
    early = cold.run(*(Case(100 * i, ids(32, i), 10) for i in range(40)))
    warm.clock.advance(cold.clock.now_ns())
    late = warm.run(*(Case(5000 + 100 * i, ids(32, 100 + i), 10) for i in range(40)))
    books = msgspec.structs.replace(
        late, accounts=early.accounts + renamed(late.accounts), steps=early.steps + late.steps
    )
    ready_ns = early.accounts[0].start_ns
    first = diagnose(with_process(books, ready_ns=ready_ns)).findings[0]
    assert first.name == "cold_start"
    spent_ns = sum(account.end_ns - account.start_ns for account in books.accounts)
    over_ns = sum(16 * MS * len(account.token_ready_ns) for account in early.accounts)
    assert first.share_of_time == pytest.approx(over_ns / spent_ns, rel=0.1), "what they took longer, no more"
    assert f"{first.share_of_time:.0%} of all requests' time" in first.claim
    fast = [msgspec.structs.replace(step, host_gap_ns=0, end_ns=step.begin_ns + MS) for step in early.steps[1::3]]
    slow = [step for number, step in enumerate(early.steps) if number % 3 != 1]
    mixed = sorted((*slow, *fast), key=lambda step: step.begin_ns)
    mixed_books = msgspec.structs.replace(books, steps=(*mixed, *late.steps))
    (told,) = (f for f in diagnose(with_process(mixed_books, ready_ns=ready_ns)).findings if f.name == "cold_start")
    assert int(told.claim.split()[0]) <= len(slow), "a quick one among them took nothing longer"


def test_first_steps_that_wait_for_a_processor_are_no_cold_start():
    """Somebody else is busy in the first seconds: that is stated, and told as what it is."""
    hindered, warm = Ward(step_ms=4, wait_share=0.8), Ward(step_ms=4)
    early = hindered.run(*(Case(100 * i, ids(32, i), 10) for i in range(40)))
    warm.clock.advance(hindered.clock.now_ns())
    late = warm.run(*(Case(5000 + 100 * i, ids(32, 100 + i), 10) for i in range(40)))
    books = msgspec.structs.replace(
        late, accounts=early.accounts + renamed(late.accounts), steps=early.steps + late.steps
    )
    waits = [step.cpu_wait_ns / (step.end_ns - step.begin_ns) for step in early.steps]
    assert min(waits) > 0.4
    slow = tuple(
        msgspec.structs.replace(s, end_ns=s.end_ns + 20 * MS, cpu_wait_ns=s.cpu_wait_ns + 20 * MS) for s in early.steps
    )
    books = msgspec.structs.replace(books, steps=slow + late.steps)
    assert cold_start(with_process(books, ready_ns=early.accounts[0].start_ns)) is None


def renamed(accounts):
    return tuple(msgspec.structs.replace(account, request_id=f"late-{account.request_id}") for account in accounts)


def test_requests_before_it_was_ready():
    books = Ward().run(*poisson(10, 60))
    error = ErrorInfo("overloaded_error", "the engine is not ready yet", "not_ready", 503)
    refused = [
        msgspec.structs.replace(a, request_id=f"early-{i}", finish_reason="refused", error=error)
        for i, a in enumerate(books.accounts[:20])
    ]
    books = msgspec.structs.replace(books, accounts=(*refused, *books.accounts))
    assert names(books) == ["cold_start"]
    assert isinstance(books.facts.processes[0], Process)


@pytest.mark.parametrize("output", [200, 300])
def test_prompts_that_come_first_and_are_decoded_later_are_no_cold_start(output):
    """No later step computes a prompt, so nobody knows what one takes."""
    ward = Ward(step_ms=10, token_ms=0.15, settings={"max_num_batched_tokens": 512})
    books = ward.run(*[Case(100 * i, ids(900, i), output) for i in range(24)])
    late_ns = books.accounts[0].start_ns + 5 * 10**9
    assert not any(step.prefill_tokens for step in books.steps if step.begin_ns > late_ns)
    assert cold_start(with_process(books, ready_ns=books.accounts[0].start_ns)) is None
