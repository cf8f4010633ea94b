import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """A folder that looks like a model's: 256 tokens, each of them a byte. Nobody loads its weights."""
    folder = tmp_path_factory.mktemp("tiny-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch, tmp_path):
    """No settings file and no SPLITTIME_ variables of the machine that runs the tests."""
    import os

    for name in [name for name in os.environ if name.startswith("SPLITTIME_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
