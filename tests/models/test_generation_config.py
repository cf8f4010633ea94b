"""generation_config.json: what it advises, which fields, and what each way of reading takes of it."""

import json

import pytest
from tiny_config import CONFIG

from splittime.core.errors import ConfigError
from splittime.models.config import load_config

ADVICE = {
    **{"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 40},
    **{"eos_token_id": [5, 6], "do_sample": False, "num_beams": 4, "transformers_version": "5.0"},
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def read(folder, way, **values):
    (folder / "generation_config.json").write_text(json.dumps(values))
    return load_config(folder, way)


def test_what_is_advised_by_the_names_of_sampling_parameters(folder):
    config = read(folder, "auto", **ADVICE)
    assert config.sampling == {
        **{"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "max_tokens": 40}
    }
    assert config.eos_token_ids == (5, 6, 2)


def test_vllm_takes_the_ends_and_none_nothing(folder):
    vllm, none = read(folder, "vllm", **ADVICE), read(folder, "none", **ADVICE)
    assert (vllm.sampling, vllm.eos_token_ids) == ({}, (5, 6, 2))
    assert (none.sampling, none.eos_token_ids) == ({}, (2,))


def test_a_null_says_nothing_and_minus_one_is_off(folder):
    assert read(folder, "auto", temperature=None, top_k=-1).sampling == {"top_k": 0}
    (folder / "generation_config.json").unlink()
    assert load_config(folder).sampling == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, 1e9, "0.7", True, [1])],
        *[("top_p", 1.5), ("top_k", -2), ("top_k", 1.5), ("min_p", 2.0), ("repetition_penalty", 0)],
        *[("max_new_tokens", 0), ("max_new_tokens", 2**70)],
    ],
)
def test_what_cannot_be_meant_is_refused_unless_it_is_not_to_be_read(folder, field, value):
    with pytest.raises(ConfigError, match=r"generation_config\.json: ") as refused:
        read(folder, "auto", **{field: value})
    assert "--generation-config vllm" in refused.value.info.hint
    assert read(folder, "vllm", **{field: value}).sampling == {}
