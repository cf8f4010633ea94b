"""KV memory: waits for blocks and preemptions are named when they were, and not when they were not."""

from test_rules_queue import names, poisson
from ward import Case, Ward, ids

from splittime.diagnose.doctor import diagnose

TIGHT = {"max_model_len": 512, "num_blocks": 34, "max_num_seqs": 32}


def test_requests_wait_for_blocks():
    """Long prompts, short answers: the whole prompt's blocks are leased at admission, so the queue waits for them."""
    diagnosis = diagnose(Ward(settings=TIGHT).run(*poisson(20, 80, prompt=240, output=16)))
    first = diagnosis.findings[0]
    assert first.name == "kv_bound"
    assert first.cure.flags[0] == "--kv-cache-memory-bytes"
    assert next(fact.value for fact in first.evidence if fact.what == "requests running at most") <= 3


def test_room_for_all_cures_it():
    assert names(Ward(settings=TIGHT | {"num_blocks": 1024}).run(*poisson(20, 80, prompt=240, output=16))) == []


def test_answers_that_outgrow_the_cache_are_thrown_out():
    """Short prompts, long answers: they are admitted together and have no room to grow."""
    cases = [Case(170 * i, ids(16, i), 200) for i in range(40)]
    diagnosis = diagnose(Ward(settings=TIGHT).run(*cases))
    assert diagnosis.findings[0].name == "preemption_thrash"
    assert diagnosis.findings[0].step_ids


def test_no_prescription_of_memory_without_a_wait_for_it():
    """Slots are short, blocks are not."""
    assert "kv_bound" not in names(Ward(settings=TIGHT | {"max_num_seqs": 1}).run(*poisson(25, 80)))
