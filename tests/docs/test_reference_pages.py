"""docs/reference/ says what the code says."""

import importlib.util
from pathlib import Path

from splittime.assemble.settings import SETTINGS
from splittime.core import errors
from splittime.ledger.stages import Stage

ROOT = Path(__file__).parents[2]


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_current():
    assert load_generator().outdated() == [], "run: python docs/generate.py"


def test_pages_are_complete():
    generator = load_generator()
    settings_page, stages_page, errors_page = (page() for page in list(generator.PAGES.values())[:3])
    assert all(f"`{setting.name}`" in settings_page for setting in SETTINGS)
    assert all(f"`{stage}`" in stages_page for stage in Stage)
    assert all(cls.__name__ in errors_page for cls in errors.ERROR_CLASSES)


def test_a_page_that_was_edited_by_hand_is_found(monkeypatch, tmp_path):
    generator = load_generator()
    monkeypatch.setattr(generator, "FOLDER", tmp_path / "reference")
    assert generator.outdated() == list(generator.PAGES)
    generator.write()
    assert generator.outdated() == []
    (tmp_path / "reference" / "stages.md").write_text("mine")
    assert generator.outdated() == ["stages.md"]
