"""`make docs` builds without a warning, and who reads the site needs no network. README.md links to what exists."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT

FETCHED = re.compile(
    r"<(?:img|script|iframe|source)\b[^>]*\bsrc=[\"']?([^\"' >]+)|<link\b[^>]*\bhref=[\"']?([^\"' >]+)"
)
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")
STARTERS = ("CONTRIBUTING.md", "README.md")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if importlib.util.find_spec("material") is None:
        pytest.skip("MkDocs Material is not installed: make setup")
    folder = tmp_path_factory.mktemp("site")
    build = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert build.returncode == 0, build.stderr
    assert "WARNING" not in build.stderr
    return folder


def test_pages_fetch_nothing_from_elsewhere(site: Path):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        for found in FETCHED.findall(page.read_text(encoding="utf-8")):
            assert not "".join(found).startswith(("http:", "https:", "//")), f"{page.name} fetches {found}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_no_page_asks_for_what_material_would_fetch(site: Path):
    """Material's script fetches a library for diagrams when a page has one."""
    assert all('class="mermaid"' not in page.read_text(encoding="utf-8") for page in site.rglob("*.html"))


@pytest.mark.parametrize("name", [name for name in STARTERS if (ROOT / name).exists()])
def test_links_of_the_first_pages_lead_somewhere(name: str):
    targets = [target for target, _ in LINK.findall((ROOT / name).read_text()) if not target.startswith("http")]
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
