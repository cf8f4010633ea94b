"""The disk is full when a run is to be kept: what fits is kept, what does not is named, and the table is shown."""

import asyncio
import os
import sys

from splittime.bench.mock_server import MockServer, Timings

LIMITED = """
import resource, sys
from splittime.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
main()
"""


async def test_a_full_disk_takes_only_what_does_not_fit(tmp_path):
    """A limit on the size of files stands for the disk: a table of 100 requests fits, a page and all do not."""
    files = {name: tmp_path / "kept" / f"run.{name}" for name in ("json", "html", "csv")}
    async with MockServer(Timings(ttft_ns=0, itl_ns=0)) as server:
        load = ["--concurrency", "4", "--num-requests", "100", "--input-tokens", "5", "--output-tokens", "20"]
        kept = ["--out", files["json"], "--html", files["html"], "--csv", files["csv"]]
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", LIMITED, "bench", "run", server.url, "--workers", "1", *load, *kept],
            env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=-1,
            stderr=-1,
        )
        told, said = await process.communicate()
        status, told, said = process.returncode, told.decode(), " ".join(said.decode().split())
    assert status == 2, said
    assert "TTFT, response" in told
    for name in ("json", "html"):
        assert f"cannot write {files[name]}: File too large" in said
    assert "Nor could it be kept" in said
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["run.csv"]
    assert len(files["csv"].read_text().splitlines()) == 101
