"""From a name to a folder, and what is said when there is none."""

import pytest

from splittime.assemble import model_source
from splittime.core.errors import ConfigError


def test_a_folder_is_itself(model_folder):
    assert model_source.locate(str(model_folder)) == model_folder
    assert model_source.default_name(str(model_folder), model_folder) == model_folder.name


def test_the_folder_that_one_is_in_has_its_name(model_folder, monkeypatch):
    monkeypatch.chdir(model_folder)
    assert model_source.default_name(".", model_source.locate(".")) == model_folder.name


def test_what_is_missing_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"lacks tokenizer.json, \*.safetensors"):
        model_source.locate(str(tmp_path))


def test_random_weights_need_no_weights(tmp_path, monkeypatch):
    import huggingface_hub

    def fetched(name, allow_patterns):
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    with pytest.raises(ConfigError, match=r"lacks config\.json, tokenizer\.json$"):
        model_source.locate(str(tmp_path), "dummy")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert model_source.locate(str(tmp_path), "dummy") == tmp_path
    assert model_source.locate("owner/name", "dummy") == tmp_path


@pytest.mark.parametrize("name", ["nothing-here", "../x/y/z", "a b/c"])
def test_what_was_looked_for_is_said(name):
    with pytest.raises(ConfigError, match="neither a Hugging Face id"):
        model_source.locate(name)


def test_a_gguf_file_is_itself_and_its_folder_means_it(tmp_path):
    file = tmp_path / "tiny-q8_0.gguf"
    file.write_bytes(b"GGUF")
    for given in (file, tmp_path):
        assert model_source.locate(str(given)) == file
        assert model_source.default_name(str(given), file) == "tiny-q8_0"


def test_a_gguf_model_of_parts_is_its_first(tmp_path):
    first, second = (tmp_path / f"big-0000{number}-of-00002.gguf" for number in (1, 2))
    for part in (first, second):
        part.write_bytes(b"GGUF")
    assert model_source.locate(str(tmp_path)) == model_source.locate(str(first)) == first
    assert model_source.default_name(str(first), first) == "big"
    with pytest.raises(ConfigError, match=r"is part 2 of 2; name the first, .*big-00001-of-00002\.gguf"):
        model_source.locate(str(second))


def test_two_gguf_models_in_a_folder_are_one_too_many(tmp_path):
    for name in ("a-q4_0.gguf", "a-q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"holds 2 models \(a-q4_0\.gguf, a-q8_0\.gguf\); name one file"):
        model_source.locate(str(tmp_path))


def test_a_checkpoint_in_a_folder_goes_before_a_gguf_file(model_folder, tmp_path):
    for path in model_folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "same.gguf").write_bytes(b"GGUF")
    assert model_source.locate(str(tmp_path)) == tmp_path
    assert model_source.load_tokenizer(tmp_path).encode("ab") != []


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


def test_packaged_models_have_names_and_a_folder_goes_before_them(tmp_path, monkeypatch):
    assert model_source.locate("code") == model_source.locate(None)
    draft = model_source.locate("code-draft")
    assert draft.name == "code-draft"
    assert model_source.default_name("code-draft", draft) == "splittime-code-draft"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "tiny.gguf").write_bytes(b"GGUF")
    assert model_source.locate("code") == tmp_path.joinpath("code", "tiny.gguf").relative_to(tmp_path)
