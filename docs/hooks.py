"""What MkDocs asks while it builds the site.

It brings the repository's own pages (`PAGES`) into the site and turns the links to them: a page links to
`../../BENCHMARKS.md`, and in the site that page is `benchmarks.md`. It lists the decisions in `docs/adr`. A search
finds what explains a word (`FOUND_FIRST`) before what only has it (`FOUND_LAST`).
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "BENCHMARKS.md", "CHANGELOG.md", "CONTRIBUTING.md")
DECISIONS = sorted(path for path in (ROOT / "docs" / "adr").glob("*.md") if path.name != "index.md")
WIDE = ("api", "fields", "findings", "metrics", "settings", "stages")  # pages that are one table: no list of contents
FOUND_FIRST = {"concepts": 4.0, "guides": 4.0, "runbooks": 2.0, "index.md": 4.0, "start.md": 4.0}
FOUND_LAST = {"reference": 0.4}  # by folder or page: what a match counts in a search; `REST` else
REST = 0.05
LINK = re.compile(rf"\]\((?:\.\./)*({'|'.join(PAGES)})")


def on_config(config: Any, **_: Any) -> Any:
    """Adds the decisions to the navigation, under the section that begins with their index."""
    sections = [part for entry in config.nav for parts in entry.values() for part in parts if isinstance(part, dict)]
    listed = next(value for part in sections for value in part.values() if value == ["adr/index.md"])
    listed += [f"adr/{path.name}" for path in DECISIONS]
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the repository's pages. Links in them into `docs/` lose that folder."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name.lower(), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links at the repository's pages to where they are in the site. Gives wide tables the whole width, and each
    page its weight in a search."""
    if page.file.src_uri in {f"reference/{name}.md" for name in WIDE}:
        page.meta["hide"] = ["toc"]
    if page.file.src_uri == "adr/index.md":
        markdown += "\n" + "".join(f"* [{_title(path)}]({path.name})\n" for path in DECISIONS)
    folder = posixpath.dirname(page.file.src_uri)
    page.meta["search"] = {"boost": (FOUND_FIRST | FOUND_LAST).get(folder or page.file.src_uri, REST)}
    return LINK.sub(lambda found: f"]({posixpath.relpath(found[1].lower(), folder or '.')}", markdown)


def _title(path: Path) -> str:
    return path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").replace(". ", "\\. ", 1)
