"""A plan's server from a file, whatever the file is, and from a data sheet."""

from pathlib import Path

import pytest
from known_replicas import REPLICA

from splittime.core.errors import ConfigError
from splittime.core.facts import TokenCost
from splittime.plan import sources
from splittime.plan.sources import replica_in, replica_of_device
from splittime.simulate.change import MAX_BLOCKS
from splittime.simulate.recorded import SQLITE


def test_a_file_that_nobody_may_read_is_an_error_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    path = tmp_path / "run.json"
    path.write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ConfigError, match=r"cannot read .*run\.json: Permission denied"):
        replica_in(str(path), {})


def test_a_ledger_is_not_read_whole_to_see_whether_it_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "today.sqlite"
    path.write_bytes(SQLITE)
    monkeypatch.delattr(Path, "read_bytes")
    monkeypatch.setattr(sources, "_own", lambda path: REPLICA)
    assert replica_in(str(path), {}) == REPLICA


def test_a_small_model_on_a_large_device_has_as_many_blocks_as_are_simulated() -> None:
    tiny = TokenCost(
        weight_bytes=10**6, kv_bytes_per_token=256, operations_per_token=10**6, operations_per_context_token=64
    )
    replica = replica_of_device("H100", tiny, 10**6, 2048, "bfloat16", {"max_num_seqs": 8}, "2 x (1 layers)")
    assert replica.config.num_blocks == MAX_BLOCKS
    assert replica.costs.about["kv_formula"] == "2 x (1 layers)"


@pytest.mark.parametrize(("content", "words"), [(b"", "is empty"), (b"notes", "is neither a ledger nor a calibration")])
def test_a_file_of_another_kind_says_what_is_taken(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        replica_in(str(path), {})
    assert "Name a ledger" in error.value.info.hint
