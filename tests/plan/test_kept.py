"""Which of the calibrations that are kept holds for a server, or for this machine."""

import os
import time

import msgspec
import pytest
from known_replicas import ONE_AT_A_TIME

from splittime.core.errors import ConfigError
from splittime.core.facts import Machine
from splittime.ledger.facts import ServerFacts
from splittime.plan.kept import age_words, keep, kept_for, kept_here, require_kept_for

HERE = Machine(cpu="this processor", cores=2, threads=2)
THERE = msgspec.structs.replace(HERE, cpu="that processor", cores=64)


def facts(machine=HERE, version="1", **settings) -> ServerFacts:
    return ServerFacts(version=version, model="small", max_model_len=1024, settings=settings, machine=machine)


def kept(folder, about: ServerFacts):
    costs = msgspec.structs.replace(ONE_AT_A_TIME.costs, about={"model": about.model, "version": about.version})
    replica = msgspec.structs.replace(
        ONE_AT_A_TIME, costs=costs, machine=about.machine, settings={"num_threads": 2, **about.settings}
    )
    return keep(replica, about, folder)


def here(folder, version="1"):
    return kept_here({(HERE.cpu, HERE.cores)}, version, folder)


def test_it_is_found_by_what_a_server_says_of_itself(tmp_path):
    path = kept(tmp_path, facts())
    assert kept_for(facts(), tmp_path).path == path
    assert kept_for(facts(max_num_seqs=3), tmp_path).path == path
    for name in (
        "num_threads",
        "quantization",
        "dtype",
        "kv_cache_dtype",
        "linear_backend",
        "async_scheduling",
        "enforce_eager",
    ):
        assert kept_for(facts(**{name: "other"}), tmp_path) is None
    assert kept_for(facts(machine=THERE), tmp_path) is None
    assert kept_for(facts(version="2"), tmp_path) is None


def test_a_server_s_calibration_has_the_slots_and_the_cache_that_it_has_now(tmp_path):
    kept(tmp_path, facts(max_num_seqs=3, num_blocks=999, max_num_batched_tokens=77))
    now = facts(max_num_seqs=5, num_blocks=64, max_num_batched_tokens=128, max_queued_requests=9)
    found = require_kept_for(msgspec.structs.replace(now, max_model_len=512), tmp_path).replica
    assert (found.config.max_num_seqs, found.config.num_blocks) == (5, 64)
    assert (found.config.max_num_batched_tokens, found.config.max_model_len) == (128, 512)
    assert found.limits.max_queued_requests == 9


def test_a_server_without_one_is_told_how_the_nearest_differs(tmp_path):
    with pytest.raises(ConfigError, match=r"no calibration of this server is kept here$"):
        require_kept_for(facts(), tmp_path)
    kept(tmp_path, facts(num_threads=2))
    with pytest.raises(ConfigError, match=r"differs in num_threads \(2 there, 4 here\)") as raised:
        require_kept_for(facts(num_threads=4), tmp_path)
    assert "--url" in str(raised.value.info.hint)


def test_the_one_of_this_machine_is_taken_and_says_how_old_it_is(tmp_path):
    path = kept(tmp_path, facts())
    kept(tmp_path, facts(machine=THERE))
    os.utime(path, (0, time.time() - 3 * 86_400 - 5))
    found = here(tmp_path)
    assert found.path == path
    assert str(found) == f"the calibration of small on this processor, 2 cores, 3 days old: {path}"


def test_another_machine_s_is_refused_by_name(tmp_path):
    path = kept(tmp_path, facts(machine=THERE))
    with pytest.raises(ConfigError, match=r"of another machine than this one \(this processor, 2 cores\)") as raised:
        here(tmp_path)
    assert str(path) in raised.value.info.message
    assert "name its file" in str(raised.value.info.hint)


def test_another_version_s_is_refused(tmp_path):
    kept(tmp_path, facts(version="0"))
    with pytest.raises(ConfigError, match="another version than 1"):
        here(tmp_path)
    (tmp_path / "old.json").write_text("{}")
    for path in tmp_path.glob("small*"):
        path.unlink()
    with pytest.raises(ConfigError, match="1 of another version cannot be read"):
        here(tmp_path)


def test_nobody_guesses_among_several(tmp_path):
    for threads in (1, 2):
        kept(tmp_path, facts(num_threads=threads))
    with pytest.raises(ConfigError, match="2 calibrations of this machine") as raised:
        here(tmp_path)
    assert "(num_threads 1)" in raised.value.info.message
    assert "URL" in str(raised.value.info.hint)


@pytest.mark.parametrize(
    ("seconds", "words"), [(3, "less than a minute"), (61, "1 minute"), (7_300, "2 hours"), (10**6, "11 days")]
)
def test_an_age_in_words(seconds, words):
    assert age_words(seconds) == words
