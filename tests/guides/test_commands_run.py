"""Every command in README.md and the guides does what the page says: it is run, on loopback, with the packaged model.

`tests/docs/test_pages.py` lists what is not run, and finds commands that hide.
"""

from pathlib import Path

import pytest
from known_replicas import REPLICA
from msgspec.structs import replace
from pages import PAGES, ROOT, blocks, runnable
from readers import Reader, Server

from benchmarks.server_process import free_port
from splittime.plan.load import requests_for
from splittime.simulate.change import Change
from splittime.simulate.recorded import written_ledger

LONG = [f"docs/guides/{name}.md" for name in ("access", "distill", "parallel", "quality", "quantize", "sleep")]
"""Left to `make check-all`: what each does is tested elsewhere too, in the tests of its package."""


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A folder with what the pages take for granted: a model, the same as a GGUF file, and some text."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "model").symlink_to(ROOT / "src" / "splittime" / "packaged" / "code")
    sources = sorted((ROOT / "src" / "splittime").rglob("*.py"))[:60]
    (folder / "text.txt").write_text("<|endoftext|>".join(path.read_text()[:1500] for path in sources))
    load = {"rate": 6.0, "duration_s": 8.0, "input_tokens": "128", "output_tokens": "48", "seed": 1}
    slow = replace(REPLICA, costs=replace(REPLICA.costs, device=(20e6, *REPLICA.costs.device[1:])))  # soon planned
    with written_ledger(slow.facts, folder / "known.sqlite") as ledger:
        slow.run_each(requests_for(load, slow), Change(), 0, ledger.add_account, ledger.add_step)
    return folder


@pytest.fixture(scope="module")
def gguf_file(world: Path) -> Path:
    pytest.importorskip("gguf")
    from random_models import make
    from test_gguf_models import VOCABULARY, write

    make("llama", world / "random")
    write(world / "random", world / "model.gguf", **VOCABULARY)
    return world / "model.gguf"


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One plain `splittime serve` for all pages that start nothing else."""
    reader = Reader(tmp_path_factory.mktemp("shared"))
    server = Server("splittime serve", reader.folder, reader.environment, free_port())
    yield server
    assert server.end() == 0


@pytest.fixture
def reader(world: Path, tmp_path: Path, shared: Server):
    for path in world.iterdir():
        (tmp_path / path.name).symlink_to(path)
    made = Reader(tmp_path, shared)
    yield made
    made.end()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.sweep] * (page in LONG)) for page in PAGES if runnable(page)]
)
def test_its_commands_run(page: str, request: pytest.FixtureRequest, world: Path):
    if page == "docs/guides/gguf.md":
        request.getfixturevalue("gguf_file")
    reader = request.getfixturevalue("reader")
    for block in runnable(page):
        reader.read(block)


def test_a_command_that_fails_is_found(tmp_path: Path, shared: Server):
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\nsplittime nosuch\n```\n\n<!-- exits 0, 2: for the test -->\n```sh\nsplittime explain\n```\n"
    )
    reader = Reader(tmp_path, shared)
    first, second = blocks(str(page))
    for block in (first, second):
        with pytest.raises(AssertionError, match="exit code 2"):
            reader.read(block)
