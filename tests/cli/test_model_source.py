"""From a name to a folder, and what is said when there is none."""

import pytest

from splittime.cli import model_source
from splittime.core.errors import ConfigError


def test_a_folder_is_itself(model_folder):
    assert model_source.locate(str(model_folder)) == model_folder
    assert model_source.default_name(str(model_folder), model_folder) == model_folder.name


def test_what_is_missing_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lacks tokenizer.json, \*.safetensors"):
        model_source.locate(str(tmp_path))


@pytest.mark.parametrize("name", ["nothing-here", "../x/y/z", "a b/c"])
def test_what_was_looked_for_is_said(name):
    with pytest.raises(ConfigError, match="not a Hugging Face id"):
        model_source.locate(name)


def test_a_file_is_no_model(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        model_source.locate(str(file))


def test_the_hub_that_cannot_be_reached_says_so(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def unreachable(*args, **kwargs):
        assert kwargs["allow_patterns"] == list(model_source.HUB_PATTERNS)
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ConfigError, match="the Hugging Face Hub did not give it: no network"):
        model_source.locate("owner/name")


def test_a_hub_id_keeps_its_name(monkeypatch, model_folder):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(model_folder))
    assert model_source.locate("owner/name") == model_folder
    assert model_source.default_name("owner/name", model_folder) == "owner/name"


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-here/model"])
def test_a_name_that_cannot_be_looked_for_is_refused(name):
    with pytest.raises(ConfigError, match=r"cannot look for|no folder"):
        model_source.locate(name)
