"""A picture of each reversal, drawn from what the smallest form of the script finds."""

import copy
import json

import pytest

pytest.importorskip("triton")

from benchmarks.gpu import pictures


def line_of(result) -> str:
    return json.dumps({"part": "reversals_cache", "exit": 0, "seconds": 1.0, "result": result, "errors": ""})


def test_each_reversal_has_its_picture(tmp_path, capsys, reversals_found):
    pytest.importorskip("matplotlib")
    found = copy.deepcopy(reversals_found)
    (tmp_path / "a.jsonl").write_text(line_of(found))
    assert pictures.main([str(tmp_path), str(tmp_path / "tiny")]) == 2
    assert "smallest form" in capsys.readouterr().err
    found["settings"]["tiny"] = False
    (tmp_path / "a.jsonl").write_text(line_of(found))
    assert pictures.main([str(tmp_path), str(tmp_path / "drawn")]) == 0
    drawn = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert drawn == {f"reversal_{name}.png" for name in pictures.PICTURES}


def test_nothing_to_draw(tmp_path, capsys):
    assert pictures.main([str(tmp_path), str(tmp_path)]) == 2
    assert "no reversals" in capsys.readouterr().err
