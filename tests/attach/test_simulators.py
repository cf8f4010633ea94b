"""Whose scheduler runs a ledger again, where vLLM is and where it is not."""

import pytest

from splittime.attach import simulators, versions
from splittime.attach.settings import settings_of
from splittime.core.errors import ConfigError
from splittime.ledger.facts import ServerFacts
from splittime.simulate import replay, replica

TOLD = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 20, "block_size": 16, "max_model_len": 256}


def facts(engine: str = "vllm 0.32.0", **more: object) -> ServerFacts:
    return ServerFacts(version="", model="", max_model_len=256, engine=engine, settings=TOLD | more)


def test_a_ledger_of_ours_is_run_by_ours() -> None:
    assert simulators.simulator_of(facts("")) == (replica.replica_of, replay.replay)


def test_without_vllm_its_ledger_is_refused_with_where_to_run_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: None)
    with pytest.raises(ConfigError, match="is not in this environment") as refused:
        simulators.simulator_of(facts())
    assert "that vLLM's environment" in str(refused.value.info.hint)


def test_another_release_than_the_recorded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.32.1")
    with pytest.raises(ConfigError, match=r"vLLM here is 0\.32\.1"):
        simulators.simulator_of(facts())


def test_a_release_that_was_never_tested_is_refused_unless_one_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "vllm_version", lambda: "0.1.0")
    with pytest.raises(ConfigError, match="never tested"):
        simulators.simulator_of(facts("vllm 0.1.0 (untested)"))
    monkeypatch.setenv(versions.UNTESTED, "1")
    assert simulators.simulator_of(facts("vllm 0.1.0 (untested)")).to_replica is not replica.replica_of


def test_an_engine_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="no scheduler of sglang"):
        simulators.simulator_of(facts("sglang 0.5"))


def test_our_replica_is_of_no_other_engine() -> None:
    from splittime.simulate.recorded import Recorded

    with pytest.raises(ConfigError, match="whose scheduler is not ours"):
        replica.replica_of(Recorded([], [], facts()))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_speculative_tokens", 3),
        ("kv_connector", True),
        ("kv_cache_groups", ["FullAttentionSpec", "MambaSpec"]),
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 2),
    ],
)
def test_an_engine_that_one_scheduler_does_not_explain_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"whose {name} is"):
        settings_of(facts(**{name: value}))


def test_settings_are_those_that_the_ledger_tells() -> None:
    told = settings_of(facts(watermark=0.1, policy="priority", async_scheduling=True, device="cpu"))
    assert (told.num_blocks, told.watermark, told.policy, told.async_scheduling) == (20, 0.1, "priority", True)


def test_facts_without_blocks_are_refused() -> None:
    told = {name: value for name, value in TOLD.items() if name != "num_blocks"}
    with pytest.raises(ConfigError, match="num_blocks"):
        settings_of(ServerFacts(version="", model="", max_model_len=256, engine="vllm 0.32.0", settings=told))
