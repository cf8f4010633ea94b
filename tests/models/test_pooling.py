"""How a model embeds, by its files: sentence-transformers' modules, Matryoshka fields, and what is refused by name."""

import json
from pathlib import Path

import pytest

from splittime.core.errors import ConfigError
from splittime.core.facts import Pooling
from splittime.models.pooling import gguf_pooling, read_pooling

SIZE = 64
KINDS = ("Transformer", "Pooling", "Normalize")


def write(folder: Path, kinds: tuple[str, ...] = KINDS, path: str = "1_Pooling", **pooling: object) -> Path:
    modules = [{"idx": n, "type": f"sentence_transformers.models.{kind}", "path": ""} for n, kind in enumerate(kinds)]
    if len(modules) > 1:
        modules[1]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    if path == "1_Pooling":
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps({"word_embedding_dimension": SIZE, **pooling}))
    return folder


def test_without_files_it_is_the_last_token_normalised(tmp_path: Path) -> None:
    said = read_pooling(tmp_path, {}, SIZE)
    assert said == Pooling(kind="last", is_normalised=True, named_by="", size=SIZE, may_be_cut=True)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}, "last"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_the_pooling_of_the_files(tmp_path: Path, pooling: dict, kind: str) -> None:
    said = read_pooling(write(tmp_path, **pooling), {}, SIZE)
    assert said == Pooling(kind=kind, named_by="modules.json", size=SIZE)


def test_without_a_normalisation_there_is_none(tmp_path: Path) -> None:
    assert not read_pooling(write(tmp_path, KINDS[:2], pooling_mode="mean"), {}, SIZE).is_normalised


@pytest.mark.parametrize(
    ("kinds", "pooling", "words"),
    [
        (("Transformer", "Pooling", "Dense", "Normalize"), {"pooling_mode": "mean"}, "Transformer, Pooling, Dense"),
        (("Transformer",), {}, "asks for Transformer; "),
        (KINDS, {"pooling_mode_max_tokens": True}, "pooling by max_tokens is not implemented"),
        (KINDS, {"pooling_mode": "weightedmean"}, "pooling by weightedmean is not implemented"),
        (KINDS, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "by cls_token and mean_tokens"),
        (KINDS, {}, "pooling by nothing"),
    ],
)
def test_what_is_not_implemented_is_named_and_only_embeddings_are_refused(
    tmp_path: Path, kinds: tuple[str, ...], pooling: dict, words: str
) -> None:
    assert words in read_pooling(write(tmp_path, kinds, **pooling), {}, SIZE).refusal


@pytest.mark.parametrize("kinds", [("Transformer", "Dense", "Pooling"), ("Dense", *KINDS), (*KINDS, "Dense")])
def test_a_dense_layer_is_only_behind_the_pooling(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    for name in ("0", "1_Pooling"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"out_features": 8, "pooling_mode": "mean"}))
    modules = [{"type": kind, "path": "0" if kind == "Dense" else "1_Pooling"} for kind in kinds]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert "asks for " + ", ".join(kinds) in read_pooling(tmp_path, {}, SIZE, has_dense=True).refusal


def test_vectors_may_be_cut_up_to_what_the_last_layer_gives(tmp_path: Path) -> None:
    for name, config in {"1_Pooling": {"pooling_mode": "mean"}, "2_Dense": {"out_features": 96}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense")]
    (tmp_path / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in modules]))
    said = read_pooling(tmp_path, {"matryoshka_dimensions": [64, 96]}, SIZE, has_dense=True)
    assert (said.size, said.sizes, said.refusal) == (96, (64, 96), "")
    with pytest.raises(ConfigError, match="matryoshka_dimensions"):
        read_pooling(tmp_path, {"matryoshka_dimensions": [97]}, SIZE, has_dense=True)


@pytest.mark.parametrize(
    ("values", "sizes", "may_be_cut"),
    [
        ({"is_matryoshka": True}, (), True),
        ({"is_matryoshka": False}, (), False),
        ({"matryoshka_dimensions": [16, 32]}, (16, 32), True),
        ({"is_matryoshka": False, "matryoshka_dimensions": [16]}, (16,), True),
    ],
)
def test_whether_it_may_be_cut(tmp_path: Path, values: dict, sizes: tuple[int, ...], may_be_cut: bool) -> None:
    said = read_pooling(tmp_path, values, SIZE)
    assert (said.sizes, said.may_be_cut) == (sizes, may_be_cut)


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", "", ".."])
def test_a_folder_elsewhere_is_not_read(tmp_path: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="plain name of one beside it"):
        read_pooling(write(tmp_path, path=path), {}, SIZE)


@pytest.mark.parametrize(
    ("content", "words"), [("[]", "names no module"), ("{", "cannot read"), ("[1]", "cannot read")]
)
def test_files_that_cannot_be_meant(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(ConfigError, match=words):
        read_pooling(tmp_path, {}, SIZE)
    (tmp_path / "modules.json").unlink()
    with pytest.raises(ConfigError, match="matryoshka_dimensions"):
        read_pooling(tmp_path, {"matryoshka_dimensions": [SIZE + 1]}, SIZE)


def test_the_pooling_of_a_gguf_file() -> None:
    key = "qwen3.pooling_type"
    assert [gguf_pooling(kind, key, SIZE).kind for kind in (None, 0, 1, 2, 3)] == [
        "last",
        "last",
        "mean",
        "cls",
        "last",
    ]
    assert [gguf_pooling(kind, key, SIZE).named_by for kind in (0, 3)] == ["", key]
    assert f"{key} 4 is not implemented" in gguf_pooling(4, key, SIZE).refusal
