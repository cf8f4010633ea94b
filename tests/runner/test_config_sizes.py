"""A model's sizes from its config alone, against those of the model that was loaded."""

from pathlib import Path

import pytest

from splittime.core.errors import ConfigError
from splittime.packaged import __path__ as packaged

pytest.importorskip("torch")

from splittime.runner.config import RunnerConfig
from splittime.runner.config_sizes import sizes_of_config
from splittime.runner.load import load

CODE = Path(next(iter(packaged))) / "code"


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_they_are_those_of_the_loaded_model(quantization: str | None) -> None:
    config = RunnerConfig(
        model_path=str(CODE), dtype="bfloat16", kernels="torch", quantization=quantization, packed_cache="off"
    )
    _, _, resolved, loaded, _ = load(config, lambda name, begin, end: None)
    sizes = sizes_of_config(CODE, quantization)
    assert sizes.cost == loaded
    assert sizes.weights_bytes <= resolved.weights_bytes + resolved.embedding_bytes
    assert sizes_of_config(CODE / "config.json", quantization).cost == loaded


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision 'int3' is not known"):
        sizes_of_config(CODE, "int3")
    with pytest.raises(ConfigError, match="kv_precision 'int4' is not known"):
        sizes_of_config(CODE, kv_precision="int4")
